"""A merged folder loads alone, answers as base + adapter did, and is refused where it does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import lucky_functions, small_run
from warm_base import warm_up

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import models, stack
from geoguessr_rl.config import CONFIGS, ExportConfig, load
from geoguessr_rl.phases import export, train


@pytest.fixture(scope="module")
def adapter(world: Path) -> Path:
    """An adapter on the warmed-up tiny base, whose B matrices are large enough to be heard."""
    base = warm_up(world)
    patch = pytest.MonkeyPatch()
    patch.setattr(train, "reward_functions", lucky_functions)
    flags = {"model.name": str(base), "prompt.style": "direct"}
    train.run(small_run(world, "to-export", 2, **flags))
    patch.undo()
    path = world / "to-export/checkpoint-2"
    weights = load_file(path / "adapter_model.safetensors")
    torch.manual_seed(0)
    for name, value in weights.items():
        if "lora_B" in name:
            value.normal_(std=0.02)
    save_file(weights, path / "adapter_model.safetensors")
    return path


def config(world: Path, adapter: Path, out: Path, **flags: Any) -> ExportConfig:
    flags |= {"model.name": str(world / "warm"), "prompt.style": "direct", "lora": adapter}
    flags |= {"data_dir": world / "data", "output_dir": out, "device": "cpu"}
    return load(ExportConfig, CONFIGS / "export.yaml", flags=flags)


def test_the_merged_model_loads_alone_and_answers_as_base_and_adapter(
    world: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    measured = export.run(config(world, adapter, out))
    assert measured["equal"] == measured["photos"] == 16
    assert measured["gap"] < 1e-4
    model = models.load_model(config(world, adapter, out).model.model_copy(
        update={"name": str(out)}), "cpu")  # fmt: skip
    base = load_file(world / "warm/model.safetensors")
    changed = [
        name for name, value in model.state_dict().items()
        if name in base and not torch.equal(value, base[name])
    ]  # fmt: skip
    assert len(changed) == 14 and all("_proj" in name for name in changed)
    assert models.load_processor(str(out)).chat_template
    assert not (out / "staged").exists()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    # A second run reads what was measured.
    assert export.run(config(world, adapter, out)) == measured


def test_a_wrong_merge_is_refused_and_leaves_no_model(
    world: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = stack.merged_weights

    def without_adapter(model: Any) -> Any:
        return ((name, torch.zeros_like(w) if "o_proj" in name else w) for name, w in merged(model))

    monkeypatch.setattr(stack, "merged_weights", without_adapter)
    with pytest.raises(UserError, match=r"of 16 answers as base \+ adapter do, .*all equal"):
        export.run(config(world, adapter, tmp_path / "merged"))
    assert not (tmp_path / "merged/config.json").exists()


def test_a_full_disk_is_one_sentence(
    world: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geoguessr_rl import hub

    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: type("U", (), {"free": 10})())
    with pytest.raises(UserError, match="has no room for the merged model"):
        export.run(config(world, adapter, tmp_path / "merged"))


def test_bfloat16_may_round_and_says_how_far(
    world: Path, adapter: Path, tmp_path: Path, script: Callable[..., Any]
) -> None:
    ended = script(
        "merge_and_export.py", "--model", world / "warm", "--lora", adapter, "--data_dir",
        world / "data", "--output_dir", tmp_path / "bf16", "--device", "cpu",
        "--set", "model.dtype=bfloat16", "--set", "prompt.style=direct",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "nats a token" in ended.out and "answers equal to base + adapter" in ended.out
    saved = load_file(tmp_path / "bf16/model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}


def test_answers_are_compared_by_text_score_and_place() -> None:
    paris = '<answer>{"country": "France", "lat": 48.86, "lon": 2.35}</answer>'
    london = '<answer>{"country": "United Kingdom", "lat": 51.51, "lon": -0.13}</answer>'
    found = export.compare([paris, "x"], [london, "x"], [[-1.0, -2.0]], [[-1.5, -2.1]])
    assert found["equal"] == 1 and found["photos"] == 2
    assert found["gap"] == pytest.approx(0.3)
    assert found["max_km_apart"] == pytest.approx(344, abs=2)
    assert export.compare(["x"], ["y"], [[]], [[]])["max_km_apart"] is None
