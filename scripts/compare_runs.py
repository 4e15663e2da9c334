"""Compares evaluated runs photo by photo with the first of them."""

import argparse
from pathlib import Path

from geoguessr_rl.config import run_script


def main() -> None:
    """Parses the command line and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, the base first")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    args = parser.parse_args()

    from geoguessr_rl.phases import compare

    print("\n".join(compare.run(args.runs, args.output)))


if __name__ == "__main__":
    run_script(main)
