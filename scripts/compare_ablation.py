"""Measures the last checkpoint of training runs with one engine, and compares what each gained."""

import argparse
from pathlib import Path

from geoguessr_rl.config import EvalConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line, evaluates what is missing, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainings", type=Path, nargs="+", help="training runs' folders")
    add_config_flags(parser, "eval")
    parser.add_argument("--model", help="Hub name or folder of the base model of all")
    parser.add_argument("--split", help="the prepared split")
    parser.add_argument("--backend", help="vllm or transformers")
    parser.add_argument("--device", help="auto, cuda, mps or cpu")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--output_dir", type=Path, required=True, help="for ablation.json and eval")
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "split": args.split,
        "generation.backend": args.backend,
        "generation.device": args.device,
        "data_dir": args.data_dir,
        "output_dir": args.output_dir / "eval",
        "limit": args.limit,
    }
    config = load(EvalConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import ablation

    print("\n".join(ablation.run(config, args.trainings, args.output_dir)))


if __name__ == "__main__":
    run_script(main)
