"""Draws the embedded world in the OSV-5M layout and builds the tiny model beside it."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

from geoguessr_rl import artifacts
from geoguessr_rl.config import run_script

TRAIN, TEST = 2000, 300


def once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder beside its place and renames it, unless it is there already."""
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    fill(partial)
    partial.rename(folder)


def main() -> None:
    """Parses the command line and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir", type=Path, help="gets world/ and tiny/")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    world, tiny = args.output_dir / "world", args.output_dir / "tiny"

    from geoguessr_rl import embedded
    from geoguessr_rl.backends.tiny import build_tiny

    with artifacts.run_lock(args.output_dir):
        identity = {"seed": args.seed, "train": TRAIN, "test": TEST}
        artifacts.claim(args.output_dir / artifacts.IDENTITY, identity)
        once(world, lambda to: embedded.draw_world(to, **identity))
        once(tiny, lambda to: build_tiny(to, args.seed, embedded.sample_texts()))
    print(f"{TRAIN} train and {TEST} test photos in {world}; tiny model in {tiny}")


if __name__ == "__main__":
    run_script(main)
