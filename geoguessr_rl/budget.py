"""What a run costs in steps, hours, dollars, memory and seconds a step: arithmetic only.

The prices and hours are the plan's estimates; a run's own measurements replace them. Memory and
seconds are predicted from a model's shape and a GPU's published figures, under the assumptions that
stand below as constants. Nothing here reads a config, a model or a GPU, so that every figure can be
checked by hand; `backends/planning.py` fills in the shapes. It is long because all that money and
memory depend on is read in one place.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

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

_GIB = 2**30
# A trained parameter in float32: weight, gradient, and Adam's two moments.
_ADAM_BYTES = 16

# Assumptions, not measurements: what `assumptions` says in words. A run's own seconds a step
# replace the last five.
TRAINER_OVERHEAD_GIB = 2.0  # CUDA's context, fragmentation, pixels, the copy of a synced matrix
ENGINE_OVERHEAD_GIB = 2.5  # vLLM's CUDA graphs, its profiling run and its encoder cache
LOGIT_TILE = (4096, 32_768)  # tokens x vocabulary that TRL projects at once: no whole logits exist
MATMUL_EFFICIENCY = 0.45  # of the published peak, in large matrix products
BANDWIDTH_EFFICIENCY = 0.7  # of the published peak
TOKEN_SECONDS = {True: 0.002, False: 0.04}  # a decoded token beside its bytes; with vLLM, without
SYNC_SECONDS = 1.0  # handing the merged weights to the engine, one matrix after the other
STEP_SECONDS = 1.0  # processor, rewards, optimizer, logs: whatever is not the model's own work
PATCHES_A_TOKEN = 4  # Qwen3-VL merges 2 x 2 patches into one visual token


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU by its maker's figures.

    Attributes:
        name: As it is sold.
        memory_gib: As torch reports it, less than the round number on the box.
        bf16_tflops: Peak of bf16 matrix products without sparsity, in 10^12 operations a second.
        bandwidth_gb_s: Peak memory bandwidth in 10^9 bytes a second.
        dollars_per_hour: See `GPUS`.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    bandwidth_gb_s: float
    dollars_per_hour: float


# Peaks: NVIDIA's data sheets (L4, L40S, A100, H100 PCIe, H200 SXM); where those print the figure
# with sparsity, half of it. Dollars: A100-80 and H100 are the plan's, the others what clouds
# typically asked in 2025 and 2026; replace them by your own provider's.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("L4", 22.0, 121, 300, 0.43),
        Gpu("L40S", 44.4, 362, 864, 0.86),
        Gpu("A100-40", 39.4, 312, 1555, 1.29),
        Gpu("A100-80", 79.2, 312, 1935, PRICE_PER_HOUR),
        Gpu("H100", 79.1, 756, 2000, PRICE_H100_PCIE),
        Gpu("H200", 139.8, 989, 4800, 3.59),
    )
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model costs memory and time; all but the first three describe the language model.

    Attributes:
        parameters: All of them, vision tower included, adapter not.
        vision_parameters: Those of the vision tower, which is frozen.
        trained_parameters: Those of the adapter.
        layers: Decoder layers.
        hidden: Width of a hidden state.
        mlp: Inner width of the MLP.
        heads: Query heads.
        kv_heads: Key-value heads.
        head_dim: Width of a head.
        vocabulary: Tokens.
        tied: Whether the output projection is the embedding.
        adapted_inputs: Input features of one layer's adapted modules, added up.
    """

    parameters: int
    vision_parameters: int
    trained_parameters: int
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    adapted_inputs: int

    @property
    def head_parameters(self) -> int:
        """Those of the output projection."""
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Those that every text token is multiplied with, the output projection left out."""
        embeddings = self.head_parameters * (1 if self.tied else 2)
        return self.parameters - self.vision_parameters - embeddings


@dataclass(frozen=True, slots=True)
class RunShape:
    """What of a run costs memory and time.

    Attributes:
        micro_batch: Completions a process and backward pass.
        accumulation: Backward passes a step.
        processes: GPUs.
        generations: Completions a photo.
        generation_batch: Completions generated at once, by all processes.
        prompt_tokens: A prompt's, text and visual.
        visual_tokens: Those of them that stand for the photo.
        completion_tokens: The cap; a plan takes every completion to be that long.
        gradient_checkpointing: Whether a layer's inside is computed again in the backward pass.
        scoring_passes: Forward passes over each completion before the loss: one that corrects for
            the sampler, one more for a reference where beta is not 0.
        vllm_share: `vllm_gpu_memory_utilization`; None where the trainer's own model generates.
        sleep: Whether the engine leaves the GPU while the trainer works.
        max_model_length: Tokens of one sequence for which the engine must have room to start.
        weight_bytes: Bytes a frozen weight and an activation: 2 in bf16, 4 in float32.
    """

    micro_batch: int
    accumulation: int
    processes: int
    generations: int
    generation_batch: int
    prompt_tokens: int
    visual_tokens: int
    completion_tokens: int
    gradient_checkpointing: bool = True
    scoring_passes: int = 1
    vllm_share: float | None = 0.35
    sleep: bool = False
    max_model_length: int = 4096
    weight_bytes: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of one prompt with its completion."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def generated(self) -> int:
        """Completions that one GPU generates at once."""
        return self.generation_batch // self.processes

    @property
    def steps_a_generation(self) -> float:
        """Optimizer steps that one generation feeds."""
        return self.generated / (self.micro_batch * self.accumulation)


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


def kv_bytes_a_token(model: ModelShape, weight_bytes: int = 2) -> int:
    """Returns the bytes that the keys and values of one cached token take in all layers."""
    return 2 * model.layers * model.kv_heads * model.head_dim * weight_bytes


def layer_bytes_a_token(model: ModelShape, weight_bytes: int = 2) -> int:
    """Returns what one decoder layer keeps of a token for its backward pass, in bytes.

    Counted from Qwen3-VL's layer with frozen weights: the two norms and those of queries and keys
    work in float32; attention keeps queries, keys, values and its output; the MLP the gate before
    and after its activation, and the other factor; LoRA a copy of each adapted module's input.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    in_float32 = 2 * model.hidden + queries + keys
    others = 2 * (queries + keys) + 3 * model.mlp + model.adapted_inputs
    return 4 * in_float32 + weight_bytes * others


