"""Plan: a training config -> memory, seconds, steps, hours and dollars on GPUs that people rent.

It needs no GPU, no weights and no data, and measures nothing: `budget` predicts, under assumptions
that are printed first. A smoke test on the GPU that was chosen gives the true seconds a step.
"""

from geoguessr_rl import budget
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import planning
from geoguessr_rl.budget import Gpu, ModelShape, RunShape
from geoguessr_rl.config import GrpoConfig, ImagePolicy
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
