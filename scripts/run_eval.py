"""Measures a model on a frozen split (phases 2 and 5)."""

import argparse
import sys
from pathlib import Path

from geoguessr_rl.config import EvalConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and evaluates."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "eval")
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--lora", type=Path, help="folder of an adapter")
    parser.add_argument("--split", help="eval_osv, eval_quick or another prepared split")
    parser.add_argument("--run_name", help="folder under outputs/eval")
    parser.add_argument("--backend", help="vllm, transformers, openai or scripted")
    parser.add_argument("--samples", metavar="K", help="completions a photo, with a temperature")
    parser.add_argument("--device", help="auto, cuda, mps or cpu")
    parser.add_argument("--engine", help="local, or ray: the workers of a cluster")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--output_dir", type=Path, help="where runs go")
    parser.add_argument("--allow_base_mismatch", action="store_true", default=None)
    parser.add_argument(
        "--verify", type=Path, metavar="RUN", help="recompute every figure of a run's folder"
    )
    args = parser.parse_args()
    if args.verify is not None:
        from geoguessr_rl import runs

        print(runs.verify(args.verify))
        return
    flags = {
        "model.name": args.model,
        "lora": args.lora,
        "split": args.split,
        "run_name": args.run_name,
        "generation.backend": args.backend,
        "generation.device": args.device,
        "samples": args.samples,
        "data_dir": args.data_dir,
        "output_dir": args.output_dir,
        "allow_base_mismatch": args.allow_base_mismatch,
        "engine": args.engine,
        "limit": args.limit,
    }
    config = load(EvalConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import evaluate

    metrics = evaluate.run(config)
    print("\n".join([evaluate.summary_line(metrics), *evaluate.closing_lines(metrics)]))
    if not metrics["complete"]:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