def activation_bytes(model: ModelShape, run: RunShape) -> int:
    """Returns what the forward pass of a micro-batch leaves for the backward pass, in bytes.

    With gradient checkpointing that is each layer's input. The vision tower is frozen, and nothing
    before it is trained: it leaves nothing.
    """
    layer = layer_bytes_a_token(model, run.weight_bytes)
    if run.gradient_checkpointing:
        layer = model.hidden * run.weight_bytes
    return run.micro_batch * run.tokens * model.layers * layer


def logit_bytes(model: ModelShape, run: RunShape) -> int:
    """Returns what the output projection takes: a tile of logits, and float32 hidden gradients."""
    tokens = run.micro_batch * run.completion_tokens
    tile = min(tokens, LOGIT_TILE[0]) * min(model.vocabulary, LOGIT_TILE[1]) * run.weight_bytes
    return tile + tokens * model.hidden * 4


def memory_plan(model: ModelShape, run: RunShape, gpu: Gpu) -> dict[str, float]:
    """Predicts what lies on one GPU when memory is fullest, in GiB by use.

    vLLM takes its share at the start: its own copy of the weights, its overhead, and all the rest
    as KV cache, where more completions than fit wait for their turn. `activations` holds what the
    forward pass leaves, and of the one layer that is worked on the inside and its gradients. An
    engine that sleeps, or none, is not there together with activations and logits: then the larger
    of the two counts.

    Returns:
        `trainer weights`, `adapter and optimizer`, `activations`, `logits`, `trainer overhead`,
        `engine weights`, `engine kv cache`, `engine overhead`, and last `remaining`, what is left.
        Where it is negative, the run does not fit; it then says what the GPU lacks, or what the
        engine's share lacks for a sequence of `max_model_length`.
    """
    weights = model.parameters * run.weight_bytes / _GIB
    inside = run.micro_batch * run.tokens * layer_bytes_a_token(model, run.weight_bytes)
    plan = {
        "trainer weights": weights,
        "adapter and optimizer": model.trained_parameters * _ADAM_BYTES / _GIB,
        "activations": (activation_bytes(model, run) + 2 * inside) / _GIB,
        "logits": logit_bytes(model, run) / _GIB,
        "trainer overhead": TRAINER_OVERHEAD_GIB,
        "engine weights": weights,
        "engine kv cache": 0.0,
        "engine overhead": ENGINE_OVERHEAD_GIB,
    }
    token = kv_bytes_a_token(model, run.weight_bytes) / _GIB
    spare = math.inf
    if run.vllm_share is None:
        cached = run.generated * run.tokens * token
        plan |= {"engine weights": 0.0, "engine kv cache": cached, "engine overhead": 0.0}
    else:
        given = run.vllm_share * gpu.memory_gib - weights - ENGINE_OVERHEAD_GIB
        needed = run.max_model_length * token
        plan["engine kv cache"] = max(given, needed)
        spare = given - needed
    engine = sum(gib for use, gib in plan.items() if use.startswith("engine"))
    working = plan["activations"] + plan["logits"]
    lasting = sum(plan.values()) - working - engine
    apart = run.sleep or run.vllm_share is None
    left = gpu.memory_gib - lasting - (max(working, engine) if apart else working + engine)
    plan["remaining"] = left if spare >= 0 else min(left, spare)
    return plan


