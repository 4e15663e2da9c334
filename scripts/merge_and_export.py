"""Merges an adapter into its base, checks that the result answers alike, and pushes them."""

import argparse
from pathlib import Path

from geoguessr_rl.config import ExportConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line, merges and pushes."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "export", limit=False)
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--lora", type=Path, help="an adapter's or a training run's folder")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--output_dir", type=Path, help="where the merged model goes")
    parser.add_argument("--device", help="auto, cuda, mps or cpu")
    parser.add_argument("--push", help="adapter, merged or both, to the Hub; private by default")
    parser.add_argument("--repo_id", help="owner/name; with both, the merged model gets -merged")
    parser.add_argument("--public", action="store_true", help="let everybody see what is pushed")
    parser.add_argument("--base_repo_id", help="where a base that lies in a folder is on the Hub")
    parser.add_argument("--base_run", type=Path, help="run folder of the base, for the card")
    parser.add_argument("--tuned_run", type=Path, help="run folder with this adapter, for the card")
    parser.add_argument("--space", type=Path, metavar="DIR", help="write the demo as a Space")
    parser.add_argument("--report", type=Path, help="the report.html that the Space shows")
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "lora": args.lora,
        "data_dir": args.data_dir,
        "output_dir": args.output_dir,
        "device": args.device,
        "push": args.push,
        "repo_id": args.repo_id,
        "private": False if args.public else None,
        "base_repo_id": args.base_repo_id,
        "base_run": args.base_run,
        "tuned_run": args.tuned_run,
        "space": args.space,
        "report": args.report,
    }
    config = load(ExportConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import export

    if config.space is not None:
        print(export.write_space(config, config.space))
        return
    print(export.summary_line(config, export.run(config)))


if __name__ == "__main__":
    run_script(main)
