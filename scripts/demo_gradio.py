"""Opens a page to show a model photos, to play against it and to read its report."""

import argparse
from pathlib import Path

from geoguessr_rl.config import DemoConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and serves the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "demo", limit=False)
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--lora", type=Path, help="an adapter's or a training run's folder")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote, for the games")
    parser.add_argument("--split", help="the games' photos, a held-out split")
    parser.add_argument("--report", type=Path, help="a report.html to show")
    parser.add_argument("--device", help="auto, cuda, mps or cpu")
    parser.add_argument("--port", help="7860 unless you need another")
    parser.add_argument("--tiles", metavar="URL", help="a tile server's {z}/{x}/{y} address")
    parser.add_argument("--listen", action="store_true", default=None, help="open to your network")
    parser.add_argument("--share", action="store_true", default=None, help="a public address")
    parser.add_argument("--auth", metavar="USER:PASSWORD", help="what visitors have to give")
    parser.add_argument("--allow_base_mismatch", action="store_true", default=None)
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "lora": args.lora,
        "data_dir": args.data_dir,
        "split": args.split,
        "report": args.report,
        "device": args.device,
        "port": args.port,
        "tiles": args.tiles,
        "listen": args.listen,
        "share": args.share,
        "allow_base_mismatch": args.allow_base_mismatch,
    }
    config = load(DemoConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import demo

    demo.run(config, args.auth)


if __name__ == "__main__":
    run_script(main)