def completions_at_once(model: ModelShape, run: RunShape, gpu: Gpu) -> int:
    """Returns how many completions of full length the KV cache holds, each with its own prompt.

    Fewer than a GPU generates is no failure: the others wait, and the step takes longer. The true
    number is higher, because a group shares its prompt's cache and most completions end earlier.
    """
    cache = max(0.0, memory_plan(model, run, gpu)["engine kv cache"]) * _GIB
    most = int(cache / (run.tokens * kv_bytes_a_token(model, run.weight_bytes)) + 1e-6)
    return max(1, min(run.generated, most))


def remedy(model: ModelShape, run: RunShape, gpu: Gpu) -> RunShape | None:
    """Returns the fastest run that learns from the same batches and fits; None without any.

    Tried are smaller micro-batches with more accumulation, another share for vLLM, and an engine
    that sleeps while the trainer works; among equally fast ones the first of that order wins.
    """
    fitting = [
        other
        for other in _gentler(model, run, gpu)
        if memory_plan(model, other, gpu)["remaining"] >= 0
    ]
    return min(fitting, key=lambda other: sum(step_plan(model, other, gpu).values()), default=None)


def changes(run: RunShape, other: RunShape) -> str:
    """Returns the settings in which a remedy differs from the run, in words."""
    words = []
    if other.micro_batch != run.micro_batch:
        words.append(f"micro-batch {other.micro_batch} x accumulation {other.accumulation}")
    if other.vllm_share != run.vllm_share:
        words.append(f"vllm_gpu_memory_utilization {other.vllm_share:g}")
    if other.sleep != run.sleep:
        words.append("vllm_enable_sleep_mode true")
    return ", ".join(words) or "no change"


def _gentler(model: ModelShape, run: RunShape, gpu: Gpu) -> Iterator[RunShape]:
    """Yields the runs that `remedy` tries."""
    halvings = [2**n for n in range(run.micro_batch) if run.micro_batch % 2**n == 0]
    for sleep in dict.fromkeys((run.sleep, run.vllm_share is not None)):
        for times in halvings:
            other = replace(
                run,
                micro_batch=run.micro_batch // times,
                accumulation=run.accumulation * times,
                sleep=sleep,
            )
            yield other
            if run.vllm_share is not None:
                uses = ["trainer weights", "adapter and optimizer", "trainer overhead"]
                uses += [] if sleep else ["activations", "logits"]
                memory = memory_plan(model, other, gpu)
                left = 1 - sum(memory[use] for use in uses) / gpu.memory_gib
                yield replace(other, vllm_share=max(0.0, math.floor(100 * left) / 100))


