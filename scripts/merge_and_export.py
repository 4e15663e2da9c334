"""Merges an adapter into its base, and checks that the result answers as the two did."""

import argparse
from pathlib import Path

from geoguessr_rl.config import ExportConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and merges."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "export", limit=False)
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--lora", type=Path, help="an adapter's or a training run's folder")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--output_dir", type=Path, help="where the merged model goes")
    parser.add_argument("--device", help="auto, cuda, mps or cpu")
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "lora": args.lora,
        "data_dir": args.data_dir,
        "output_dir": args.output_dir,
        "device": args.device,
    }
    config = load(ExportConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import export

    print(export.summary_line(config, export.run(config)))


if __name__ == "__main__":
    run_script(main)
