"""Scores anybody's predictions against a truth file, by the code that scores this project's own."""

import argparse
import sys
from pathlib import Path

from geoguessr_rl.config import Ray, run_script


def main() -> None:
    """Parses the command line and scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("predictions", type=Path, help="JSON Lines or CSV")
    parser.add_argument("--truth", type=Path, required=True, help="a split's parquet file")
    parser.add_argument("--output", type=Path, help="where the metrics go as JSON")
    parser.add_argument("--engine", default="local", choices=["local", "ray"])
    parser.add_argument("--ray_address", metavar="ADDRESS", help="auto, or HOST:6379")
    args = parser.parse_args()
    cluster = Ray(address=args.ray_address)

    from geoguessr_rl.phases import score

    lines, complete = score.run(
        args.predictions, args.truth, args.output, engine=args.engine, ray=cluster
    )
    print("\n".join(lines))
    if not complete:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
