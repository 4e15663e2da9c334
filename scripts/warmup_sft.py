"""Teaches a model the answer format with supervised steps (before phase 2, where it is needed)."""

import argparse
from pathlib import Path

from geoguessr_rl.config import WarmupConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and warms up."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "warmup")
    parser.add_argument("--model", help="Hub name or folder of the model to start from")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--output_dir", type=Path, help="the new model folder")
    parser.add_argument("--clues", type=Path, help="JSON file of country code to clue sentence")
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "data_dir": args.data_dir,
        "output_dir": args.output_dir,
        "clues": args.clues,
        "limit": args.limit,
    }
    config = load(WarmupConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import warmup

    done = warmup.run(config)
    if done["done_before"]:
        print(f"{done['model']} is there already, from {done['steps']} steps")
    else:
        print(
            f"{done['steps']} supervised steps on {done['rows']} photos: loss "
            f"{done['loss_first']:.2f} to {done['loss_last']:.2f}; model in {done['model']}"
        )


if __name__ == "__main__":
    run_script(main)
