"""What preflight asks of real steps: sampler and trainer, rewards that differ, and the gradient.

One generation batch at the run's own temperature, and two optimizer steps on made-up rewards, by
the trainer that the run would use. The adapter is put back afterwards; nothing is saved.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from transformers import TrainerCallback

from geoguessr_rl.artifacts import UserError, blocks
from geoguessr_rl.backends import stack
from geoguessr_rl.backends.probes import holding, max_gap
from geoguessr_rl.reward import completion_text

NAMED = 3  # of the modules that fail
SHOWN_CHARS = 200  # of a raw completion


@dataclass(frozen=True, slots=True)
class Rollouts:
    """One real generation batch as TRL scores it.

    Attributes:
        gap: Sampler and trainer, mean absolute difference in nats a token; NaN without vLLM.
        largest_gap: The largest one.
        rewards: The total reward of each completion, group by group.
        formats: 1.0 where a completion parses.
        text: The first completion.
        groups: Groups in the batch.
    """

    gap: float
    largest_gap: float
    rewards: list[float]
    formats: list[float]
    text: str
    groups: int


def roll_out(trainer: Any) -> Rollouts:
    """Generates and scores one batch at the run's own temperature, without learning from it."""
    size = trainer.args.generation_batch_size
    rows = [
        trainer.train_dataset[number]
        for number in range(size // trainer.num_generations)
        for _ in range(trainer.num_generations)
    ]
    was_training = trainer.model.training
    trainer.model.train()  # in TRL's eyes anything else is an evaluation
    trainer.state.max_steps = trainer.args.max_steps  # for a curriculum's scale
    try:
        trainer._generate_and_score_completions(rows)
    finally:
        trainer.model.train(was_training)
    figures, logs = trainer._metrics["train"], trainer._logs
    none = [math.nan]  # without vLLM
    return Rollouts(
        gap=figures.get("sampling/sampling_logp_difference/mean", none)[-1],
        largest_gap=figures.get("sampling/sampling_logp_difference/max", none)[-1],
        rewards=list(logs["rewards"]["reward_total"])[-size:],
        formats=list(logs["rewards"]["reward_format"])[-size:],
        text=completion_text(list(logs["completion"])[-size]),
        groups=size // trainer.num_generations,
    )


def sampler_gap(trainer: Any, rollouts: Rollouts) -> str:
    """Checks TRL's own measure of how far sampler and trainer are apart on sampled tokens."""
    temperature = trainer.args.temperature
    measured = (
        f"{rollouts.gap:.5f} nats a token on {len(rollouts.rewards)} completions at temperature "
        f"{temperature:g}, at most {rollouts.largest_gap:.3f}"
    )
    if not rollouts.gap <= max_gap(trainer):  # a NaN is no pass
        raise stack.StackFaultError(
            f"{measured}; over {max_gap(trainer)} it is no rounding, and the update would correct "
            "for another policy: leave trainer.top_p at 1.0 and top_k, min_p and "
            "repetition_penalty out; else see the lines above, and install from the lock file"
        )
    return measured


def reward_spread(rollouts: Rollouts) -> str:
    """Checks that real groups have something to learn from."""
    groups = blocks(rollouts.rewards, len(rollouts.rewards) // rollouts.groups)
    deviations = [pstdev(group) for group in groups]
    flat = sum(deviation == 0 for deviation in deviations) / len(groups)
    parsing, raw = fmean(rollouts.formats), rollouts.text[:SHOWN_CHARS]
    measured = (
        f"{flat:.0%} of {len(groups)} groups without spread, mean deviation within a group "
        f"{fmean(deviations):.3f}, {parsing:.0%} of completions parse"
    )
    if parsing == 0:
        raise UserError(
            f"{measured}, and the first is {raw!r}; look for a thinking block or an ignored tag, "
            "raise trainer.max_completion_length, or warm the model up with scripts/warmup_sft.py"
        )
    if flat == 1:
        raise UserError(
            f"{measured}, and the first is {raw!r}; nothing would be learned: filter the photos "
            "with scripts/filter_learnable.py, or raise trainer.temperature"
        )
    return measured


class GradientWatch(TrainerCallback):
    """Notes at each optimizer step which weights have no gradient."""

    def __init__(self) -> None:
        """Has seen no step yet."""
        self.silent: list[dict[str, list[str]]] = []
        self.visual: list[str] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks at every weight of the model."""
        silent: dict[str, list[str]] = {"lora_A": [], "lora_B": []}
        for name, weight in kwargs["model"].named_parameters():
            gradient = weight.grad
            for part, names in silent.items():
                alive = gradient is not None and bool(gradient.isfinite().all() & gradient.any())
                if part in name and not alive:
                    names.append(name)
            if ".visual." in name and (weight.requires_grad or gradient is not None):
                self.visual.append(name)
        self.silent.append(silent)


def distinct_rewards(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Rewards that differ within every group, whatever the model answers."""
    return [float(number) for number in range(len(completions))]


def gradient_flows(trainer: Any) -> str:
    """Trains two steps on made-up rewards, and checks which weights the gradient reaches.

    A LoRA's A has no gradient while its B is zero, so that A counts from the second step on.
    """
    adapter = {name: w for name, w in trainer.model.named_parameters() if "lora_" in name}
    kept = {name: weight.detach().clone() for name, weight in adapter.items()}
    watch = GradientWatch()
    trainer.add_callback(watch)
    rewards = [distinct_rewards, *trainer.reward_funcs[1:]]
    score = trainer._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        outputs = score(inputs)
        if not outputs["advantages"].std() > 0:
            raise stack.StackFaultError(
                "made-up rewards that differ became equal advantages; mend trainer.scale_rewards"
            )
        outputs["advantages"] = outputs["advantages"] + 1  # or equal answers would cancel out
        return outputs

    trainer._step, trainer._buffered_inputs = 0, None  # as if never trained
    try:
        with holding(trainer, reward_funcs=rewards, _generate_and_score_completions=scored):
            trainer.train()
    finally:
        trainer.remove_callback(watch)
        for name, weight in adapter.items():
            weight.data.copy_(kept[name])
    if watch.visual:
        raise stack.StackFaultError(
            f"the frozen vision tower is trained: {_some(watch.visual)}; mend lora.exclude_modules"
        )
    for part, step, when in (("lora_B", 0, "backward pass"), ("lora_A", 1, "optimizer step")):
        if silent := watch.silent[step][part]:
            raise stack.StackFaultError(
                f"no gradient reaches {len(silent)} {part} after the first {when}: "
                f"{_some(silent)}; mend lora.target_modules, and what freezes them"
            )
    return f"reaches all {len(adapter) // 2} LoRA B at once and A after a step, no vision weight"


def _some(names: Sequence[str]) -> str:
    """Returns the first few names, shortened to what tells them apart."""
    plain = [name.removeprefix("base_model.model.") for name in names[:NAMED]]
    return ", ".join(plain) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