def step_plan(model: ModelShape, run: RunShape, gpu: Gpu) -> dict[str, float]:
    """Predicts the seconds of an optimizer step by part, averaged over those of one generation.

    A matrix product of a token with P weights takes 2 P operations. Frozen weights need no gradient
    of their own, so a backward pass costs as much as a forward pass, and gradient checkpointing
    one more. The vision tower only runs forward; its attention is left out. Beside the products,
    every byte that a layer keeps of a token is written and read once a pass, twice in backward.
    Decoding reads the weights and the cache for each token, or computes, whichever takes longer;
    completions that do not fit the cache at once take turns in equal rounds.

    Returns:
        `decode`, `prefill`, `scoring passes`, `forward and backward`, `weight sync`, `other`.
    """
    flops = gpu.bf16_tflops * 1e12 * MATMUL_EFFICIENCY
    bandwidth = gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_EFFICIENCY
    trained = run.micro_batch * run.accumulation
    queries = model.heads * model.head_dim

    def text(tokens: int) -> float:
        """Operations of one sequence through the layers, causal attention included."""
        attention = 2 * model.layers * queries * tokens**2
        return 2 * model.layer_parameters * tokens + attention

    vision = 2 * model.vision_parameters * run.visual_tokens * PATCHES_A_TOKEN
    head = 2 * model.head_parameters * run.completion_tokens
    layer = layer_bytes_a_token(model, run.weight_bytes)
    traffic = 2 * run.tokens * model.layers * layer / bandwidth
    forward = (text(run.tokens) + head + vision) / flops + traffic
    again = 2 if run.gradient_checkpointing else 1
    backward = (again * text(run.tokens) + 2 * head) / flops + (1 + again) * traffic

    rounds = math.ceil(run.generated / completions_at_once(model, run, gpu))
    at_once = run.generated / rounds
    cached = at_once * (run.prompt_tokens + run.completion_tokens / 2)
    used = (model.layer_parameters + model.head_parameters) * run.weight_bytes
    read = (used + cached * kv_bytes_a_token(model, run.weight_bytes)) / bandwidth
    computed = at_once * 2 * (model.layer_parameters + model.head_parameters) / flops
    token = max(read, computed) + TOKEN_SECONDS[run.vllm_share is not None]
    prompts = run.generated / (run.generations if run.vllm_share is not None else 1)
    # What the sync reads and writes: the weight, its float32 copy and the sum, the engine's copy.
    synced = model.parameters * (2 * run.weight_bytes + 12) / bandwidth + SYNC_SECONDS
    each = run.steps_a_generation
    return {
        "decode": rounds * run.completion_tokens * token / each,
        "prefill": prompts * (text(run.prompt_tokens) + vision) / flops / each,
        "scoring passes": run.scoring_passes * trained * forward,
        "forward and backward": trained * (forward + backward),
        "weight sync": synced / each if run.vllm_share is not None else 0.0,
        "other": STEP_SECONDS,
    }


def assumptions() -> list[str]:
    """Returns what a plan takes for granted, in lines of text."""
    return [
        "predicted from the model's shape and the makers' figures; nothing was measured on a GPU",
        f"matrix products reach {MATMUL_EFFICIENCY:.0%} of the bf16 peak without sparsity, memory "
        f"{BANDWIDTH_EFFICIENCY:.0%} of its bandwidth",
        f"a decoded token takes {1000 * TOKEN_SECONDS[True]:g} ms beside the GPU's work with vLLM, "
        f"{1000 * TOKEN_SECONDS[False]:g} ms without; a weight sync {SYNC_SECONDS:g} s beside its "
        f"copies, a step {STEP_SECONDS:g} s beside the model",
        "every completion is as long as the cap and holds its own prompt in the KV cache; shorter "
        "ones take less",
        f"TRL projects logits in tiles of {LOGIT_TILE[0]} x {LOGIT_TILE[1]}, so that the whole "
        "logits never exist",
        f"overheads: {TRAINER_OVERHEAD_GIB:g} GiB for the trainer (context, fragmentation), "
        f"{ENGINE_OVERHEAD_GIB:g} GiB for vLLM (CUDA graphs, profiling run)",
        "dollars: the plan's for A100-80 and H100 PCIe, typical cloud prices for the others; put "
        "in your own",
    ]


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
