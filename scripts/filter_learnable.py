"""Keeps the train photos that the base model can learn from (phase 3)."""

import argparse
from pathlib import Path

from geoguessr_rl.config import FilterConfig, add_config_flags, load, run_script


def main() -> None:
    """Parses the command line and filters."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_flags(parser, "filter")
    parser.add_argument("--model", help="Hub name or folder of the base model")
    parser.add_argument("--backend", help="vllm, transformers or scripted")
    parser.add_argument("--device", help="auto, cuda, mps or cpu")
    parser.add_argument("--engine", help="local, or ray: the workers of a cluster")
    parser.add_argument("--data_dir", type=Path, help="folder that prepare wrote")
    parser.add_argument("--output_dir", type=Path, help="where completions and statistics go")
    args = parser.parse_args()
    flags = {
        "model.name": args.model,
        "generation.backend": args.backend,
        "generation.device": args.device,
        "data_dir": args.data_dir,
        "output_dir": args.output_dir,
        "engine": args.engine,
        "limit": args.limit,
    }
    config = load(FilterConfig, args.config, overrides=args.set, flags=flags)

    from geoguessr_rl.phases import filter as learnable

    stats = learnable.run(config)
    print(
        f"kept {stats['rows']} of {stats['photos']} photos: set A {stats['set_a']}, set B "
        f"{stats['set_b']}, {stats['countries']} countries; base reward "
        f"{stats['base_mean_reward']:.3f}, base country {stats['base_country_acc']:.1%}"
    )


if __name__ == "__main__":
    run_script(main)
