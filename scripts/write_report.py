"""Reports what a training run gained, photo by photo and with confidence intervals (phase 5)."""

import argparse
from pathlib import Path

from geoguessr_rl.config import run_script


def main() -> None:
    """Parses the command line and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="run folder before: outputs/eval/base/eval_osv")
    parser.add_argument("rl", type=Path, help="run folder after: outputs/eval/rl/eval_osv")
    parser.add_argument(
        "more", type=Path, nargs="*", help="further runs for the table of all arms: baselines"
    )
    parser.add_argument("--training", type=Path, metavar="DIR", help="draw this run's curves too")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs"), metavar="DIR")
    parser.add_argument("--note", default="", metavar="TEXT", help="the report's first line")
    parser.add_argument(
        "--gallery", type=int, default=5, metavar="N", help="photos of gain, and as many of loss"
    )
    args = parser.parse_args()

    from geoguessr_rl.phases import report

    print(
        report.run(
            args.base,
            args.rl,
            args.more,
            training=args.training,
            output_dir=args.output_dir,
            note=args.note,
            cards=args.gallery,
        )
    )


if __name__ == "__main__":
    run_script(main)
