"""The training phase: its config, its plan, its order, its checkpoints, and real steps on a CPU."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import lucky_functions, small_run

from geoguessr_rl import data, embedded
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import stack
from geoguessr_rl.backends.tiny import build_tiny
from geoguessr_rl.config import CONFIGS, GrpoConfig, load
from geoguessr_rl.phases import train
from geoguessr_rl.records import Photo

GRPO = CONFIGS / "grpo.yaml"


RECIPES = sorted([*CONFIGS.glob("grpo*.yaml"), *CONFIGS.glob("ablations/*.yaml")])
EMBEDDED = sorted(CONFIGS.glob("embedded/**/grpo.yaml")) + sorted(
    CONFIGS.glob("embedded/ablations/*.yaml")
)


@pytest.mark.parametrize("path", [*RECIPES, *EMBEDDED], ids=lambda p: str(p.relative_to(CONFIGS)))
def test_each_recipe_is_keys_of_the_installed_trl_that_go_together(path: Path) -> None:
    section = load(GrpoConfig, path).trainer
    assert train.check_trainer_keys(section, str(path)) == section
    train.build_args(section, use_cpu=True)
    stack.require_token_level_correction(section)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_line_of_a_recipe_says_why(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [line for line in lines if "#" not in line and not line.endswith(":")] == []


def test_the_recipes_differ_in_what_their_names_say() -> None:
    assert [path.stem for path in RECIPES] == [
        *("run1", "run2", "run3"), "grpo", "grpo_8b", "grpo_direct", "grpo_qwen35_4b",
    ]  # fmt: skip
    grpo = {path.stem: load(GrpoConfig, path) for path in RECIPES}
    assert grpo["grpo_direct"].prompt.style == "direct"
    assert grpo["grpo_8b"].model.name == "Qwen/Qwen3-VL-8B-Instruct"
    thinking = grpo["grpo_qwen35_4b"].trainer["chat_template_kwargs"]
    assert thinking == {"enable_thinking": False}
    for folder in (CONFIGS, CONFIGS / "embedded"):
        runs = [load(GrpoConfig, folder / f"ablations/run{n}.yaml") for n in (1, 2, 3)]
        args = [train.build_args(run.trainer, use_cpu=True) for run in runs]
        assert [(a.scale_rewards, a.beta, train.prompts_a_generation(a)) for a in args] == [
            ("group", 0, 1),
            ("none", 0.02, 2),
            ("group", 0, 2),
        ]
        assert [train.steps_a_generation(a) for a in args] == [1, 1, 1]
        loras = {(run.lora.r, run.lora.alpha, run.lora.dropout) for run in runs}
        assert loras == {(16, 32, 0.05)}
        assert {tuple(run.lora.target_modules) for run in runs} == {
            ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        assert len({a.learning_rate for a in args}) == len({a.max_steps for a in args}) == 1
    assert args[0].learning_rate == 1e-3
    assert load(GrpoConfig, CONFIGS / "ablations/run1.yaml").trainer["learning_rate"] == 3e-5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_prompt_length", 512, "no key of GRPOConfig"),
        ("vllm_max_model_len", 4096, "did you mean 'vllm_max_model_length'"),
        ("learning_rate", "fast", "trainer.learning_rate = 'fast' is wrong"),
        ("num_generations", "many", "trainer.num_generations = 'many' is wrong"),
    ],
)
def test_a_wrong_trainer_key_is_one_sentence(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        train.check_trainer_keys({key: value}, "configs/grpo.yaml")
    assert "configs/grpo.yaml" in str(error.value)


def test_a_number_written_as_text_is_read_as_one() -> None:
    assert train.check_trainer_keys({"learning_rate": "1e-6"}, "x") == {"learning_rate": 1e-6}


def test_a_batch_that_groups_do_not_divide_is_refused_with_trls_sentence() -> None:
    config = load(GrpoConfig, GRPO, overrides=["trainer.num_generations=6"])
    with pytest.raises(UserError, match="divisible by num_generations"):
        train.build_args(config.trainer, use_cpu=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps=-1", "must be 1 or more"),
        ("shuffle_dataset=true", "must be False"),
        ("reward_weights=[0, 1, 0, 0]", "must be .1.0, 0.0"),
        ("generation_batch_size=40", "no multiple of the completions a step"),
        ("generation_batch_size=16", "no multiple of the completions a step"),
        ("save_steps=25", "no multiple of 2, the steps between"),
        ("max_steps=1201", "trainer.max_steps 1201 is no multiple of 2"),
        ("num_iterations=3", "trainer.save_steps 200 is no multiple of 6"),
        (
            "chat_template_kwargs={enable_thinking: true}",
            "must be .'enable_thinking': False.*as the evaluation",
        ),
        ("fsdp=full_shard", "shard what the weight sync needs whole"),
    ],
)
def test_keys_that_break_a_resume_or_the_reward_are_refused(override: str, message: str) -> None:
    config = load(GrpoConfig, GRPO, overrides=[f"trainer.{override}"])
    with pytest.raises(UserError, match=message):
        train.build_args(config.trainer, use_cpu=True)


def test_memory_remedies_leave_a_run_the_same_run(world: Path) -> None:
    split = data.load_split(world / "data", "train_pool")

    def identity(**trainer: Any) -> dict[str, Any]:
        config = load(GrpoConfig, GRPO)
        config = config.model_copy(update={"trainer": {**config.trainer, **trainer}})
        return train.identity(config, train.build_args(config.trainer, use_cpu=True), split)

    halved = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    assert identity(**halved, vllm_gpu_memory_utilization=0.25) == identity()
    assert identity(gradient_accumulation_steps=8) != identity()
    assert identity(learning_rate=1e-4) != identity()
    # The end may move, unless the learning rate or the reward hangs on it.
    assert identity(max_steps=2400) == identity()
    linear = {"lr_scheduler_type": "linear"}
    assert identity(**linear, max_steps=2400) != identity(**linear)


def test_rollouts_come_every_second_step_of_the_plan() -> None:
    config = load(GrpoConfig, GRPO)
    args = train.build_args(config.trainer, use_cpu=True)
    assert train.steps_a_generation(args) == 2
    assert train.prompts_a_generation(args) == 8
    assert args.reward_weights == [1.0, 0.0, 0.0, 0.0]
    assert args.shuffle_dataset is False and args.log_multimodal is False


def test_the_reporter_follows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(GrpoConfig, GRPO)
    for key, expected in ((None, ["tensorboard"]), ("secret", ["wandb"])):
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        if key:
            monkeypatch.setenv("WANDB_API_KEY", key)
        assert train.build_args(config.trainer, use_cpu=True).report_to == expected


def test_the_dry_run_needs_no_gpu_weights_or_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"dry_run": True, "seconds_per_step": 20, "budget_hours": 8}
    assert train.run(load(GrpoConfig, GRPO, flags=flags), str(GRPO)) == {}
    lines = capsys.readouterr().out.splitlines()
    assert "recommended max_steps = 1440" in lines
    assert "  country_iso2: String" in lines
    assert sum(line.endswith("_proj") for line in lines) == 252
    assert any("66,060,288 trainable" in line for line in lines)
    assert not any(tmp_path.iterdir())


def photos(count: int) -> list[Photo]:
    return [Photo(str(n), Path(f"{n}.jpg"), 0.0, 0.0, "KE") for n in range(count)]


def test_the_order_is_a_new_permutation_each_epoch_and_a_longer_run_extends_it() -> None:
    order = [photo.id for photo in data.lay_out(photos(10), 25, seed=1)]
    epochs = order[:10], order[10:20]
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) == set(epochs[1]) == {str(n) for n in range(10)}
    assert [p.id for p in data.lay_out(photos(10), 12, seed=1)] == order[:12]
    assert [p.id for p in data.lay_out(photos(10), 25, seed=2)] != order


@pytest.fixture
def lucky(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that an untrained model can learn from."""
    monkeypatch.setattr(train, "reward_functions", lucky_functions)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(world: Path, lucky: None) -> None:
    train.run(small_run(world, "whole", 4))
    train.run(small_run(world, "cut", 4))
    shutil.rmtree(world / "cut/checkpoint-4")  # as if killed after step 2
    done = train.run(small_run(world, "cut", 4, resume_from_checkpoint="auto"))
    assert done["steps"] == 4
    first, second = (
        load_file(world / name / "checkpoint-4/adapter_model.safetensors")
        for name in ("whole", "cut")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    # And it did learn: B starts at zero.
    assert all(value.abs().max() > 0 for key, value in first.items() if "lora_B" in key)
    logs = [
        json.loads((world / name / "checkpoint-4/trainer_state.json").read_text())["log_history"]
        for name in ("whole", "cut")
    ]
    assert logs[0][-1]["loss"] == logs[1][-1]["loss"]


def test_an_adapter_never_reaches_the_vision_tower(world: Path) -> None:
    run = small_run(world, "visual", 2)
    config = run.model_copy(
        update={
            "lora": run.lora.model_copy(update={"target_modules": ["qkv"], "exclude_modules": ""})
        }
    )
    with pytest.raises(UserError, match="frozen vision tower"):
        train.run(config)


def test_an_evaluation_split_is_refused(world: Path) -> None:
    config = small_run(world, "leak", 2).model_copy(update={"split": "eval_osv"})
    with pytest.raises(UserError, match="is for evaluation"):
        train.run(config)
    assert not (world / "leak").exists()


@pytest.mark.parametrize("key", ["seed", "suppress_tokens"])
def test_generation_kwargs_that_undo_a_remedy_are_refused(world: Path, key: str) -> None:
    config = small_run(world, "seed", 2)
    trainer = {**config.trainer, "generation_kwargs": {key: [1]}}
    with pytest.raises(UserError, match="is not yours to set"):
        train.run(config.model_copy(update={"trainer": trainer}))


def test_the_run_records_what_it_was_trained_on(world: Path, lucky: None) -> None:
    from geoguessr_rl.backends.predictions import check_trained_alike

    train.run(small_run(world, "record", 2))
    checkpoint = world / "record/checkpoint-2"
    split = data.load_split(world / "data", "train_pool")
    check_trained_alike(checkpoint, "think", split.image_policy)
    with pytest.raises(UserError, match="prompt_style 'think', and this run has 'direct'"):
        check_trained_alike(checkpoint, "direct", split.image_policy)
    with pytest.raises(UserError, match="was trained with image"):
        check_trained_alike(checkpoint, "think", {**split.image_policy, "long_edge": 512})
    base = small_run(world, "record", 2).model.name
    check_trained_alike(checkpoint, "think", split.image_policy, base)
    retrained = world / "retrained"
    shutil.copytree(base, retrained)
    (retrained / "generation_config.json").write_text('{"changed": true}')
    with pytest.raises(UserError, match="was trained on other weights than those in"):
        check_trained_alike(checkpoint, "think", split.image_policy, str(retrained))


def test_a_resume_under_another_reward_or_model_is_refused(world: Path, lucky: None) -> None:
    train.run(small_run(world, "claimed", 2))
    config = small_run(world, "claimed", 4, resume_from_checkpoint="auto")
    reward = config.reward.model_copy(update={"shape": "geoscore"})
    with pytest.raises(UserError, match=r"another run: reward\.shape was"):
        train.run(config.model_copy(update={"reward": reward}))
    trainer = {**config.trainer, "learning_rate": 0.5}
    with pytest.raises(UserError, match=r"another run: trainer\.learning_rate was"):
        train.run(config.model_copy(update={"trainer": trainer}))
    # The folder of the base model holds other weights now.
    shutil.copytree(world / "tiny", world / "kept")
    build_tiny(world / "tiny", 1, embedded.sample_texts())
    try:
        with pytest.raises(UserError, match="holds another run: model_files was"):
            train.run(config)
    finally:
        shutil.rmtree(world / "tiny")
        (world / "kept").rename(world / "tiny")
