"""Evaluation through its real script, with scripted answers: resume, refusals, limits, figures."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geoguessr_rl import artifacts
from geoguessr_rl.backends.scripted import ScriptedBackend
from geoguessr_rl.phases import evaluate
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Prediction

PHOTOS = [(f"{n:04d}", -60 + n % 120 + 0.5, n % 170 + 0.25, "NA") for n in range(1500)]
Script = Callable[..., Any]
Split = Callable[..., Path]


def run_dir(folder: Path, name: str = "base", split: str = "eval_osv") -> Path:
    return folder / "runs" / name / split


def flags(folder: Path, *more: object, block_size: int = 4) -> list[object]:
    return [
        *("--data_dir", folder / "data", "--output_dir", folder / "runs"),
        *("--backend", "scripted", "--set", f"generation.block_size={block_size}", *more),
    ]


def write_answers(path: Path, answers: dict[str, Any]) -> Path:
    path.write_text(json.dumps(answers), encoding="utf-8")
    return path


def outputs(folder: Path) -> dict[str, bytes]:
    names = (artifacts.PREDICTIONS, artifacts.METRICS, artifacts.IDENTITY)
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture
def folder(tmp_path: Path, make_split: Split) -> Path:
    """A folder with spaces that holds a split of ten photos."""
    root = tmp_path / "a folder with spaces"
    make_split(root / "data", PHOTOS[:10])
    return root


def wait_for_lines(path: Path, lines: int, process: "subprocess.Popen[str]") -> None:
    """Waits until another process has written that many lines."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_killed_run_continues_to_the_same_bytes_and_redoes_no_finished_block(
    tmp_path: Path, make_split: Split, start_script: Script, script: Script
) -> None:
    killed, straight = tmp_path / "killed run", tmp_path / "straight"
    for folder in (killed, straight):
        make_split(folder / "data", PHOTOS)
    # Each row is long and each photo a block, so that the run takes a while.
    answer = format_completion("Namibia", -22.5, 17.0, clues="sand " * 400, style="think")
    answers = write_answers(tmp_path / "answers.json", {"*": answer, "0003": "I cannot tell."})
    more = ["--set", f"generation.script={answers}"]

    process = start_script("run_eval.py", *flags(killed, *more, block_size=1))
    path = run_dir(killed) / artifacts.PREDICTIONS
    wait_for_lines(path, 20, process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = path.read_bytes().count(b"\n")
    assert 20 <= finished < len(PHOTOS)
    assert not (run_dir(killed) / artifacts.METRICS).exists()

    # A mark in a finished row, and half a line at the end as a killed writer leaves it.
    lines = path.read_bytes().split(b"\n")[:finished]
    marked = [lines[0][:-1] + b" }", *lines[1:]]
    path.write_bytes(b"\n".join(marked) + b"\n" + lines[0][:50])
    assert script("run_eval.py", *flags(killed, *more, block_size=1)).code == 0
    now = path.read_bytes().split(b"\n")
    assert now[:finished] == marked
    path.write_bytes(b"\n".join([lines[0], *now[1:]]))

    assert script("run_eval.py", *flags(straight, *more, block_size=1)).code == 0
    assert outputs(run_dir(killed)) == outputs(run_dir(straight))


def test_a_complete_run_generates_nothing(
    folder: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script("run_eval.py", *flags(folder)).code == 0
    before = outputs(run_dir(folder))
    stamp = (run_dir(folder) / artifacts.PREDICTIONS).stat().st_mtime_ns
    monkeypatch.setattr(ScriptedBackend, "generate", lambda *_: pytest.fail("generated again"))
    assert script("run_eval.py", *flags(folder)).code == 0
    assert outputs(run_dir(folder)) == before
    assert (run_dir(folder) / artifacts.PREDICTIONS).stat().st_mtime_ns == stamp


@pytest.mark.parametrize("cut", [1, 30, 400, 1500, 5000])
def test_half_a_last_line_is_dropped(cut: int, folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder)).code == 0
    before = outputs(run_dir(folder))
    path = run_dir(folder) / artifacts.PREDICTIONS
    path.write_bytes(path.read_bytes()[:-cut])
    assert script("run_eval.py", *flags(folder)).code == 0
    assert outputs(run_dir(folder)) == before


def test_a_damaged_line_in_the_middle_is_refused_and_named(folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder)).code == 0
    path = run_dir(folder) / artifacts.PREDICTIONS
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], lines[3][:40], *lines[4:]]))
    ended = script("run_eval.py", *flags(folder))
    assert ended.code == 2 and "line 4 is damaged" in ended.err


