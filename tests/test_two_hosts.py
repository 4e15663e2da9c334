"""Two hosts in network namespaces: Ray and torchrun give what one machine gives.

Where the system forbids network namespaces, every test here is skipped and says why.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_faults import handled_by
from safetensors.torch import load_file
from test_processes import STEPS, launch
from test_ray import evaluating, ids_of, written
from two_hosts import (
    ADDRESSES,
    CABLE,
    PORT,
    environment,
    forbidden,
    start_driver,
    start_ray,
    torchrun,
    two_hosts,
    unplug,
)
from warm_base import warm_up

from geoguessr_rl.config import CONFIGS, DataConfig, FilterConfig, load
from geoguessr_rl.phases import evaluate, prepare
from geoguessr_rl.phases import filter as learnable

Drive = Callable[..., Any]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    if reason := forbidden():
        pytest.skip(f"two hosts need network namespaces ({reason})")
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def head(hosts: tuple[str, str]) -> tuple[str, str]:
    start_ray(hosts[0], 0)
    return hosts


@pytest.fixture
def drive(head: tuple[str, str], tmp_path: Path) -> Iterator[Drive]:
    """Runs a phase from the first host on both; the second one joins anew for each test."""
    start_ray(head[1], 1)

    def run(phase: str, flags: dict[str, Any], *, lose: bool = False, **faults: Any) -> int:
        notes = tmp_path / "notes"
        notes.mkdir()
        cluster = {"engine": "ray", "ray.address": f"{ADDRESSES[0]}:{PORT}"}
        job = {
            "phase": phase,
            "flags": {key: str(value) for key, value in flags.items()} | cluster,
            "faults": {"notes": str(notes), **faults},
        }
        driver = start_driver(head[0], tmp_path / "job.json", job)
        end = time.monotonic() + 240
        while driver.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
            # The second host goes while it works, after its first block was finished.
            if lose and len(handled_by(notes)) == 2 and min(handled_by(notes).values()) > 6:
                unplug(head[1])
                lose = False
        if driver.poll() is None:
            driver.kill()
        out, err = driver.communicate()
        assert driver.returncode == 0, out[-2000:] + err[-4000:]
        assert not lose, "the second host was never lost"
        return len(handled_by(notes))

    yield run
    unplug(head[1])


@pytest.fixture(scope="module")
def local(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the local engine writes: data, an evaluation and the filter's folder."""
    root = tmp_path_factory.mktemp("one machine")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    prepare.run(load(DataConfig, CONFIGS / "embedded/data.yaml", flags=preparing(world, root)))
    evaluate.run(evaluating(world, root / "runs"))
    warm_up(world)
    shutil.copytree(world / "data", root / "pool")
    learnable.run(
        load(FilterConfig, CONFIGS / "embedded/filter.yaml", flags=filtering(world, root))
    )
    torch.set_num_threads(threads)
    return root


def preparing(world: Path, root: Path) -> dict[str, Any]:
    return {"source.root": world / "world", "output_dir": root / "data"}


def filtering(world: Path, root: Path) -> dict[str, Any]:
    return {
        "model.name": str(world / "warm"),  # an untrained model answers all photos alike
        "prompt.style": "direct",
        "data_dir": root / "pool",
        "output_dir": root / "filter",
        "generation.block_size": 4,
        "generation.max_tokens": 32,
        "min_rows": 0,
    }


def evaluation_flags(world: Path, root: Path) -> dict[str, Any]:
    return {
        "model.name": world / "tiny",
        "data_dir": world / "data",
        "output_dir": root / "runs",
        "generation.block_size": 5,
        "generation.max_tokens": 8,
    }


def test_two_hosts_evaluate_as_one_machine_does(
    drive: Drive, world: Path, local: Path, tmp_path: Path
) -> None:
    used = drive("eval", evaluation_flags(world, tmp_path), seconds=0.1)
    assert used == 2
    assert written(tmp_path / "runs") == written(local / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["data", "eval", "filter"])
def test_a_worker_and_then_a_whole_host_may_die(
    phase: str, drive: Drive, world: Path, local: Path, tmp_path: Path
) -> None:
    victim = ids_of(world)[2]
    if phase == "data":
        folder, flags = "data", preparing(world, tmp_path)
    elif phase == "eval":
        folder, flags = "runs", evaluation_flags(world, tmp_path) | {"generation.block_size": 5}
    else:
        shutil.copytree(world / "data", tmp_path / "pool")
        folder, flags = "filter", filtering(world, tmp_path)
        victim = next((world / "data/images/train").glob("*")).stem
    drive(phase, flags, lose=True, once=[victim], seconds=0.3)
    assert (tmp_path / "notes" / f"{victim}.died").exists()
    assert written(tmp_path / folder) == written(local / folder)
    if phase == "filter":
        assert written(tmp_path / "pool") == written(local / "pool")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["data", "filter"])
def test_two_hosts_prepare_and_filter_as_one_machine_does(
    phase: str, drive: Drive, world: Path, local: Path, tmp_path: Path
) -> None:
    if phase == "data":
        drive("data", preparing(world, tmp_path))
        assert written(tmp_path / "data") == written(local / "data")
        return
    shutil.copytree(world / "data", tmp_path / "pool")
    drive("filter", filtering(world, tmp_path))
    assert written(tmp_path / "filter") == written(local / "filter")
    assert written(tmp_path / "pool") == written(local / "pool")


@pytest.mark.slow
def test_two_hosts_train_as_one_process_does(
    hosts: tuple[str, str], world: Path, tmp_path: Path
) -> None:
    launch(world, tmp_path, "alone", 1)
    file, record = tmp_path / "both.json", tmp_path / "both.jsonl"
    run = {"world": str(world), "name": "both", "steps": STEPS, "record": str(record)}
    file.write_text(json.dumps({**run, "scripted": True, "per_device_train_batch_size": 4}))
    env = {**environment(), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": CABLE}
    processes = [
        subprocess.Popen(
            torchrun(host, rank, Path(__file__).parent / "small_runs.py", file),
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    seen = [json.loads(line) for line in record.read_text().splitlines()]
    assert {rank for rank, *_ in seen} == {"0", "1"}  # small_runs asserts the world's size
    logs, weights = [], []
    for name in ("alone", "both"):
        checkpoint = world / name / f"checkpoint-{STEPS}"
        logs.append(json.loads((checkpoint / "trainer_state.json").read_text())["log_history"])
        weights.append(load_file(checkpoint / "adapter_model.safetensors"))
    for one, two in zip(*logs, strict=True):
        for key in ("loss", "reward", "grad_norm", "group_std", "entropy"):
            assert one[key] == pytest.approx(two[key], abs=1e-4), (one["step"], key)
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], atol=1e-4, rtol=0)


def test_the_system_says_why_it_makes_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert forbidden() == "the command ip of iproute2 is not installed"
