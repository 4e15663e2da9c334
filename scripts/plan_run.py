"""Predicts what a training run takes on the GPUs that people rent, without one."""

import argparse

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import GrpoConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and prints the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "grpo", limit=False)
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--budget_hours", metavar="H", help="hours that the run may take; 8")
    parser.add_argument("--seconds_per_step", metavar="S", help="measured, for the step arithmetic")
    parser.add_argument("--processes", type=int, metavar="N", help="GPUs of the kind; 1")
    args = parser.parse_args()
    if args.processes is not None and args.processes < 1:
        raise UserError(f"--processes {args.processes} must be 1 or more")
    flags = {
        "model.name": args.model,
        "budget_hours": args.budget_hours,
        "seconds_per_step": args.seconds_per_step,
    }
    config = load(GrpoConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import plan

    print("\n".join(plan.run(config, processes=args.processes)))


if __name__ == "__main__":
    run_script(main)
