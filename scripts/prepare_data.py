"""Turns OSV-5M files into photos, parquet, manifests and a data card (phase 1)."""

import argparse
from pathlib import Path

from geoguessr_rl.config import DataConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line, and prepares, rebuilds or verifies the data."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "data")
    parser.add_argument(
        "--source", type=Path, help="folder in the OSV-5M layout; without one: from the Hub"
    )
    parser.add_argument("--output_dir", type=Path, help="where the splits go")
    parser.add_argument("--workers", help="processes that decode; one a core without it")
    parser.add_argument("--engine", help="local, or ray: the workers of a cluster")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--manifest", type=Path, metavar="FILE", help="rebuild exactly the split of a manifest"
    )
    what.add_argument(
        "--verify", action="store_true", help="check the splits that exist against every rule"
    )
    args = parser.parse_args()
    flags = {
        "source.root": args.source,
        "output_dir": args.output_dir,
        "workers": args.workers,
        "engine": args.engine,
        "limit": args.limit,
    }
    config = load(DataConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl import data_card
    from geoguessr_rl.phases import prepare, verify

    if args.verify:
        print(verify.run(config))
    elif args.manifest:
        entry = prepare.rebuild(config, args.manifest)
        print(f"rebuilt {entry['rows']} rows in {config.output_dir}: {entry['fingerprint']}")
    else:
        summary = prepare.run(config)
        card = data_card.write(config.output_dir)
        rows = ", ".join(f"{name} {split['rows']}" for name, split in summary["splits"].items())
        print(f"prepared {rows} in {config.output_dir}; data card: {card}")


if __name__ == "__main__":
    run_script(main)
