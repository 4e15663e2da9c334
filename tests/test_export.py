"""A merged folder loads alone, answers as base + adapter did, and is refused where it does not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import ROOT, warm_adapter
from hub_upload_server import INITIAL, TOKEN, UploadServer
from safetensors.torch import load_file

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import models, stack
from geoguessr_rl.config import CONFIGS, ExportConfig, load
from geoguessr_rl.phases import export


@pytest.fixture(scope="module")
def adapter(world: Path) -> Path:
    return warm_adapter(world)


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


def test_a_push_that_cannot_be_loaded_or_has_no_name_is_refused_at_once(
    world: Path, adapter: Path, tmp_path: Path
) -> None:
    for flags, sentence in (
        ({"push": "adapter"}, "add --repo_id owner/name"),
        ({"push": "both", "repo_id": "me/geo"}, "nobody else can load an adapter whose base lies"),
        ({"push": "adapter", "repo_id": "me/geo"}, r"`hf upload owner/base .*/warm` \(see Push"),
    ):
        with pytest.raises(UserError, match=sentence):
            export.run(config(world, adapter, tmp_path / "merged", **flags))
    assert not (tmp_path / "merged").exists()


def test_both_are_pushed_to_repositories_of_their_own() -> None:
    both = ExportConfig(push="both", repo_id="me/geo")
    assert export.repositories(both) == {"adapter": "me/geo", "merged": "me/geo-merged"}
    assert export.repositories(ExportConfig(push="merged", repo_id="me/geo")) == {
        "merged": "me/geo"
    }
    assert export.repositories(ExportConfig()) == {}


def test_a_refusal_comes_before_the_merge_and_a_failed_push_keeps_it(
    world: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    command = [
        sys.executable, "scripts/merge_and_export.py", "--model", world / "warm", "--lora", adapter,
        "--data_dir", world / "data", "--output_dir", out, "--device", "cpu",
        "--set", "prompt.style=direct", "--push", "merged", "--repo_id", "me/geo", "--public",
    ]  # fmt: skip

    def run() -> tuple[int, str, str]:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, cwd=ROOT,
            env=server.environment(tmp_path / "cache", OMP_NUM_THREADS="1"),
        )  # fmt: skip
        assert TOKEN not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    with UploadServer() as server:
        server.faults["whoami"] = [401]
        code, _, err = run()
        assert code == 2 and "does not accept your token" in err.splitlines()[-1]
        assert not out.exists() and not server.repos
        server.faults["commit"] = [403]
        code, _, err = run()
        assert code == 2 and "your token may not write to me/geo" in err.splitlines()[-1]
        assert server.repos["me/geo"].commits == [INITIAL]
        merged = (out / "model.safetensors").stat().st_mtime_ns
        code, said, err = run()
        assert code == 0, err
        assert (
            said.splitlines()[1] == f"pushed the merged model to {server.endpoint}/me/geo (public)"
        )
        assert (out / "model.safetensors").stat().st_mtime_ns == merged
        main = server.repos["me/geo"].main
    pushed = {path.name for path in out.iterdir() if path.is_file()} - {"run.json", "export.json"}
    assert set(main) == (pushed - {".lock"}) | {f"examples/{n}.jpg" for n in (1, 2, 3)} | {
        ".gitattributes"
    }
    assert "BASE stands for the base model's folder" in main["README.md"].decode()
    assert not any(str(world).encode() in content for content in main.values())