def test_rows_of_other_photos_are_refused(folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder)).code == 0
    path = run_dir(folder) / artifacts.PREDICTIONS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2], lines[1], *lines[3:]]))
    ended = script("run_eval.py", *flags(folder))
    assert ended.code == 2 and "rows of other photos" in ended.err


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["--set", "generation.script=random_land"], "model"),
        (["--set", "generation.seed=7"], "sampling.seed"),
        (["--set", "generation.temperature=0.5"], "sampling.temperature"),
        (["--set", "generation.max_tokens=99"], "sampling.max_tokens"),
        (["--set", "prompt.style=direct"], "prompt_style"),
        (["--set", "generation.block_size=5"], "block_size"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_with_the_difference(
    more: list[str], key: str, folder: Path, script: Script
) -> None:
    assert script("run_eval.py", *flags(folder)).code == 0
    before = outputs(run_dir(folder))
    ended = script("run_eval.py", *flags(folder, *more))
    assert ended.code == 2 and "Traceback" not in ended.err
    assert f"{key} was " in ended.err and str(run_dir(folder)) in ended.err
    assert outputs(run_dir(folder)) == before


def test_rows_of_another_model_are_refused(folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder)).code == 0
    path = run_dir(folder) / artifacts.IDENTITY
    stored = json.loads(path.read_text())
    for key, value in (("backend", "vllm"), ("model", "Qwen/Qwen3-VL-8B-Instruct")):
        path.write_text(json.dumps({**stored, key: value}))
        ended = script("run_eval.py", *flags(folder))
        assert ended.code == 2 and f"{key} was {value!r} and is now " in ended.err


def test_other_answers_under_the_same_name_are_refused(folder: Path, script: Script) -> None:
    answers = write_answers(folder / "answers.json", {"*": "I cannot tell."})
    more = ["--set", f"generation.script={answers}"]
    assert script("run_eval.py", *flags(folder, *more, "--limit", 4)).code == 0
    write_answers(answers, {"*": "I can."})
    ended = script("run_eval.py", *flags(folder, *more))
    assert ended.code == 2 and "model_files was " in ended.err


def test_other_photos_under_the_same_name_are_refused(
    folder: Path, script: Script, make_split: Split
) -> None:
    assert script("run_eval.py", *flags(folder)).code == 0
    make_split(folder / "data", [*PHOTOS[:9], ("0009", 1.0, 2.0, "FR")])
    ended = script("run_eval.py", *flags(folder))
    assert ended.code == 2 and "split_fingerprint was " in ended.err


@pytest.mark.parametrize("limit", ["0", "-1", "abc", "1.5", ""])
def test_a_limit_that_is_no_count_is_an_error(limit: str, folder: Path, script: Script) -> None:
    ended = script("run_eval.py", *flags(folder, f"--limit={limit}"))
    assert ended.code == 2 and "limit" in ended.err and "Traceback" not in ended.err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("limit", "n"), [("1", 1), ("9", 9), ("10", 10), ("1000000", 10)])
def test_a_limit_is_a_prefix_and_more_than_there_is_means_all(
    limit: str, n: int, folder: Path, script: Script
) -> None:
    ended = script("run_eval.py", *flags(folder, "--limit", limit))
    assert ended.code == 0 and f"n {n}," in ended.out
    rows = artifacts.read_rows(run_dir(folder) / artifacts.PREDICTIONS, Prediction)
    assert [row.id for row in rows] == [photo[0] for photo in PHOTOS[:n]]
    assert script("run_eval.py", *flags(folder)).code == 0
    extended = outputs(run_dir(folder))
    assert script("run_eval.py", *flags(folder, "--run_name", "one go")).code == 0
    straight = outputs(run_dir(folder, "one go"))
    assert extended[artifacts.PREDICTIONS] == straight[artifacts.PREDICTIONS]
    assert extended[artifacts.IDENTITY] == straight[artifacts.IDENTITY]


def test_a_smaller_limit_later_measures_the_prefix_and_keeps_the_rows(
    folder: Path, script: Script
) -> None:
    assert script("run_eval.py", *flags(folder)).code == 0
    before = outputs(run_dir(folder))
    ended = script("run_eval.py", *flags(folder, "--limit", 3))
    assert ended.code == 0 and "n 3," in ended.out
    assert "keeps the figures of the longer run" in ended.out
    assert outputs(run_dir(folder)) == before
    assert script("run_eval.py", *flags(folder)).code == 0
    assert outputs(run_dir(folder)) == before


