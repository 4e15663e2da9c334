"""The weekend's script: every phase in order, each once, whatever happens in between."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
WEEKEND = ROOT / "runbook/weekend.sh"
TICK = 0.02  # seconds between two looks at a weekend
BRIEF = 2.0  # seconds of work; a phase that takes less may end before its middle is hit
STARTED: "list[subprocess.Popen[bytes]]" = []

SMALL = {
    "data": {"eval": {"size": 40, "quick": 20}, "train": {"cap": 12}},
    "warmup": {"steps": 80, "batch_size": 16, "learning_rate": 4e-3},
    "filter": {"rows": 40, "min_rows": 1},
    "grpo": {"trainer": {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 32}},
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded configs, made small."""
    folder = tmp_path_factory.mktemp("a weekend") / "embedded"
    shutil.copytree(ROOT / "configs/embedded", folder)
    yaml = YAML()
    for name, changes in SMALL.items():
        path = folder / f"{name}.yaml"
        config = yaml.load(path)
        for key, value in changes.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        yaml.dump(config, path)
    return folder


def start(configs: Path, out: Path, *args: str) -> "subprocess.Popen[bytes]":
    """Starts a weekend that prints into a file beside its folder."""
    with printed(out).open("w") as log:
        process = subprocess.Popen(
            ["bash", str(WEEKEND), "--config_dir", str(configs), "--output_dir", str(out), *args],
            stdout=log, stderr=subprocess.STDOUT, cwd=out.parent, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def none_goes_on() -> Iterator[None]:
    """Ends the weekends of a test that failed: they have sessions of their own."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def printed(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def begun(out: Path) -> list[str]:
    """The phases that a weekend began since its last start, in order."""
    return re.findall(r"^(.+) \(\d+m\d\ds\)$", printed(out).read_text(), re.MULTILINE)


def stamp(out: Path, phase: str) -> Path:
    return out / "weekend" / phase.replace(" ", "-")


def done(out: Path) -> set[str]:
    """The phases that are done."""
    return {path.name.replace("-", " ") for path in (out / "weekend").glob("*")}


def wait(
    process: "subprocess.Popen[bytes]", out: Path, reached: Callable[[], bool], seconds: float = 600
) -> None:
    """Waits until something is reached; a weekend that ends before has failed."""
    end = time.monotonic() + seconds
    while not reached():
        text = printed(out).read_text()[-3000:]
        assert process.poll() is None and time.monotonic() < end, text
        time.sleep(TICK)


def left_running(out: Path) -> list[list[str]]:
    """The command lines of every process that works for a weekend, in whatever session."""
    found = []
    for other in psutil.process_iter():
        with suppress(psutil.Error):
            if str(out) in " ".join([*other.cmdline(), *other.environ().values()]):
                found.append(other.cmdline())
    return found


def work(process: "subprocess.Popen[bytes]") -> float:
    """The seconds of processor time of a weekend so far: no other load makes them more."""
    total, first = 0.0, psutil.Process(process.pid)
    for one in (first, *first.children(recursive=True)):
        with suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def kill(process: "subprocess.Popen[bytes]", out: Path) -> None:
    """Kills a weekend with all its processes, in an instant."""
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 10  # a killed process takes a moment to be gone
    while found := left_running(out):
        assert time.monotonic() < end, found
        time.sleep(TICK)


def run_quietly(configs: Path, out: Path) -> dict[str, float]:
    """Runs a weekend to its end, and returns its phases and the work of each, in order."""
    process, began, so_far = start(configs, out), dict[str, float](), 0.0
    while process.poll() is None:
        with suppress(psutil.Error):
            so_far = max(so_far, work(process))
        for phase in begun(out):
            began.setdefault(phase, so_far)
        time.sleep(TICK)
    assert process.returncode == 0, printed(out).read_text()[-3000:]
    ends = [*began.values(), so_far][1:]
    return {phase: end - began[phase] for phase, end in zip(began, ends, strict=True)}


def run_killed(configs: Path, out: Path, phases: dict[str, float]) -> list[str]:
    """Kills a weekend in the middle of each phase and at its end; returns the middles it hit."""
    hit = []
    for phase, whole in phases.items():
        process, done_by_then = start(configs, out), stamp(out, phase).exists
        wait(process, out, lambda phase=phase: phase in begun(out))
        half = work(process) + whole / 2
        wait(process, out, lambda p=process, d=done_by_then, h=half: d() or work(p) >= h)
        kill(process, out)
        if not done_by_then():
            hit.append(phase)
        process = start(configs, out)
        wait(process, out, done_by_then)
        kill(process, out)
    return hit


def what_it_made(out: Path) -> dict[str, bytes]:
    """The files that two equal weekends share to the byte."""
    patterns = (
        "report.*", "eval/*/eval_osv/predictions.jsonl", "eval/*/eval_osv/metrics.json",
        "grpo/checkpoint-*/adapter_*", "merged/**/*", "weekend/*",
    )  # fmt: skip
    paths = [path for pattern in patterns for path in out.glob(pattern) if path.is_file()]
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(paths)}


def test_a_dry_run_names_every_phase_and_the_price_and_does_nothing(
    configs: Path, tmp_path: Path
) -> None:
    assert start(ROOT / "configs", tmp_path / "out", "--dry_run").wait() == 0
    text = printed(tmp_path / "out").read_text()
    phases = [line.removeprefix("to do:").strip() for line in text.splitlines() if "to do" in line]
    assert phases == [
        "prepare the data", "measure the base on eval_osv", "measure the base on eval_pano",
        "smoke test", "filter", "train", "measure the checkpoints",
        "measure the trained model on eval_osv", "measure the trained model on eval_pano",
        "write the report", "export",
    ]  # fmt: skip
    assert "seconds a step" in text and "dollars" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [["--config_dir"], ["--fast"], ["--config_dir", "/nowhere"]])
def test_a_mistake_is_one_sentence(flags: list[str]) -> None:
    command = ["bash", str(WEEKEND), *flags]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1


def open_the_demo(command: list[str], folder: Path) -> None:
    """Opens a demo until its page is there, and asks it to end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "demo.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=file, stderr=subprocess.STDOUT, cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while f"demo: http://127.0.0.1:{port}" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(TICK)
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_killed_in_and_after_every_phase_it_ends_with_the_same_report(
    configs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "my weekend"
    phases = run_quietly(configs, out)
    assert done(out) == set(phases) and len(phases) == 11
    quiet = what_it_made(out)
    out.rename(tmp_path / "quiet")  # the other runs at the same path
    hit = run_killed(configs, out, phases)
    assert all(phase in hit or phases[phase] < BRIEF for phase in phases), (phases, hit)

    process = start(configs, out)
    assert process.wait() == 0
    text = printed(out).read_text()
    assert re.findall(r"^done:    (.+)$", text, re.MULTILINE) == list(phases)
    assert not begun(out) and "Traceback" not in text  # nothing is done twice
    killed = what_it_made(out)
    assert killed.keys() == quiet.keys()
    differing = [name for name, content in quiet.items() if killed[name] != content]
    assert not differing, differing
    (adapter,) = (name for name in quiet if name.endswith("checkpoint-6/adapter_model.safetensors"))
    assert {"report.html", "report.md", "merged/model.safetensors", adapter} <= quiet.keys()

    (command,) = re.findall(r"^next: (.+)$", text, re.MULTILINE)
    open_the_demo(shlex.split(command), tmp_path)
