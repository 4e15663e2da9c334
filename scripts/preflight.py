"""Checks machine, data, model and engine before a training run costs anything."""

import argparse
import sys
from pathlib import Path

from geoguessr_rl.config import GrpoConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and checks; the exit code is 1 when a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "grpo")
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--split", help="train_learnable or another train split")
    parser.add_argument(
        "--overfit", type=int, metavar="N", help="instead train on N photos alone: does it learn?"
    )
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "data_dir": args.data_dir,
        "split": args.split,
        "limit": args.limit,
    }
    config = load(GrpoConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import preflight

    if args.overfit is None:
        passed = preflight.run(config, str(args.config))
    else:
        passed = preflight.overfit(config, str(args.config), args.overfit)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    run_script(main)
