"""The benchmark: figures, tables, exit codes, and the file of last results. No test is timed."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from geoguessr_rl import artifacts
from geoguessr_rl.config import run_script

Ended = tuple[int, str, str]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the benchmark, as its command does: from `scripts/`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


@pytest.fixture
def benchmark(
    module: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., Ended]:
    """Runs the command in this process, tasks and all, so that a test can change their bounds."""
    command = module("benchmark")
    monkeypatch.setattr(command, "run_apart", command.run_task)

    def run(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["benchmark.py", "--output_dir", str(tmp_path), *args])
        code = 0
        try:
            run_script(command.main)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def made_up(module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets tasks give these figures; the lists come by task."""

    def give(**figures: list[Any]) -> None:
        for name in module("benchmark").TASKS:
            task = module(f"benchmarks.{name}")
            monkeypatch.setattr(task, "run", lambda scale, name=name: figures.get(name, []))

    return give


def stored(folder: Path) -> Any:
    return json.loads((folder / "benchmark.json").read_text())


@pytest.mark.parametrize(
    ("value", "bounds", "kept"),
    [
        (2.0, {}, None),
        (2.0, {"at_most": 2.0}, True),  # a bound itself is kept
        (2.1, {"at_most": 2.0}, False),
        (4.0, {"at_least": 4.0}, True),
        (3.9, {"at_least": 4.0}, False),
        (1.0, {"at_least": 0.6, "at_most": 1.5}, True),
        (0.5, {"at_least": 0.6, "at_most": 1.5}, False),
        (1.6, {"at_least": 0.6, "at_most": 1.5}, False),
        (0.1, {"at_most": 0.0}, False),  # a bound of zero is a bound
        (-0.1, {"at_least": 0.0}, False),
        (float("nan"), {"at_most": 2.0}, False),
    ],
)
def test_a_figure_keeps_its_bounds_or_breaks_them(
    value: float, bounds: dict[str, float], kept: bool | None, module: Callable[[str], Any]
) -> None:
    assert module("benchmarks.measure").Figure("speed", value, "times", **bounds).kept is kept


def test_a_repeated_figure_is_the_median_of_pairs(module: Callable[[str], Any]) -> None:
    measure = module("benchmarks.measure")
    pairs = measure.ratios([3.0, 40.0, 8.0], [1.0, 10.0, 1.0])
    figure = measure.median_of("speed", pairs, "times", "a walk", at_most=4.5)
    assert (figure.value, figure.spread, figure.repeats, figure.kept) == (4.0, (3.0, 8.0), 3, True)


def test_the_table_is_aligned_and_says_everything(module: Callable[[str], Any]) -> None:
    figure = module("benchmarks.measure").Figure
    table = module("benchmarks.results").table(
        [
            figure("run", 1.0234, "times", "a walk", at_most=1.05, spread=(0.9, 1.2), repeats=9),
            figure("run a long way", 61234.0, "s", at_most=60.0),
            figure("jump", 2.0, "times", "a step", at_least=0.6, at_most=1.5),
            figure("rest", 12.34, "MB"),
        ]
    )
    assert table.splitlines() == [
        "figure          value        spread                  against  bound         verdict",
        "run             1.023 times  0.900 to 1.200, 9 runs  a walk   at most 1.05  kept",
        "run a long way  61,234 s     1 run                   –        at most 60    BROKEN",
        "jump            2.000 times  1 run                   a step   0.6 to 1.5    BROKEN",
        "rest            12.3 MB      1 run                   –        –             –",
    ]


