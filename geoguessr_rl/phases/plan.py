"""Plan: a training config -> memory, seconds, steps, hours and dollars on GPUs that people rent.

It needs no GPU, no weights and no data, and measures nothing: `budget` predicts, under assumptions
that are printed first. A smoke test on the GPU that was chosen gives the true seconds a step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from geoguessr_rl import budget
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import planning
from geoguessr_rl.budget import Gpu, ModelShape, RunShape
from geoguessr_rl.config import Generation, GrpoConfig, ImagePolicy, VllmEngine
from geoguessr_rl.images import VISUAL_TOKEN_PIXELS
from geoguessr_rl.tables import columns

BUDGET_HOURS = 8.0
PHOTO_TOKENS = ImagePolicy().max_pixels // VISUAL_TOKEN_PIXELS


def run(config: GrpoConfig, *, processes: int | None = None) -> list[str]:
    """Returns the plan of a training run in lines of text.

    Args:
        config: The training config. A measured `seconds_per_step` adds the step arithmetic;
            `budget_hours` is 8 by default.
        processes: GPUs; by default as many as this process belongs to.

    Raises:
        UserError: The model or a key is unfit, or batch sizes contradict each other.
    """
    args = planning.trainer_args(config.trainer)
    if args.max_steps < 1:
        raise UserError("trainer.max_steps must be 1 or more; give the steps to plan for")
    model = planning.model_shape(config.model.name, config.lora)
    shape = planning.run_shape(config, args, PHOTO_TOKENS, processes)
    hours = config.budget_hours or BUDGET_HOURS
    plans = [_plan(model, shape, gpu, args.max_steps, hours) for gpu in budget.GPUS.values()]
    lines = [
        *describe(config.model.name, model, shape, args.max_steps),
        "",
        "Assumptions",
        *(f"  {line}" for line in budget.assumptions()),
        "",
        f"A GPU of each kind, {shape.processes} at work; GiB, seconds and dollars",
        *columns(zip(plans[0], *(plan.values() for plan in plans), strict=True)),
        "",
        *verdicts(model, shape),
    ]
    if config.seconds_per_step:
        try:
            measured = budget.step_lines(
                seconds_per_step=config.seconds_per_step,
                budget_hours=hours,
                max_steps=args.max_steps,
                rows=None,
                micro_batch=shape.micro_batch,
                accumulation=shape.accumulation,
                generations=shape.generations,
                generation_batch=shape.generation_batch,
                processes=shape.processes,
                dollars_per_hour=config.dollars_per_hour,
            )
        except ValueError as error:
            raise UserError(f"{error}; mend the trainer section") from None
        lines += ["", "With the seconds a step that you give", *(f"  {one}" for one in measured)]
    return lines


PHASES = {  # photos, completions of each
    "evaluate eval_osv": (1_000, 1),
    "evaluate OSV-5M's whole test set": (210_122, 1),
    "filter": (8_000, 4),
}
PREPARED = 4_900_000  # photos in OSV-5M's 98 train zips
CORES_A_GPU = 16
PREPARED_A_CORE = 130  # photos a second and core; 12,936 took 47 s on two cores
START_SECONDS = 120.0  # a worker loads its model


def on_clusters(config: GrpoConfig, gpus: Sequence[int], kind: str = "A100-80") -> list[str]:
    """Returns what each phase takes on so many GPUs of a kind: a Markdown table under its basis.

    Simulated: generation as `budget.step_plan` has it, a block a worker at a time, and nothing for
    the network. Training keeps the config's completions a step, however many GPUs share them.

    Args:
        config: The training config, whose model every phase uses.
        gpus: Numbers of GPUs.
        kind: One of `budget.GPUS`.
    """
    args = planning.trainer_args(config.trainer)
    model, gpu = planning.model_shape(config.model.name, config.lora), budget.GPUS[kind]
    run = planning.run_shape(config, args, PHOTO_TOKENS, 1)
    size, share = Generation().block_size, VllmEngine().gpu_memory_utilization

    def generating(photos: int, samples: int, count: int) -> float:
        made = min(size, photos) * samples
        block = replace(
            run, micro_batch=made, accumulation=1, generations=samples, generation_batch=made,
            vllm_share=share,
        )  # fmt: skip
        parts = budget.step_plan(model, block, gpu)
        blocks = math.ceil(math.ceil(photos / size) / count)
        return START_SECONDS + blocks * (parts["decode"] + parts["prefill"])

    def training(count: int) -> float | None:
        step = run.micro_batch * run.accumulation
        if step % count:
            return None
        micro = min(run.micro_batch, step // count)
        shared = replace(
            run, processes=count, micro_batch=micro, accumulation=step // count // micro
        )
        return args.max_steps * sum(budget.step_plan(model, shared, gpu).values())

    def row(phase: str, seconds: Sequence[float | None]) -> str:
        def cell(count: int, one: float | None) -> str:
            if one is None:
                return "–"
            took = f"{one / 60:.0f} min" if one < 3600 else f"{one / 3600:.1f} h"
            return f"{took}, {budget.run_dollars(one / 3600, gpu.dollars_per_hour * count):.2f} $"

        cells = [cell(count, one) for count, one in zip(gpus, seconds, strict=True)]
        return f"| {' | '.join([phase, *cells])} |"

    cores = CORES_A_GPU * PREPARED_A_CORE
    return [
        f"{config.model.name} on {gpu.name}, {gpu.dollars_per_hour:.2f} dollars an hour and GPU",
        f"  simulated: a worker starts in {START_SECONDS:.0f} s and answers blocks of {size} "
        f"photos, {run.completion_tokens} tokens a completion; no time for the network",
        f"  {CORES_A_GPU} cores beside each GPU prepare {PREPARED_A_CORE} photos a second and core",
        *(f"  {line}" for line in budget.assumptions()[:4]),
        "",
        f"| {' | '.join(['phase', *(f'{n} GPU' + 's' * (n > 1) for n in gpus)])} |",
        f"|{'---|' * (len(gpus) + 1)}",
        row(f"prepare {PREPARED:,} photos", [PREPARED / (cores * count) for count in gpus]),
        *(
            row(f"{phase}, {photos:,} × {samples}", [generating(photos, samples, n) for n in gpus])
            for phase, (photos, samples) in PHASES.items()
        ),
        row(f"train {args.max_steps} steps", [training(count) for count in gpus]),
    ]


def describe(name: str, model: ModelShape, run: RunShape, max_steps: int) -> list[str]:
    """Returns what is planned, in lines of text."""
    engine = "the trainer's own model generates"
    if run.vllm_share is not None:
        sleep = ", asleep between generations" if run.sleep else ""
        engine = f"vLLM takes {run.vllm_share:g} of the GPU{sleep}"
    checkpoints = "with" if run.gradient_checkpointing else "without"
    return [
        f"{name}: {model.parameters:,} parameters, {model.vision_parameters:,} of them in the "
        f"vision tower; LoRA trains {model.trained_parameters:,}; a checkpoint takes "
        f"{planning.checkpoint_gib(model):.2f} GiB",
        f"a completion: {run.prompt_tokens} prompt tokens ({run.visual_tokens} visual) and up to "
        f"{run.completion_tokens} of its own",
        f"a step: {run.micro_batch} x {run.accumulation} completions a GPU, {run.generations} a "
        f"photo, {checkpoints} gradient checkpointing, forward passes before the loss: "
        f"{run.scoring_passes}",
        f"a generation: {run.generation_batch} completions at once; {engine}",
        f"the run: {max_steps} steps",
    ]


def _plan(
    model: ModelShape, run: RunShape, gpu: Gpu, max_steps: int, budget_hours: float
) -> dict[str, str]:
    """Returns one GPU's column by row; what does not fit has no seconds, hours and dollars."""
    memory = budget.memory_plan(model, run, gpu)
    fits = memory["remaining"] >= 0
    parts = budget.step_plan(model, run, gpu)
    seconds = sum(parts.values())
    hours = budget.run_hours(max_steps, seconds)
    dollars = budget.run_dollars(hours, gpu.dollars_per_hour * run.processes)
    outcome = {
        **{f"s {part}": f"{value:.1f}" for part, value in parts.items()},
        "seconds a step": f"{seconds:.1f}",
        f"steps in {budget_hours:g} h": str(budget.recommended_max_steps(seconds, budget_hours)),
        f"hours of {max_steps} steps": f"{hours:.1f}",
        "dollars an hour": f"{gpu.dollars_per_hour * run.processes:.2f}",
        f"dollars of {max_steps} steps": f"{dollars:.2f}",
    }
    return {
        "": gpu.name,
        "memory": f"{gpu.memory_gib:.1f}",
        **{f"- {use}": f"{gib:.1f}" for use, gib in memory.items()},
        "fits": "yes" if fits else "NO",
        "completions at once": str(budget.completions_at_once(model, run, gpu)) if fits else "–",
        **{row: value if fits else "–" for row, value in outcome.items()},
    }


def verdicts(model: ModelShape, run: RunShape) -> list[str]:
    """Returns one sentence for each GPU that the run does not fit, or on which it waits."""
    lines = []
    for gpu in budget.GPUS.values():
        lacking = -budget.memory_plan(model, run, gpu)["remaining"]
        if lacking > 0:
            advice = "take a larger GPU or a smaller model"
            if (other := budget.remedy(model, run, gpu)) is not None:
                seconds = sum(budget.step_plan(model, other, gpu).values())
                advice = f"it fits with {budget.changes(run, other)}, {seconds:.0f} s a step"
            lines.append(f"{gpu.name}: does not fit, {lacking:.1f} GiB are lacking; {advice}")
        elif (at_once := budget.completions_at_once(model, run, gpu)) < run.generated:
            lines.append(
                f"{gpu.name}: the KV cache holds {at_once} of {run.generated} full-length "
                "completions at once; the others wait, which the seconds count"
            )
    return lines
