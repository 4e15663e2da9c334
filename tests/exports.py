"""What tests of exports share: an adapter, the answers that it gives, documented code, vLLM."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import lucky_functions, small_run
from warm_base import warm_up

from geoguessr_rl.backends.transformers import TransformersBackend
from geoguessr_rl.config import Generation, Model
from geoguessr_rl.phases import train
from geoguessr_rl.records import Photo, Sampling

ROOT = Path(__file__).parents[1]
vllm_cpu = pytest.mark.skipif(
    find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vllm on a CPU"
)


def warm_adapter(world: Path) -> Path:
    """Trains an adapter once a session; its B matrices are drawn so that answers differ.

    Its base is `world / "warm"`, its prompt style `direct`.
    """
    path = world / "to-export/checkpoint-2"
    if path.exists():
        return path
    base = warm_up(world)
    patch = pytest.MonkeyPatch()
    patch.setattr(train, "reward_functions", lucky_functions)
    flags = {"model.name": str(base), "prompt.style": "direct"}
    train.run(small_run(world, "to-export", 2, **flags))
    patch.undo()
    weights = load_file(path / "adapter_model.safetensors")
    torch.manual_seed(6)
    for name, value in weights.items():
        if "lora_B" in name:
            value.normal_(std=0.14)
    save_file(weights, path / "adapter_model.safetensors")
    return path


def answers(model: Path, photos: Sequence[Photo], lora: Path | None = None) -> list[str]:
    """What transformers in float32 answers, as the export verifies it."""
    generation = Generation(backend="transformers", device="cpu", batch_size=1)
    backend = TransformersBackend(generation, Model(name=str(model)), "direct", lora)
    return [row[0].text for row in backend.generate(photos, Sampling(max_tokens=512))]


def section(title: str) -> str:
    """A section of README.md, down to the next heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.split(r"\n##+ ", text.split(f"### {title}\n")[1])[0]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language in a Markdown text."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@contextmanager
def serve(command: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Starts a documented `vllm serve` command on this machine's CPU; gives its address.

    Args:
        command: As documented. The entry point is the one that vllm-cpu has, too.
        folder: Where it runs, and its log goes.
        environment: Beside what a CPU needs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server --model"
    here = f" --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager"
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command.strip().replace("vllm serve", start, 1) + here, shell=True, cwd=folder,
            env=environment | settings, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while True:
            said = (folder / "server.log").read_text(errors="replace")[-3000:]
            assert process.poll() is None and time.monotonic() < deadline, said
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
