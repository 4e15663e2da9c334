"""Shows what each reward shape would teach from the answers that the filter cached."""

import argparse
from pathlib import Path

from geoguessr_rl.config import GrpoConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and writes the lab."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "grpo", limit=False)
    parser.add_argument("filter_dir", type=Path, help="folder that the filter wrote")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/reward_lab"), metavar="DIR"
    )
    args = parser.parse_args()
    config = load(GrpoConfig, args.config, overrides=args.set)

    from geoguessr_rl.phases import reward_lab

    print("\n".join(reward_lab.run(args.filter_dir, config, args.output_dir)))


if __name__ == "__main__":
    run_script(main)
