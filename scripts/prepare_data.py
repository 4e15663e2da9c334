"""Turns OSV-5M files into photos, parquet and manifests (phase 1)."""

import argparse
from pathlib import Path

from geoguessr_rl.config import DataConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and prepares the data."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "data")
    parser.add_argument("--source", type=Path, help="folder in the OSV-5M layout")
    parser.add_argument("--output_dir", type=Path, help="where the splits go")
    args = parser.parse_args()
    flags = {"source.root": args.source, "output_dir": args.output_dir, "limit": args.limit}
    config = load(DataConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import prepare

    summary = prepare.run(config)
    rows = ", ".join(f"{name} {split['rows']}" for name, split in summary["splits"].items())
    print(f"prepared {rows} in {config.output_dir}")


if __name__ == "__main__":
    run_script(main)
