"""Measures every checkpoint of a training run with one engine, and finds the plateau (phase 5)."""

import argparse
from pathlib import Path

from geoguessr_rl.config import EvalConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and evaluates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Path, help="the training run's folder")
    add_config_flags(parser, "eval")
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--split", default="eval_quick", help="the prepared split")
    parser.add_argument("--run_name", default="checkpoints", help="each run is NAME-step-N")
    parser.add_argument("--backend", help="vllm or transformers")
    parser.add_argument("--device", help="auto, cuda, mps or cpu")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--output_dir", type=Path, help="where runs go")
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "split": args.split,
        "run_name": args.run_name,
        "generation.backend": args.backend,
        "generation.device": args.device,
        "data_dir": args.data_dir,
        "output_dir": args.output_dir,
        "limit": args.limit,
    }
    config = load(EvalConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import checkpoints

    print("\n".join(checkpoints.run(config, args.training)))


if __name__ == "__main__":
    run_script(main)
