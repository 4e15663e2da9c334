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
    parser.add_argument("--gpus", metavar="N,N", help="what each phase takes on so many GPUs")
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

    if args.gpus:
        print("\n".join(plan.on_clusters(config, counts(args.gpus))))
    else:
        print("\n".join(plan.run(config, processes=args.processes)))


def counts(text: str) -> list[int]:
    """Reads `1,8,64`; raises UserError where a part is no positive number."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise UserError(f"--gpus {text} must be numbers of GPUs, as in 1,8,64")
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    run_script(main)
