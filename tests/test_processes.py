"""Two processes train as one does on the same global batch; the main one alone writes.

They are started by torchrun on the CPU with gloo, and each asserts how many there are. Completions
are scripted, since each process would sample with a seed of its own.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from geoguessr_rl import artifacts

STEPS = 4


def launch(world: Path, folder: Path, name: str, processes: int) -> tuple[list[Any], str]:
    """Trains with so many processes; returns what each recorded, and what was printed."""
    file, record = folder / f"{name}.json", folder / f"{name}.jsonl"
    run = {"world": str(world), "name": name, "steps": STEPS, "record": str(record)}
    run |= {"scripted": True, "per_device_train_batch_size": 8 // processes}
    file.write_text(json.dumps(run))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={processes}", str(Path(__file__).parent / "small_runs.py"), str(file),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in record.read_text().splitlines()], ended.stdout


@pytest.fixture(scope="module")
def launched(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """One process and two, on the same global batch."""
    folder = tmp_path_factory.mktemp("processes")
    with ThreadPoolExecutor() as both:  # much of a start is waiting
        runs = {n: both.submit(launch, world, folder, f"of-{n}", n) for n in (1, 2)}
        return {n: run.result() for n, run in runs.items()}


def test_two_processes_share_each_batch_and_see_what_one_does(launched: dict[int, Any]) -> None:
    (alone, _), (both, _) = launched[1], launched[2]
    assert {rank for rank, *_ in alone} == {"0"} and {rank for rank, *_ in both} == {"0", "1"}
    for step in range(STEPS):
        (whole,) = [ids for _, _, number, ids in alone if number == step]
        halves = {rank: ids for rank, _, number, ids in both if number == step}
        assert [*halves["0"], *halves["1"]] == whole


def test_two_processes_agree_with_one(launched: dict[int, Any], world: Path) -> None:
    logs, weights = [], []
    for count in (1, 2):
        checkpoint = world / f"of-{count}/checkpoint-{STEPS}"
        logs.append(json.loads((checkpoint / "trainer_state.json").read_text())["log_history"])
        weights.append(load_file(checkpoint / "adapter_model.safetensors"))
    for one, two in zip(*logs, strict=True):
        for key in ("loss", "reward", "grad_norm", "group_std", "entropy"):
            assert one[key] == pytest.approx(two[key], abs=1e-4), (one["step"], key)
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], atol=1e-4, rtol=0)
    assert any(value.abs().max() > 1e-3 for key, value in weights[0].items() if "lora_B" in key)


def test_only_the_main_process_prints_and_writes(launched: dict[int, Any], world: Path) -> None:
    for count, (_, out) in launched.items():
        assert out.count("rollouts every 1 steps") == 1
        assert out.count("trained 4 steps") == 1
        rows = [line for line in out.splitlines() if line.startswith("    4 ")]
        assert len(rows) == 1, out
        assert len(artifacts.read_training_log(world / f"of-{count}")) == STEPS
    states = sorted(path.name for path in (world / "of-2/checkpoint-4").glob("rng_state*"))
    assert states == ["rng_state_0.pth", "rng_state_1.pth"]
    identities = [json.loads((world / f"of-{n}/run.json").read_text()) for n in (1, 2)]
    assert identities[0]["completions_a_step"] == identities[1]["completions_a_step"] == 8
