"""The demo as a Gradio Space: a folder that runs on Hugging Face, and anywhere else, by itself.

It holds the page's code, the adapter, the base where that is a folder, and held-out photos for the
games with their credits. Pictures that may not leave the machine are never part of it.
"""

import shutil
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import polars as pl

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError, plain, write_json, write_text
from geoguessr_rl.config import DemoConfig, Model
from geoguessr_rl.tables import inert

PHOTOS = 50  # ten games without a photo twice
ADAPTER, BASE, REPORT = "adapter", "base", "report.html"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MODEL_LIBRARIES = ("gradio", "peft", "torch", "torchvision", "transformers")

APP = '''"""The demo of geoguessr-rl; `python app.py` serves it on this machine."""

import os
from pathlib import Path

os.chdir(Path(__file__).parent)

from geoguessr_rl.config import DemoConfig, load, run_script  # noqa: E402
from geoguessr_rl.phases import demo  # noqa: E402


def main() -> None:
    """Serves the page; on Hugging Face to everybody who can see the Space."""
    flags = {"listen": "SPACE_ID" in os.environ, "port": os.environ.get("GRADIO_SERVER_PORT")}
    demo.run(load(DemoConfig, Path("demo.yaml"), flags=flags))


if __name__ == "__main__":
    run_script(main)
'''


def write(out: Path, config: DemoConfig, trained: dict[str, Any] | None) -> int:
    """Writes a Space's folder.

    Args:
        out: Where; a Space that stands there is replaced.
        config: The demo to put into it, with its model and adapter named.
        trained: The record of the adapter's training run, where there is one.

    Returns:
        How many photos it holds for games.

    Raises:
        UserError: The folder holds something else, or the photos may not leave the machine.
    """
    assert config.model is not None
    split = data.load_split(config.data_dir, config.split, limit=PHOTOS)
    if split.role != "evaluation" or not split.publishable:
        why = "is not held out" if split.publishable else "serves evaluation only"
        raise UserError(f"the split {config.split} {why}; a Space takes eval_osv or eval_quick")
    if out.exists() and not (out / "app.py").is_file() and any(out.iterdir()):
        raise UserError(f"{out} holds other files; name an empty folder with --space")
    staged = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    here = Path(__file__).parent
    shutil.copytree(here, staged / here.name, ignore=shutil.ignore_patterns("__pycache__"))
    inside: dict[str, Any] = {"model": config.model, "report": REPORT, "data_dir": "data"}
    inside |= {"prompt": config.prompt, "split": config.split, "max_tokens": config.max_tokens}
    if Path(config.model.name).is_dir():
        copy_model(Path(config.model.name), staged / BASE)
        inside["model"] = Model(name=BASE, dtype=config.model.dtype)
    if config.lora is not None:
        copy_adapter(config.lora, staged / ADAPTER, inside["model"].name, trained)
        inside["lora"] = ADAPTER
    if config.report.is_file():
        shutil.copy2(config.report, staged / REPORT)
    credits = copy_photos(config, split, staged / "data")
    write_json(staged / "demo.yaml", plain(inside))  # JSON is YAML
    write_text(staged / "app.py", APP)
    write_text(staged / "requirements.txt", "\n".join(requirements()) + "\n")
    write_text(staged / "README.md", readme(config.model.name, credits))
    shutil.rmtree(out, ignore_errors=True)
    staged.rename(out)
    return len(split.photos)


def copy_model(folder: Path, to: Path) -> None:
    """Copies a model's own files; what a training left beside them stays."""
    to.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".jinja") or (
            file.suffix == ".json" and file.name not in (artifacts.IDENTITY, "resolved_config.json")
        ):
            shutil.copy2(file, to)


def copy_adapter(folder: Path, to: Path, base: str, trained: dict[str, Any] | None) -> None:
    """Copies an adapter, which from now on names the base as the Space does."""
    to.mkdir(parents=True)
    settings = artifacts.read_json(folder / ADAPTER_FILES[0], remedy="train the adapter again")
    write_json(to / ADAPTER_FILES[0], settings | {"base_model_name_or_path": base})
    shutil.copy2(folder / ADAPTER_FILES[1], to)
    if trained is not None:  # how the demo knows the prompt and the size of photos
        kept = {key: trained[key] for key in ("lora", "prompt_style", "image")}
        write_json(to / artifacts.IDENTITY, kept)


def copy_photos(config: DemoConfig, split: data.Split, to: Path) -> list[str]:
    """Copies a split's first photos as a prepared split; returns whom their licence names."""
    path = config.data_dir / f"{config.split}.parquet"
    frame = pl.read_parquet(path, glob=False).head(len(split.photos))
    manifest = data.read_manifest(data.manifest_path(config.data_dir, config.split))
    hashes = {row["id"]: row["sha256"] for row in manifest["photos"]}
    for photo in split.photos:
        target = to / photo.path.relative_to(config.data_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(photo.path, target)
    artifacts.write_parquet(to / path.name, frame)
    cut = data.build_manifest(
        config.split,
        "evaluation",
        frame,
        hashes,
        image_policy=manifest["image"],
        dataset=manifest["dataset"],
        country_share=manifest["country_share"],
    )
    write_json(data.manifest_path(to, config.split), cut)
    return sorted({photo.creator for photo in split.photos if photo.creator})


def requirements() -> list[str]:
    """Returns the packages that the page needs, at the versions that are installed here."""
    core = [line for line in requires("geoguessr-rl") or () if "extra ==" not in line]
    names = [line.partition(">")[0].partition("=")[0].strip() for line in core]
    return sorted(
        f"{name}=={version(name).partition('+')[0]}" for name in (*names, *MODEL_LIBRARIES)
    )


def readme(base: str, creators: list[str]) -> str:
    """Returns the Space's card, whose head Hugging Face reads."""
    named = f"models:\n  - {base}\n" if base.count("/") == 1 and not Path(base).is_dir() else ""
    people = inert(", ".join(creators)) or "not recorded"
    return f"""---
title: Where was this photo taken?
emoji: 🌍
colorFrom: blue
colorTo: green
sdk: gradio
sdk_version: {version("gradio")}
app_file: app.py
python_version: "3.11"
license: apache-2.0
short_description: One photo, one answer; play against a model
{named}---

# Where was this photo taken?

Show the model a photo, or play five rounds against it. It was trained with geoguessr-rl.

`pip install -r requirements.txt` and `python app.py` serve the same page on your machine.

It is made for photos of places. Do not use it to find out where people are or live.

The games' photos come from OSV-5M and Mapillary, CC BY-SA 4.0, by: {people}.
"""
