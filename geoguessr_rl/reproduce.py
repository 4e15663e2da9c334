"""What the runs of a report are, and the commands that make them again."""

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from geoguessr_rl import artifacts
from geoguessr_rl.config import EvalConfig
from geoguessr_rl.runs import Run
from geoguessr_rl.tables import printable

# Settings that a backend does not read; they are left out of its command.
UNREAD = {
    "scripted": (
        "model.",
        "generation.vllm.",
        "generation.api.",
        "generation.batch",
        "generation.dev",
    ),
    "openai": ("generation.vllm.", "generation.script", "generation.batch", "generation.dev"),
    "vllm": ("generation.api.", "generation.script", "generation.batch"),
    "transformers": ("generation.vllm.", "generation.api.", "generation.script"),
}
FLAGS = {
    "run_name": "--run_name", "split": "--split", "generation.backend": "--backend",
    "model.name": "--model", "lora": "--lora", "samples": "--samples", "limit": "--limit",
}  # fmt: skip
ALWAYS = ("run_name", "split", "generation.backend", "model.name", "generation.script")


def shown(name: str, *, local: bool = False) -> str:
    """Returns a model's name, and of a folder its last part alone: pages name no machine's path."""
    return Path(name).name if local or Path(name).is_absolute() else name


def describe(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Returns what the runs are: a label and one text a run, where they may differ."""

    def line(run: Run) -> dict[str, str]:
        identity, tokens = run.identity, run.stored["completion_tokens"]
        adapter = "none"
        if identity["adapter"] is not None:
            lora = run.config["lora"]
            adapter = f"{lora and Path(lora).name} (weights {identity['adapter']})"
            if run.stored["allow_base_mismatch"]:
                adapter += ", base mismatch allowed"
        local = identity["backend"] != "scripted" and identity.get("model_files") is not None
        return {
            "Run": run.name,
            "Model": shown(identity["model"], local=local)
            + (f" ({dtype})" if (dtype := identity.get("dtype")) else ""),
            "Adapter": adapter,
            "Prompt style": identity["prompt_style"],
            "Backend": identity["backend"],
            "Completion tokens": ", ".join(f"{key} {value}" for key, value in tokens.items()),
        }

    lines = [line(run) for run in runs]
    return [(label, [one[label] for one in lines]) for label in lines[0]]


def evaluation_command(run: Run) -> str:
    """Returns the command that makes a run again: its settings where they are not the defaults.

    Folders stand by their name alone, and photos and results in the default folders.
    """
    settings = _dotted(run.config)
    default = _dotted(EvalConfig().model_dump(mode="json"))
    backend = settings["generation.backend"]
    local = run.identity.get("model_files") is not None
    flags: dict[str, str] = {}
    rest = []
    for key, value in settings.items():
        if key in ("data_dir", "output_dir") or key.startswith(UNREAD[backend]):
            continue
        if value == default.get(key) and key not in ALWAYS:
            continue
        if key == "allow_base_mismatch":
            rest.append("--allow_base_mismatch")
            continue
        text = json.dumps(value) if not isinstance(value, str) else value
        if key == "model.name":
            text = shown(text, local=local)
        elif key in ("lora", "generation.script"):
            text = Path(text).name
        if key in FLAGS:
            flags[key] = f"{FLAGS[key]} {shlex.quote(text)}"
        else:
            rest.append(f"--set {shlex.quote(f'{key}={text}')}")
    ordered = [flags[key] for key in FLAGS if key in flags]
    return printable(" ".join(["python scripts/run_eval.py", *ordered, *rest]))


def reproduce(runs: Sequence[Run], training: Path | None) -> dict[str, Any]:
    """Returns the commands, versions and hashes that the pages come from."""
    default = EvalConfig().output_dir
    folders = [shlex.quote(str(default / run.name / run.identity["split"])) for run in runs]
    last = ["python scripts/write_report.py", *folders]
    if training is not None:
        last.append(f"--training {shlex.quote(training.resolve().name)}")
    headers = [artifacts.read_header(run.folder / artifacts.PREDICTIONS) or {} for run in runs]
    versions = [header.get("versions", {}) for header in headers]
    libraries = [name for name in artifacts.LIBRARIES if any(name in one for one in versions)]
    hashes = [
        (
            str(run.identity.get("model_files") or "by name alone"),
            str(run.identity["adapter"] or "no adapter"),
            artifacts.file_sha256(run.folder / artifacts.PREDICTIONS)[:16],
        )
        for run in runs
    ]
    labels = ("Model files", "Adapter", artifacts.PREDICTIONS)
    return {
        "commands": [*map(evaluation_command, runs), " ".join(last)],
        "names": [run.name for run in runs],
        "rows": [
            *((name, [one.get(name, "–") for one in versions]) for name in libraries),
            *((label, [one[i] for one in hashes]) for i, label in enumerate(labels)),
        ],
        "version": version("geoguessr-rl"),
    }


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping)
        flat |= _dotted(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return flat
