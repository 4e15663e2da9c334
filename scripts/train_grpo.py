"""Trains the adapter with GRPO (phase 4)."""

import argparse
import sys
from pathlib import Path

from geoguessr_rl.config import GrpoConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "grpo")
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--split", help="train_learnable or another train split")
    parser.add_argument("--output_dir", help="where checkpoints go")
    parser.add_argument("--resume_from_checkpoint", metavar="auto|DIR")
    parser.add_argument("--seconds_per_step", help="measured, for the step arithmetic")
    parser.add_argument("--budget_hours", help="hours that the run may take")
    parser.add_argument(
        "--dry_run", action="store_true", default=None, help="print schema, modules and steps"
    )
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "data_dir": args.data_dir,
        "split": args.split,
        "trainer.output_dir": args.output_dir,
        "resume_from_checkpoint": args.resume_from_checkpoint,
        "seconds_per_step": args.seconds_per_step,
        "budget_hours": args.budget_hours,
        "dry_run": args.dry_run,
        "limit": args.limit,
    }
    config = load(GrpoConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import train

    done = train.run(config, str(args.config))
    if done:
        print(train.summary_line(done))
        if (done["stopped"] or "").startswith("alarm"):
            sys.exit(1)


if __name__ == "__main__":
    run_script(main)
