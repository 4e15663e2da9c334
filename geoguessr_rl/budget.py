"""What a run costs in steps, hours, dollars and memory: arithmetic only.

The prices and hours are the plan's estimates; a run's own measurements replace them. Nothing here
reads a config, a model or a GPU, so that every figure can be checked by hand.
"""

import math

from geoguessr_rl.config import PRICE_PER_HOUR

# Dollars an hour on RunPod, and how the plan adds up.
PRICE_A100_COMMUNITY = 1.19
PRICE_H100_PCIE = 1.99
H100_SPEEDUP = 1.7  # against the A100
PRICE_VOLUME_WEEK = 1.60  # 100 GB
CONTINGENCY = 0.60

PLAN_HOURS = {
    "set up": 1.0,
    "baseline": 0.5,
    "filter": 0.75,
    "smoke test": 0.25,
    "train": 8.0,
    "evaluate": 1.0,
    "export": 0.5,
}

GPU_GIB = 80.0
_GIB = 2**30
_BF16_BYTES = 2
# A trained parameter in float32: weight, gradient, and Adam's two moments.
_ADAM_BYTES = 16


def recommended_max_steps(seconds_per_step: float, budget_hours: float) -> int:
    """Returns the whole steps that fit the budget: 20 s and 8 h give 1440.

    Raises:
        ValueError: A value is not finite and positive.
    """
    _require_positive(seconds_per_step=seconds_per_step, budget_hours=budget_hours)
    # Rounding may leave a quotient that is whole just below it: 1.5 h of 21.6 s.
    return math.floor(budget_hours * 3600 / seconds_per_step + 1e-6)


def run_hours(steps: int, seconds_per_step: float) -> float:
    """Returns the hours that the steps take."""
    return steps * seconds_per_step / 3600


def run_dollars(
    hours: float,
    dollars_per_hour: float = PRICE_PER_HOUR,
    *,
    volume_weeks: float = 0.0,
    contingency: float = 0.0,
) -> float:
    """Returns the price of GPU hours and storage, with a share on top for what goes wrong.

    The plan's 12 hours: 16.7 dollars, 18.3 with the volume for a week, 29 with `CONTINGENCY`.
    """
    return (hours * dollars_per_hour + volume_weeks * PRICE_VOLUME_WEEK) * (1 + contingency)


def completions_per_step(micro_batch: int, accumulation: int, processes: int = 1) -> int:
    """Returns the completions that one optimizer step learns from."""
    return micro_batch * accumulation * processes


def prompts_per_batch(completions: int, generations: int) -> int:
    """Returns the prompts whose groups of `generations` completions fill a batch.

    Raises:
        ValueError: Groups of that size do not fill it. The message names the sizes that do.
    """
    if completions % generations:
        fitting = [size for size in range(2, completions + 1) if completions % size == 0]
        raise ValueError(
            f"num_generations {generations} does not divide the batch of {completions} "
            f"completions; these do: {', '.join(map(str, fitting))}"
        )
    return completions // generations


def steps_per_epoch(
    rows: int, completions: int, generations: int, generation_batch: int | None = None
) -> int:
    """Returns the steps after which every photo has been seen once.

    TRL draws photos a generation batch at a time and drops the last incomplete one.

    Args:
        rows: Photos in the dataset.
        completions: Completions a step, see `completions_per_step`.
        generations: Completions a photo.
        generation_batch: Completions generated at once, a multiple of `completions`; by default
            one step's.

    Raises:
        ValueError: The sizes do not divide each other.
    """
    batch = generation_batch or completions
    if batch % completions:
        raise ValueError(
            f"generation_batch_size {batch} is no multiple of the {completions} completions a step"
        )
    return rows // prompts_per_batch(batch, generations) * (batch // completions)


def kv_cache_gib(tokens: int, layers: int, kv_heads: int, head_dim: int) -> float:
    """Returns the memory of keys and values in bf16 for that many cached tokens."""
    return 2 * tokens * layers * kv_heads * head_dim * _BF16_BYTES / _GIB


def memory_gib(
    parameters: int,
    trained_parameters: int,
    vllm_share: float = 0.35,
    gpu_gib: float = GPU_GIB,
) -> dict[str, float]:
    """Estimates what lies on one GPU when TRL trains a LoRA with vLLM colocated.

    vLLM takes its share of the GPU at the start: its own copy of the weights and, with the rest,
    the KV cache. The trainer holds the weights in bf16, and 16 bytes for each trained parameter
    (float32 weight, gradient, Adam's moments). What remains is for activations, logits, CUDA's
    context and fragmentation, which depend on lengths and kernels: this function does not guess
    them.

    Args:
        parameters: All parameters of the model, vision tower included.
        trained_parameters: Those of the adapter.
        vllm_share: `vllm_gpu_memory_utilization`.
        gpu_gib: Memory of the GPU.

    Returns:
        GiB by use: `trainer weights`, `adapter and optimizer`, `vllm weights`, `vllm kv cache`
        and `remaining`. A negative figure means that it does not fit.
    """
    weights = parameters * _BF16_BYTES / _GIB
    adapter = trained_parameters * _ADAM_BYTES / _GIB
    return {
        "trainer weights": weights,
        "adapter and optimizer": adapter,
        "vllm weights": weights,
        "vllm kv cache": vllm_share * gpu_gib - weights,
        "remaining": (1 - vllm_share) * gpu_gib - weights - adapter,
    }


def step_lines(
    *,
    seconds_per_step: float,
    budget_hours: float,
    max_steps: int,
    rows: int | None,
    micro_batch: int,
    accumulation: int,
    generations: int,
    generation_batch: int | None = None,
    processes: int = 1,
    dollars_per_hour: float = PRICE_PER_HOUR,
) -> list[str]:
    """Returns the step arithmetic that training prints at every start, line by line.

    Args:
        seconds_per_step: Measured over an even number of steps, because TRL may generate on every
            second one only.
        budget_hours: Hours that the run may take.
        max_steps: The steps that the config asks for.
        rows: Photos in the dataset; None where it is not prepared yet.
        micro_batch: Completions a process and backward pass.
        accumulation: Backward passes a step.
        generations: Completions a photo.
        generation_batch: See `steps_per_epoch`.
        processes: GPUs.
        dollars_per_hour: Price of all GPUs together.

    Raises:
        ValueError: As the functions above.
    """
    recommended = recommended_max_steps(seconds_per_step, budget_hours)
    completions = completions_per_step(micro_batch, accumulation, processes)
    hours = run_hours(max_steps, seconds_per_step)
    lines = [
        f"a step = {prompts_per_batch(completions, generations)} prompts x {generations} "
        f"completions = {completions} completions"
        f" ({micro_batch} x {accumulation} accumulation x {processes} process"
        f"{'es' if processes > 1 else ''})",
    ]
    if rows is not None:
        epoch = steps_per_epoch(rows, completions, generations, generation_batch)
        share = f"; {max_steps} steps = {max_steps / epoch:.2f} epochs" if epoch else ""
        lines.append(f"an epoch of {rows} photos = {epoch} steps{share}")
    lines += [
        f"max_steps {max_steps} x {seconds_per_step:g} s = {hours:.1f} h = "
        f"{run_dollars(hours, dollars_per_hour):.2f} dollars at {dollars_per_hour:.2f} an hour",
        f"budget {budget_hours:g} h at {seconds_per_step:g} s a step:",
        f"recommended max_steps = {recommended}",
    ]
    if max_steps > recommended:
        lines.append(f"max_steps {max_steps} does not fit the budget")
    return lines


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} {value}: give a finite number above 0")
