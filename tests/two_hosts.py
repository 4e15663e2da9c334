"""Two hosts on one machine: network namespaces that a cable joins, and what runs inside them.

`python two_hosts.py JOB.json` is a driver: it runs one phase on the Ray cluster of a job's config.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

PORT = 6379
CABLE = "cable"
ADDRESSES = ("10.213.71.1", "10.213.71.2")


def forbidden() -> str | None:
    """Why this system makes no network namespaces, or None where it does."""
    if shutil.which("ip") is None:
        return "the command ip of iproute2 is not installed"
    name = f"geo{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def inside(host: str, *command: object) -> list[str]:
    """The command line that runs a command on a host."""
    return ["ip", "netns", "exec", host, *map(str, command)]


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Makes two hosts with the addresses `ADDRESSES`; whatever runs on them ends with the block."""
    hosts = (f"geo{os.getpid()}a", f"geo{os.getpid()}b")
    ends = (f"v{os.getpid()}a", f"v{os.getpid()}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for host in hosts:
            ip("netns", "add", host)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end, address in zip(hosts, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", host, "name", CABLE)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", CABLE)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", CABLE, "up")
            ip("-n", host, "route", "add", "default", "dev", CABLE)  # how Ray finds its address
        yield hosts
    finally:
        current = Path("/tmp/ray/ray_current_cluster")  # else `auto` finds the dead head here
        if current.is_file() and current.read_text().startswith(ADDRESSES[0]):
            current.unlink()
        for host in hosts:
            unplug(host)
            subprocess.run(["ip", "netns", "del", host], check=False)


def unplug(host: str) -> None:
    """Kills everything that runs on a host."""
    found = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    for pid in found.stdout.split():
        subprocess.run(["kill", "-9", pid], check=False, capture_output=True)


def environment() -> dict[str, str]:
    """What every process on the hosts has in common."""
    ours = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "POLARS_MAX_THREADS": "1"}
    # A local cluster leaves a token in the home folder, which a head takes and who joins does not.
    ours |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a token of these tests alone"}
    return {**os.environ, **ours, "PYTHONPATH": str(Path(__file__).parent)}


def start_ray(host: str, number: int) -> None:
    """Starts Ray with two logical CPUs: its head on the first host, which the second joins."""
    role = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    if number:
        role = [f"--address={ADDRESSES[0]}:{PORT}"]
    ray = Path(sys.executable).with_name("ray")
    command = inside(
        host, ray, "start", *role, f"--node-ip-address={ADDRESSES[number]}", "--num-cpus=2",
        f"--object-store-memory={200_000_000}", "--disable-usage-stats",
    )  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def start_driver(host: str, file: Path, job: dict[str, Any]) -> "subprocess.Popen[str]":
    """Starts a job's phase on a host."""
    file.write_text(json.dumps(job))
    command = inside(host, sys.executable, __file__, file)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment())


def run_job(path: str) -> None:
    """Runs a phase as a job's file says, with what goes wrong in its workers."""
    import ray_faults

    from geoguessr_rl import config, photos
    from geoguessr_rl.backends import predictions
    from geoguessr_rl.phases import evaluate, prepare
    from geoguessr_rl.phases import filter as learnable

    job = json.loads(Path(path).read_text())
    faults = {**job["faults"], "notes": Path(job["faults"]["notes"])}
    photos.examine = partial(ray_faults.examine, faults=faults)
    prepare.RAY_BLOCK = 4  # enough blocks for two hosts in a small world
    predictions.start_answering = partial(ray_faults.start_answering, faults=faults)
    phases = {
        "data": (config.DataConfig, prepare.run),
        "eval": (config.EvalConfig, evaluate.run),
        "filter": (config.FilterConfig, learnable.run),
    }
    cls, run = phases[job["phase"]]
    run(config.load(cls, config.CONFIGS / f"embedded/{job['phase']}.yaml", flags=job["flags"]))


def torchrun(host: str, rank: int, *script: object) -> Sequence[str]:
    """The command line that starts one of two hosts' training processes."""
    return inside(
        host, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
        f"--node_rank={rank}", f"--master_addr={ADDRESSES[0]}", "--master_port=29571", *script,
    )  # fmt: skip


if __name__ == "__main__":
    run_job(sys.argv[1])