def test_an_unknown_split_names_the_splits(folder: Path, script: Script, make_split: Split) -> None:
    make_split(folder / "data", PHOTOS[:3], name="eval_quick")
    ended = script("run_eval.py", *flags(folder, "--split", "eval_osw"))
    assert ended.code == 2 and "'eval_osw'; it holds eval_osv, eval_quick" in ended.err
    shutil.rmtree(folder / "data")
    ended = script("run_eval.py", *flags(folder))
    assert ended.code == 2 and "run scripts/prepare_data.py first" in ended.err


def test_two_processes_cannot_write_one_run(folder: Path, script: Script) -> None:
    with artifacts.run_lock(run_dir(folder)):
        ended = script("run_eval.py", *flags(folder))
    assert ended.code == 2 and f"process {os.getpid()} " in ended.err


def test_the_figures_are_those_of_the_answers(folder: Path, script: Script) -> None:
    right = {
        p[0]: format_completion("Namibia", p[1], p[2], clues="Sand.", style="think")
        for p in PHOTOS[:8]
    }
    script_file = write_answers(folder / "answers.json", {**right, "*": "I cannot tell."})
    ended = script("run_eval.py", *flags(folder, "--set", f"generation.script={script_file}"))
    assert ended.code == 0
    metrics = json.loads((run_dir(folder) / artifacts.METRICS).read_text())
    assert metrics["n"] == 10 and metrics["complete"]
    assert metrics["format_rate"] == metrics["country_acc"] == 0.8
    assert metrics["mean_geoscore"] == pytest.approx(4000)
    assert metrics["median_km"] == 0
    assert metrics["run"]["sampling"]["temperature"] == 0
    assert evaluate.summary_line(metrics) + "\n" == ended.out
    assert "GeoScore 4000, country 80.0%, format 80.0%, median 0 km" in ended.out


def test_a_run_in_which_nothing_parses_has_null_figures_in_valid_json(
    folder: Path, script: Script
) -> None:
    answers = write_answers(folder / "answers.json", {"*": "I cannot tell."})
    ended = script("run_eval.py", *flags(folder, "--set", f"generation.script={answers}"))
    assert ended.code == 0 and "median none" in ended.out

    def no_constant(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    text = (run_dir(folder) / artifacts.METRICS).read_text()
    metrics = json.loads(text, parse_constant=no_constant)
    assert metrics["format_rate"] == 0 and metrics["median_km"] is None


def test_the_resolved_config_stands_beside_the_run(folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder, "--limit", 2)).code == 0
    config = json.loads((run_dir(folder) / artifacts.RESOLVED_CONFIG).read_text())
    assert config["limit"] == 2 and config["generation"]["backend"] == "scripted"
    assert config["generation"]["block_size"] == 4 and config["model"]["name"].startswith("Qwen/")


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (None, "does not exist"),
        ("{", "not valid JSON"),
        ("[]", "must map photo ids"),
        ('{"0000": "x"}', "no completion for photo 0001"),
        ('{"*": 5}', "must be a completion or a list"),
        ('{"*": []}', "must be a completion or a list"),
        ('{"*": [null]}', "must be a completion or a list"),
    ],
)
def test_a_bad_script_of_answers_is_one_sentence(
    answers: str | None, says: str, folder: Path, script: Script
) -> None:
    path = folder / "answers.json"
    if answers is not None:
        path.write_text(answers)
    ended = script("run_eval.py", *flags(folder, "--set", f"generation.script={path}"))
    assert ended.code == 2 and says in ended.err and "Traceback" not in ended.err


def test_an_adapter_has_no_meaning_without_a_model(folder: Path, script: Script) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    ended = script("run_eval.py", *flags(folder, "--lora", folder / "adapter"))
    assert ended.code == 2 and "--lora has no meaning" in ended.err


@pytest.mark.parametrize("rule", ["constant", "random_land"])
def test_baselines_answer_every_photo_in_the_format(
    rule: str, folder: Path, script: Script
) -> None:
    assert script("run_eval.py", *flags(folder, "--set", f"generation.script={rule}")).code == 0
    rows = artifacts.read_rows(run_dir(folder) / artifacts.PREDICTIONS, Prediction)
    assert all(row.outcome == "answered" and row.pred_country_iso2 for row in rows)
    assert (len({row.pred_country for row in rows}) == 1) == (rule == "constant")
