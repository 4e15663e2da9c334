"""The set-up of a rented machine: each fault is a sentence before anything is installed.

`nvidia-smi`, `df`, `uv` and the volume are stand-ins: programs on the path that say what a machine
with that fault would say.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

UV = """#!/usr/bin/env bash
echo "$@" >>"$UV_LOG"
case "$1 $2" in
  "venv "*) at="${@: -1}/bin"; mkdir -p "$at"
            printf '#!/bin/sh\\nexec "{python}" "$@"\\n' >"$at/python"; chmod +x "$at/python" ;;
  "pip compile") exit "${NETWORK:-0}" ;;
  "pip freeze") echo "torch==2.13.0" ;;
  "pip install") case "$*" in *flash-attn*) exit 1 ;; esac ;;
esac
"""


class Machine(NamedTuple):
    """A stand-in for a rented machine."""

    checkout: Path
    volume: Path
    programs: Path

    def stand_in(self, name: str, text: str) -> None:
        program = self.programs / name
        program.write_text(text)
        program.chmod(0o755)

    def set_up(self, **environment: str) -> "subprocess.CompletedProcess[str]":
        env = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": str(self.volume.parent),
            "WORKSPACE": str(self.volume),
            "UV_LOG": str(self.volume.parent / "uv.log"),
            **environment,
        }
        script = self.checkout / "runbook/runpod_setup.sh"
        return subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)

    def installed(self) -> list[str]:
        log = self.volume.parent / "uv.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.startswith(("venv", "pip install"))]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine on which nothing is wrong; its paths hold spaces."""
    checkout = tmp_path / "a checkout"
    (checkout / "runbook").mkdir(parents=True)
    for name in ("runbook/runpod_setup.sh", "runbook/common.sh", "requirements.lock"):
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "pyproject.toml").write_text("")
    (tmp_path / "a volume").mkdir()
    (tmp_path / "programs").mkdir()
    found = Machine(checkout, tmp_path / "a volume", tmp_path / "programs")
    found.stand_in("uv", UV.replace("{python}", sys.executable))
    found.stand_in("nvidia-smi", '#!/bin/sh\necho "NVIDIA A100-SXM4-80GB, 81920, 580.65.06"\n')
    found.stand_in("df", '#!/bin/sh\nprintf "Avail\\n 200\\n"\n')
    return found


def test_a_machine_without_a_fault_is_set_up_on_its_volume(machine: Machine) -> None:
    ended = machine.set_up()
    assert ended.returncode == 0, ended.stderr
    assert "A100-SXM4-80GB" in ended.stdout and "CUDA 13 fits" in ended.stdout
    assert "attention: sdpa" in ended.stdout  # no wheel was found
    assert (machine.checkout / ".venv").resolve().parent == machine.volume.resolve()
    environment = machine.volume / "geoguessr-rl.env"
    show = f'source "{environment}"; echo "$HF_HOME|$VLLM_WORKER_MULTIPROC_METHOD|$PWD"'
    command = ["bash", "-c", show]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == f"{machine.volume}/huggingface|spawn|{machine.checkout}"
    assert "torch==2.13.0" in (machine.volume / "geoguessr-rl-versions.txt").read_text()
    assert any("--require-hashes" in line for line in machine.installed())


def test_a_second_run_installs_nothing_again(machine: Machine) -> None:
    assert machine.set_up().returncode == 0
    (machine.volume.parent / "uv.log").unlink()
    assert machine.set_up().returncode == 0
    assert not [line for line in machine.installed() if "--require-hashes" in line]


FAULTS = {
    "no GPU": ({"nvidia-smi": None}, "has no nvidia-smi"),
    "a GPU that fell off": ({"nvidia-smi": "#!/bin/sh\nexit 9\n"}, "no GPU that works"),
    "no device": ({"nvidia-smi": '#!/bin/sh\necho "No devices were found"\n'}, "no GPU that works"),
    "an old driver": (
        {"nvidia-smi": '#!/bin/sh\necho "NVIDIA A100, 81920, 550.54.15"\n'},
        "driver 550.54.15 does not run CUDA 13",
    ),
    "a full disk": ({"df": '#!/bin/sh\nprintf "Avail\\n 12\\n"\n'}, "12 GB free and 60 are needed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_sentence_and_nothing_is_installed(fault: str, machine: Machine) -> None:
    programs, said = FAULTS[fault]
    for name, text in programs.items():
        (machine.programs / name).unlink()
        if text:
            machine.stand_in(name, text)
    ended = machine.set_up()
    assert ended.returncode == 2 and said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not machine.installed()


def test_no_network_is_one_sentence(machine: Machine) -> None:
    ended = machine.set_up(NETWORK="1")
    assert ended.returncode == 2 and "package index cannot be reached" in ended.stderr
    assert not machine.installed()


@pytest.mark.parametrize("missing", [True, False])
def test_a_volume_that_is_missing_or_closed_is_one_sentence(
    missing: bool, machine: Machine
) -> None:
    if missing:
        machine.volume.rmdir()
    else:
        machine = machine._replace(volume=Path("/proc"))  # nobody can write there
    ended = machine.set_up(UV_LOG="/dev/null")
    assert ended.returncode == 2 and "volume" in ended.stderr


def test_a_small_gpu_is_a_note_and_not_an_error(machine: Machine) -> None:
    machine.stand_in("nvidia-smi", '#!/bin/sh\necho "NVIDIA L4, 23034, 580.65.06"\n')
    ended = machine.set_up()
    assert ended.returncode == 0 and "plan_run.py says what fits" in ended.stdout


def test_the_lock_names_a_cuda_whose_driver_is_known(machine: Machine) -> None:
    lock = machine.checkout / "requirements.lock"
    lock.write_text(lock.read_text().replace("nvidia-cuda-runtime==13", "nvidia-cuda-runtime==14"))
    ended = machine.set_up()
    assert ended.returncode == 2 and "names no CUDA runtime" in ended.stderr
