"""Killed at any moment, a run goes on as if nothing had been; told to end, it ends with a save.

On a CPU without vLLM every byte agrees. With vLLM the data, the optimizer and the scheduler still
do, and the completions do not: the engine's sampling state is in no checkpoint.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from geoguessr_rl import artifacts

STEPS, SAVE = 12, 2


class Runs:
    """One run, trained again and again, each time in a fresh fork of the server."""

    def __init__(self, server: "subprocess.Popen[str]", world: Path, name: str, folder: Path):
        self.out, self.process = world / name, server
        self.file = folder / f"{name}.json"
        self.log, self.record = folder / f"{name}.json.log", folder / f"{name}.jsonl"
        run = {"world": str(world), "name": name, "steps": STEPS, "save_steps": SAVE}
        run |= {"record": str(self.record), "resume_from_checkpoint": "auto"}
        self.file.write_text(json.dumps(run))

    def start(self) -> int:
        """Begins or continues the run, and returns its process."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{self.file}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """Waits for the end of the run, and returns its exit code."""
        assert self.process.stdout
        return int(self.process.stdout.readline())

    def seen(self) -> list[tuple[int, list[str]]]:
        """The photos that each rollout was for, by the steps done before it."""
        if not self.record.exists():
            return []
        rows = [json.loads(line) for line in self.record.read_text().splitlines()]
        return [(step, ids) for _, _, step, ids in rows]


@pytest.fixture(scope="module")
def server() -> Iterator["subprocess.Popen[str]"]:
    """A process that has imported everything, and forks for each run."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "small_runs.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def undisturbed(
    server: "subprocess.Popen[str]", world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    runs = Runs(server, world, "undisturbed", tmp_path_factory.mktemp("resume"))
    runs.start()
    assert runs.end() == 0, runs.log.read_text()
    return runs


@pytest.fixture
def runs(
    server: "subprocess.Popen[str]", world: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Runs:
    return Runs(server, world, request.node.name, tmp_path)


def flat(value: Any) -> list[Any]:
    """The leaves of nested states, tensors as lists."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in (key, *flat(value[key]))]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flat(item)]
    return [value.tolist()] if isinstance(value, torch.Tensor) else [value]


def checkpoint_state(path: Path) -> dict[str, Any]:
    """Everything that the next step depends on, and the losses until here."""
    state = json.loads((path / "trainer_state.json").read_text())
    loaded = {
        name: flat(torch.load(path / name, weights_only=True))
        for name in ("optimizer.pt", "scheduler.pt")
    }
    weights = load_file(path / "adapter_model.safetensors")
    losses = [(log["step"], log["loss"], log["reward"]) for log in state["log_history"]]
    return {**loaded, "adapter": flat(weights), "losses": losses}


def require_equal(one: Runs, other: Runs) -> None:
    """Every checkpoint of two runs holds the same."""
    names = [f"checkpoint-{step}" for step in range(SAVE, STEPS + 1, SAVE)]
    for runs in (one, other):
        assert [path.name for path in artifacts.complete_checkpoints(runs.out)] == names
    for name in names:
        first, second = (checkpoint_state(runs.out / name) for runs in (one, other))
        for part in first:
            assert first[part] == second[part], (name, part)


def kill_and_continue(runs: Runs, undisturbed: Runs, kills: int, seed: int) -> None:
    """Kills a run at random moments, checks what each kill cost, and lets it end at last."""
    rng = random.Random(seed)
    order = dict(undisturbed.seen())
    while kills:
        before = len(runs.seen())
        process = runs.start()
        while len(runs.seen()) == before and Path(f"/proc/{process}").exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.4))  # a step or two, and the saves between them
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        code = runs.end()
        assert code in (0, -signal.SIGKILL), runs.log.read_text()
        kills -= code != 0
        fresh = [step for step, _ in runs.seen()[before:]]
        if before and fresh:
            # It begins at the last checkpoint before the kill: nothing else was lost.
            assert fresh[0] % SAVE == 0
            assert fresh[0] >= runs.seen()[before - 1][0] // SAVE * SAVE
        if code == 0 and kills:  # too fast to be killed that often: once more from the start
            check(runs, undisturbed, order)
            shutil.rmtree(runs.out)
            runs.record.unlink()
    runs.start()
    assert runs.end() == 0, runs.log.read_text()
    check(runs, undisturbed, order)


def check(runs: Runs, undisturbed: Runs, order: dict[int, list[str]]) -> None:
    """A run that was killed saw the same photos, and wrote the same checkpoints."""
    assert {step for step, _ in runs.seen()} == set(range(STEPS))
    for step, ids in runs.seen():
        assert ids == order[step], step
    require_equal(runs, undisturbed)


def test_ten_random_kills_lose_nothing_but_the_steps_since_the_last_checkpoint(
    runs: Runs, undisturbed: Runs
) -> None:
    kill_and_continue(runs, undisturbed, kills=10, seed=1)


def test_another_order_or_optimizer_would_be_noticed(undisturbed: Runs) -> None:
    states = [checkpoint_state(undisturbed.out / f"checkpoint-{step}") for step in (2, 4)]
    for part in states[0]:
        assert states[0][part] != states[1][part]
    orders = [ids for _, ids in undisturbed.seen()]
    assert len({tuple(ids) for ids in orders}) > STEPS // 2


def test_sigterm_saves_and_ends_well(runs: Runs, undisturbed: Runs) -> None:
    process = runs.start()
    while not runs.seen():
        time.sleep(0.01)
    os.kill(process, signal.SIGTERM)
    assert runs.end() == 0
    said = runs.log.read_text()
    assert "stopped by SIGTERM: --resume_from_checkpoint auto continues" in said
    saved = artifacts.complete_checkpoints(runs.out)
    assert artifacts.checkpoint_step(saved[-1]) == len(runs.seen()) < STEPS
    runs.start()
    assert runs.end() == 0
    assert [ids for _, ids in runs.seen()] == [ids for _, ids in undisturbed.seen()]
    for step in range(SAVE, STEPS + 1, SAVE):
        name = f"checkpoint-{step}"
        assert checkpoint_state(runs.out / name) == checkpoint_state(undisturbed.out / name)
