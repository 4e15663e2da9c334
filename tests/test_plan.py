"""The planner: shapes of real configs, what it prints, and the tiny model's true memory."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from geoguessr_rl import budget, prompt
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import models, planning
from geoguessr_rl.backends.tiny import build_tiny
from geoguessr_rl.budget import ModelShape, RunShape
from geoguessr_rl.config import CONFIGS, GrpoConfig, Lora, Model, load

SAMPLE = prompt.format_completion("Kenya", -0.3, 37.0, clues="Red soil, palms.", style="think")
TEXTS = [m["content"] for s in prompt.PROMPT_STYLES for m in prompt.build_messages(s)] + [SAMPLE]
LORA = Lora(r=8, alpha=16)
PHOTO = (256, 192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    build_tiny(out, 0, TEXTS)
    return out


@pytest.fixture
def config() -> GrpoConfig:
    return load(GrpoConfig, CONFIGS / "grpo.yaml")


def shape_of(*overrides: str, processes: int | None = None) -> RunShape:
    config = load(GrpoConfig, CONFIGS / "grpo.yaml", overrides=overrides)
    return planning.run_shape(config, planning.trainer_args(config.trainer), 784, processes)


def test_the_4b_models_shape_is_the_published_one() -> None:
    shape = planning.model_shape("Qwen/Qwen3-VL-4B-Instruct", Lora())
    assert shape == ModelShape(
        parameters=4_437_815_808,
        vision_parameters=415_347_712,
        trained_parameters=66_060_288,
        layers=36,
        hidden=2560,
        mlp=9728,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=151_936,
        tied=True,
        adapted_inputs=5 * 2560 + 4096 + 9728,  # q, k, v, gate and up; o; down
    )
    assert not planning.model_shape("Qwen/Qwen3-VL-8B-Instruct", Lora()).tied


def test_the_default_runs_shape_is_the_config(config: GrpoConfig) -> None:
    args = planning.trainer_args(config.trainer)
    shape = planning.run_shape(config, args, (1024, 784))
    assert shape.visual_tokens == 784
    assert 100 < shape.prompt_tokens - 784 < 400
    assert (shape.micro_batch, shape.accumulation, shape.generation_batch) == (8, 4, 64)
    assert (shape.vllm_share, shape.max_model_length, shape.weight_bytes) == (0.35, 4096, 2)
    assert shape.steps_a_generation == 2


def test_scoring_passes_are_those_that_trl_makes() -> None:
    assert shape_of().scoring_passes == 1  # vLLM's probabilities are corrected
    assert shape_of("trainer.beta=0.02").scoring_passes == 2  # and a reference
    fresh = ("trainer.use_vllm=false", "trainer.generation_batch_size=32")
    assert shape_of(*fresh).scoring_passes == 0  # the policy that wrote them is the one
    # Every second step learns from completions of the policy before.
    assert shape_of("trainer.use_vllm=false").scoring_passes == 1


def test_two_processes_share_a_generation() -> None:
    shape = shape_of(processes=2)
    assert (shape.processes, shape.generated, shape.steps_a_generation) == (2, 32, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.vllm_mode=server", "set it to colocate"),
        ("trainer.generation_batch_size=48", "no multiple of the completions a step"),
        ("trainer.num_generations=6", "divisible"),
        ("trainer.max_prompt_length=9", "max_prompt_length"),
    ],
)
def test_a_run_that_cannot_be_planned_is_said_so(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of(override)


def test_eight_billion_parameters_cost_about_1_8_times_the_step(config: GrpoConfig) -> None:
    run = planning.run_shape(config, planning.trainer_args(config.trainer), 784)
    seconds = [
        sum(
            budget.step_plan(
                planning.model_shape(name, Lora()), run, budget.GPUS["A100-80"]
            ).values()
        )
        for name in ("Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-8B-Instruct")
    ]
    assert seconds[1] / seconds[0] == pytest.approx(1.8, abs=0.1)


def test_the_script_prints_a_plan(script: Callable[..., Any]) -> None:
    ended = script("plan_run.py", "--seconds_per_step", 20)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    rows = {line[:22].strip(" -"): line[22:].split() for line in lines if line[22:].strip()}
    (header,) = [line.split() for line in lines if line.split() == list(budget.GPUS)]
    assert header[0] == "L4"
    assert rows["fits"] == ["NO", "yes", "yes", "yes", "yes", "yes"]
    assert rows["seconds a step"][0] == "–"
    assert 15 < float(rows["seconds a step"][3]) < 25
    assert "nothing was measured on a GPU" in ended.out
    assert any(line.startswith("L4: does not fit") for line in lines)
    assert "  recommended max_steps = 1440" in lines


def test_a_remedy_is_printed_beside_what_does_not_fit(script: Callable[..., Any]) -> None:
    ended = script("plan_run.py", "--set", "trainer.gradient_checkpointing=false")
    assert "A100-80: does not fit" in ended.out
    assert "it fits with micro-batch 4 x accumulation 8" in ended.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--processes", 0), "--processes 0 must be 1 or more"),
        (("--processes", 3), "no multiple"),
        (("--budget_hours", 0), "--budget_hours 0 is wrong"),
        (("--model", "./nowhere"), "does not exist"),
        (("--set", "trainer.max_steps=-1"), "max_steps must be 1 or more"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    script: Callable[..., Any], args: tuple[Any, ...], message: str
) -> None:
    ended = script("plan_run.py", *args)
    assert ended.code == 2
    assert message in ended.err and ended.err.count("\n") == 1


# What the tiny model really takes on this CPU, against the formulas.


def forward(model: Any, folder: Path) -> tuple[Any, int, int]:
    """Runs the trained part of a micro-batch of 4; returns its output, and its token counts."""
    processor = models.load_processor(str(folder))
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"<|im_start|>user\n{image}{TEXTS[1]}<|im_end|>\n{SAMPLE * 6}"
    inputs = processor(text=[text] * 4, images=[Image.new("RGB", PHOTO)] * 4, return_tensors="pt")
    with torch.autocast("cpu", torch.bfloat16):
        return model.base_model.model.model(**inputs).last_hidden_state, *inputs["input_ids"].shape


def saved_bytes(model: Any, folder: Path) -> tuple[int, int, int]:
    """Returns the bytes that autograd keeps until the backward pass, and the token counts."""
    frozen = {part.untyped_storage().data_ptr() for part in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        # The vision tower's inputs are saved as well, and freed with its graph: nothing before it
        # is trained. Its width is its own.
        if address not in frozen and tensor.shape[-1] != 64:
            kept[address] = tensor
        return tensor

    gc.collect()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _, batch, tokens = forward(model, folder)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), batch, tokens


@pytest.fixture
def adapted(folder: Path) -> Iterator[Callable[[bool], Any]]:
    """Builds the tiny model in bf16 with a float32 adapter, as it stands on a GPU."""
    from peft import get_peft_model

    def build(checkpointing: bool) -> Any:
        model = models.load_model(Model(name=str(folder), dtype="bfloat16"), "cpu")
        if checkpointing:
            model.gradient_checkpointing_enable()
        model = get_peft_model(model, models.lora_config(LORA))
        if checkpointing:
            model.enable_input_require_grads()
        return model.train()

    yield build


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_activations_are_those_that_autograd_keeps(
    adapted: Callable[[bool], Any], folder: Path, checkpointing: bool
) -> None:
    kept, batch, tokens = saved_bytes(adapted(checkpointing), folder)
    run = RunShape(
        micro_batch=batch, accumulation=1, processes=1, generations=4, generation_batch=4,
        prompt_tokens=tokens - 10, visual_tokens=48, completion_tokens=10,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    model = planning.model_shape(str(folder), LORA)
    # The last norm, outside the layers, works in float32 as well; with two layers it shows.
    predicted = budget.activation_bytes(model, run) + 4 * batch * tokens * model.hidden
    assert kept == pytest.approx(predicted, rel=0.05)


def test_weights_adapter_and_optimizer_take_the_predicted_bytes(
    adapted: Callable[[bool], Any], folder: Path, tmp_path: Path
) -> None:
    model = adapted(False)
    shape = planning.model_shape(str(folder), LORA)
    trained = [part for part in model.parameters() if part.requires_grad]
    frozen = [part for part in model.parameters() if not part.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    output, *_ = forward(model, folder)
    output.float().pow(2).mean().backward()
    optimizer.step()

    def size(parts: Any) -> int:
        return sum(part.numel() * part.element_size() for part in parts)

    moments = [
        part for state in optimizer.state.values() for part in state.values() if part.numel() > 1
    ]
    held = size(trained) + size(part.grad for part in trained) + size(moments)
    plan = budget.memory_plan(shape, shape_of(), budget.GPUS["A100-80"])
    assert plan["trainer weights"] * 2**30 == pytest.approx(size(frozen))
    assert plan["adapter and optimizer"] * 2**30 == pytest.approx(held)

    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    files = [tmp_path / "adapter_model.safetensors", tmp_path / "optimizer.pt"]
    on_disk = sum(file.stat().st_size for file in files)
    assert planning.checkpoint_gib(shape) * 2**30 == pytest.approx(on_disk, rel=0.25)


def test_a_cached_token_takes_the_predicted_bytes(folder: Path) -> None:
    model = models.load_model(Model(name=str(folder), dtype="float32"), "cpu")
    ids = torch.arange(100, 140).reshape(1, 40)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    shape = planning.model_shape(str(folder), LORA)
    assert held == 40 * budget.kv_bytes_a_token(shape, weight_bytes=4)