def test_all_is_every_task_and_their_results_are_kept(
    benchmark: Callable[..., Ended],
    made_up: Callable[..., None],
    module: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    figure = module("benchmarks.measure").Figure
    made_up(
        score=[figure("score", 3.0, "times", "reading", at_most=4.0)],
        train=[figure("train", 1.5, "times", "a bare trainer", spread=(1.0, 2.0), repeats=21)],
    )
    for words in ((), ("all",), ("score", "all")):
        code, out, _ = benchmark(*words)
        tasks = [line for line in out.splitlines() if line in module("benchmark").TASKS]
        assert code == 0 and tasks == ["reward", "data", "score", "eval", "train", "ray"]
    book = stored(tmp_path)
    assert [*book["results"]] == [*module("benchmark").TASKS] and book["trials"] == {}
    score = book["results"]["score"]
    assert score["figures"] == [
        {
            "name": "score", "value": 3.0, "unit": "times", "against": "reading",
            "at_least": None, "at_most": 4.0, "spread": None, "repeats": 1, "kept": True,
        }
    ]  # fmt: skip
    assert {"date", "commit", "seconds"} <= score.keys() and score["trial"] is False
    assert {"cpu", "cores", "memory_gb", "kernel", "load"} == score["machine"].keys()
    assert {"python", "polars", "pillow"} <= score["versions"].keys()
    page = (tmp_path / "benchmark.md").read_text().splitlines()
    assert page[0] == "| task | figure | value | spread | against | bound | verdict |"
    assert page[2] == "| score | score | 3.000 times | 1 run | reading | at most 4 | kept |"
    assert page[3].startswith("| train | train | 1.500 times | 1.000 to 2.000, 21 runs | a bare")
    assert len(page) == 6 and str(score["machine"]["cpu"]) in page[5]  # one machine, one note


@pytest.mark.parametrize(("bound", "verdict", "checked"), [(1e9, "kept", 0), (0.0, "BROKEN", 1)])
def test_check_exits_with_1_on_a_broken_bound_alone(
    bound: float,
    verdict: str,
    checked: int,
    benchmark: Callable[..., Ended],
    module: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module("benchmarks.reward"), "BOUND_US", bound)
    code, out, _ = benchmark("reward", "--check", "--scale", "0.01")
    assert code == checked and f"at most {bound:g}  {verdict}" in out
    assert ("bounds broken: reward, read and score a completion" in out) == bool(checked)
    code, out, _ = benchmark("reward", "--scale", "0.01")
    assert code == 0 and f"at most {bound:g}  {verdict}" in out


def test_the_reward_task_runs_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/benchmark.py", "reward", "--output_dir", tmp_path]
    ended = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 0, ended.stderr
    bounded, ratio = stored(tmp_path)["results"]["reward"]["figures"]
    assert bounded["unit"] == "us" and bounded["at_most"] == 50 and bounded["value"] > 0
    assert ratio["unit"] == "times" and "json.loads" in ratio["against"] and ratio["value"] > 1
    for figure in (bounded, ratio):
        low, high = figure["spread"]
        assert low <= figure["value"] <= high and figure["repeats"] > 1
        assert figure["name"] in ended.stdout


def test_other_tasks_keep_their_last_results(
    benchmark: Callable[..., Ended],
    made_up: Callable[..., None],
    module: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    figure = module("benchmarks.measure").Figure
    made_up(score=[figure("score", 1.0, "s")], ray=[figure("ray", 1.0, "s")])
    benchmark("score", "ray")
    before = stored(tmp_path)["results"]
    made_up(score=[figure("score", 2.0, "s")])
    benchmark("score")
    after = stored(tmp_path)["results"]
    assert after["ray"] == before["ray"] and after["score"]["figures"][0]["value"] == 2.0
    assert "| ray | ray | 1.000 s |" in (tmp_path / "benchmark.md").read_text()


def test_a_trial_is_marked_and_replaces_no_result(
    benchmark: Callable[..., Ended],
    made_up: Callable[..., None],
    module: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    figure = module("benchmarks.measure").Figure
    made_up(score=[figure("score", 1.0, "s")])
    benchmark("score")
    before = stored(tmp_path)["results"]
    made_up(score=[figure("score", 2.0, "s")], ray=[figure("ray", 3.0, "s")])
    _, out, _ = benchmark("score", "ray", "--scale", "0.1")
    assert "score (trial at 0.1 of the size)" in out
    book = stored(tmp_path)
    assert book["results"] == before
    assert book["trials"]["score"]["trial"] is True and book["trials"]["score"]["scale"] == 0.1
    page = (tmp_path / "benchmark.md").read_text()
    assert "| score | score | 1.000 s |" in page and "2.000 s" not in page
    assert "| ray (trial at 0.1) | ray | 3.000 s |" in page  # there is nothing else to show


def test_a_write_that_is_cut_short_leaves_the_last_results(
    benchmark: Callable[..., Ended],
    made_up: Callable[..., None],
    module: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    figure = module("benchmarks.measure").Figure
    made_up(score=[figure("score", 1.0, "s")])
    benchmark("score")
    before = (tmp_path / "benchmark.json").read_bytes()

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    made_up(score=[figure("score", 2.0, "s")])
    with monkeypatch.context() as patch:
        patch.setattr(artifacts.os, "fsync", no_space)
        with pytest.raises(OSError, match="No space"):
            benchmark("score")
    assert (tmp_path / "benchmark.json").read_bytes() == before


def test_a_task_that_fails_loses_none_before_it(
    benchmark: Callable[..., Ended],
    made_up: Callable[..., None],
    module: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fail(scale: float) -> None:
        raise RuntimeError("no engine")

    made_up(score=[module("benchmarks.measure").Figure("score", 1.0, "s")])
    monkeypatch.setattr(module("benchmarks.eval"), "run", fail)
    with pytest.raises(RuntimeError, match="no engine"):
        benchmark()
    assert [*stored(tmp_path)["results"]] == ["reward", "data", "score"]


def test_a_damaged_file_is_said_before_anything_is_measured(
    benchmark: Callable[..., Ended], made_up: Callable[..., None], tmp_path: Path
) -> None:
    made_up()
    (tmp_path / "benchmark.json").write_text('{"results": {')
    code, out, err = benchmark("score")
    assert code == 2 and out == "" and "is not valid JSON" in err and "delete it" in err


@pytest.mark.parametrize(("load", "warned"), [(0.5, False), (0.51, True)])
def test_a_busy_machine_is_said_in_one_sentence(
    load: float,
    warned: bool,
    benchmark: Callable[..., Ended],
    made_up: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    made_up()
    _, out, _ = benchmark("score")
    lines = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert len(lines) == warned
    assert stored(tmp_path)["results"]["score"]["machine"]["load"] == load


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["scores"], "no task 'scores'; there are: reward, data, score, eval, train, ray, all"),
        (["score", "--scale", "0"], "0 is not over 0 and at most 1"),
        (["score", "--scale", "1.5"], "1.5 is not over 0 and at most 1"),
        (["score", "--scale", "nan"], "nan is not over 0 and at most 1"),
        (["score", "--scale", "half"], "invalid share value: 'half'"),
    ],
)
def test_a_mistake_is_refused(args: list[str], said: str, benchmark: Callable[..., Ended]) -> None:
    code, out, err = benchmark(*args)
    assert code == 2 and out == "" and said in err


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read on Linux")
def test_memory_and_failures_of_a_script_are_seen(
    module: Callable[[str], Any], tmp_path: Path
) -> None:
    measure = module("benchmarks.measure")
    (tmp_path / "big.py").write_text("import time\nheld = b'x' * 200_000_000\ntime.sleep(1)\n")
    taken, peak = measure.run_script(tmp_path / "big.py")
    assert taken > 1 and peak > 200_000_000
    (tmp_path / "bad.py").write_text("raise SystemExit('no such file')")
    with pytest.raises(RuntimeError, match="no such file"):
        measure.run_script(tmp_path / "bad.py")
