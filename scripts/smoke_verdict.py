"""Judges the short training of `runbook/smoke_test.sh`, and says how many steps fit a budget."""

import argparse
import sys
from pathlib import Path

from geoguessr_rl.config import run_script


def main() -> None:
    """Parses the command line, prints the verdict, and exits with 1 when it is no."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Path, help="the folder of the short training")
    parser.add_argument("--budget_hours", type=float, default=8.0, help="hours of the long run")
    args = parser.parse_args()

    from geoguessr_rl.phases import smoke

    lines, faults = smoke.run(args.training, args.budget_hours)
    print("\n".join(lines))
    for fault in faults:
        print(f"FAILED: {fault}")
    if faults:
        sys.exit(1)
    print("smoke test passed")


if __name__ == "__main__":
    run_script(main)
