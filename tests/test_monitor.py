"""What a person sees of a run: rows, curves in every reporter, samples, alarms, costs."""

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from small_runs import lucky_functions, small_run

from geoguessr_rl import alarms, artifacts, samples
from geoguessr_rl.backends.progress import Column, row
from geoguessr_rl.phases import train

CURVES = {
    "reward", "rewards/reward_total/mean", "rewards/reward_0/mean", "group_std", "entropy",
    "top_country_share", "frac_reward_zero_std", "completions/clipped_ratio", "seconds", "hours",
    "dollars", "hours_left", "alarms/zero_spread",
}  # fmt: skip


@pytest.fixture(autouse=True)
def lucky(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that an untrained model can learn from."""
    monkeypatch.setattr(train, "reward_functions", lucky_functions)


def history(world: Path, name: str) -> list[dict[str, Any]]:
    return artifacts.read_json(world / name / artifacts.TRAINING_LOG, remedy="")[:-1]


def test_every_reporter_gets_the_same_curves_and_no_photo(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    reporters = ["tensorboard", "wandb", "trackio"]
    train.run(small_run(world, "reported", 2, report_to=reporters, run_name="reported"))
    wandb.finish()  # as at the end of a process; until then its writer may lag behind
    logs = history(world, "reported")
    assert len(logs) == 2 and all(logs[-1].keys() >= CURVES for log in logs)

    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= {f"train/{name}" for name in CURVES}
    (reward, _) = events.Scalars("train/reward")
    assert reward.value == pytest.approx(logs[0]["reward"])
    (offline,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    sent = offline.read_bytes()
    assert [name for name in CURVES if f"train/{name}".encode() not in sent] == []
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        stored = " ".join(str(one) for one in connection.execute("select * from metrics"))
    assert [name for name in CURVES if f"train/{name}" not in stored] == []
    photo = (world / "data/images").rglob("*.jpg")
    assert next(photo).read_bytes()[:200] not in sent
    assert not list((tmp_path / "wandb").rglob("*.jpg")) + list((tmp_path / "wandb").rglob("*.png"))
    assert len(list((tmp_path / "wandb").rglob("*samples*.json"))) == 1


def test_a_step_is_one_row_and_a_step_without_rollouts_leaves_blanks() -> None:
    columns = (Column("reward", "reward", "{:.3f}".format), Column("left", "left", str))
    assert row(columns, 7, {"reward": 0.5, "left": "2h", "other": 1}) == "    7   0.500    2h"
    assert row(columns, 8, {"left": "1h"}) == "    8            1h"
    assert row(columns, 9, {"train_runtime": 3.0, "reward": None}) is None


def test_the_terminal_and_the_page_show_samples_every_n_steps(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.run(small_run(world, "sampled", 4, samples_every=2))
    out = capsys.readouterr().out
    head, *rows = [line for line in out.splitlines() if re.match(r" step|    \d  ", line)]
    assert head.split()[:2] == ["step", "reward"] and len(rows) == 4
    assert max(map(len, [head, *rows])) <= 110
    assert rows[-1].split()[-1] == "0m00s"
    shown = artifacts.read_rows(world / "sampled" / samples.ROWS, samples.Sample)
    assert sorted({sample.step for sample in shown}) == [0, 2]
    assert len(shown) == 2 * 2  # two photos a step
    assert out.count("France, 100 km off") == 4
    page = (world / "sampled" / samples.PAGE).read_text()
    assert page.count("data:image/jpeg;base64,") == 4
    assert "After 2 steps" in page and all(sample.id in page for sample in shown)


def test_a_resumed_run_samples_again_only_what_it_does_again(world: Path) -> None:
    train.run(small_run(world, "again", 4, samples_every=1))
    last = world / "again/checkpoint-4/trainer_state.json"
    last.unlink()
    hours = [log["hours"] for log in history(world, "again")]
    train.run(small_run(world, "again", 4, samples_every=1, resume_from_checkpoint="auto"))
    shown = artifacts.read_rows(world / "again" / samples.ROWS, samples.Sample)
    assert [sample.step for sample in shown] == [0, 0, 1, 1, 2, 2, 3, 3]
    # The hours before the checkpoint are paid for too.
    assert history(world, "again")[2]["hours"] > hours[1]


def same_reward(shape: Any = None) -> list[Any]:
    """No completion is better than another: the fault that teaches nothing."""
    total, *others = lucky_functions()

    def reward_total(**columns: Any) -> list[float]:
        total(**columns)
        return [0.5] * len(columns["completions"])

    return [reward_total, *others]


@pytest.mark.parametrize("stop_on", [[], ["zero_spread"]])
def test_an_alarm_is_said_once_and_stops_a_run_only_where_the_config_says_so(
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop_on: list[str],
) -> None:
    monkeypatch.setattr(train, "reward_functions", same_reward)
    name = f"alarmed{len(stop_on)}"
    config = small_run(world, name, 8, **{"stop.on": stop_on})
    done = train.run(config)
    out = capsys.readouterr().out
    assert out.count("ALARM zero_spread at step 5: 100% of the groups have no spread") == 1
    assert f"scripts/run_eval.py --run_name check --lora {world / name}" in out
    # The untrained model's format is no alarm so early, and every answer is scripted as French.
    assert re.findall(r"ALARM (\w+)", out) == ["zero_spread", "one_country"]
    gauge = [log["alarms/zero_spread"] for log in history(world, name)]
    assert gauge[:5] == [0, 0, 0, 0, 1]
    if stop_on:
        assert done["stopped"] == "alarm zero_spread, which stop.on names"
        assert done["steps"] == alarms.WINDOW + 1
        assert (world / name / f"checkpoint-{done['steps']}").is_dir()
        assert "--resume_from_checkpoint auto continues" in train.summary_line(done)
    else:
        assert done["stopped"] is None and done["steps"] == 8


def test_the_costs_add_up(world: Path) -> None:
    train.run(small_run(world, "costs", 4, dollars_per_hour=100))
    logs = history(world, "costs")
    assert all(log["dollars"] == pytest.approx(100 * log["hours"]) for log in logs)
    assert [log["hours"] for log in logs] == sorted(log["hours"] for log in logs)
    assert logs[-1]["hours_left"] == 0
    pace = [log["seconds"] for log in logs]
    assert logs[0]["hours_left"] == pytest.approx(3 * pace[0] / 3600)
    assert json.loads((world / "costs/versions.json").read_text())["source"]


def test_samples_hold_hostile_text_harmlessly(world: Path, tmp_path: Path) -> None:
    from geoguessr_rl import data

    photo = data.load_split(world / "data", "train_pool").photos[0]
    text = "<script>alert(1)</script> \ud83d | x\n" * 30
    sample = samples.Sample(3, photo.id, "FR", "", None, 0.0, text)
    samples.add(tmp_path, [sample], {photo.id: photo})
    page = (tmp_path / samples.PAGE).read_text()
    assert "<script>" not in page and "no answer" in page
    first, second = samples.lines([sample])
    assert "France: no answer, 0 points, reward 0.000" in first
    assert len(second) <= 110 and "\n" not in second
