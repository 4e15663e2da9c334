"""A tiny base that answers in the format, for tests that need groups with spread in reward."""

from pathlib import Path

from geoguessr_rl.config import CONFIGS, WarmupConfig, load


def warm_up(world: Path) -> Path:
    """Teaches the tiny model of `world` the format of direct answers, once a session."""
    from geoguessr_rl.phases import warmup

    flags = {
        "model.name": str(world / "tiny"),
        "prompt.style": "direct",
        "data_dir": world / "data",
        "output_dir": world / "warm",
        "steps": 60,
        "batch_size": 16,
        "learning_rate": 4e-3,
        "hot_spot": None,
    }
    warmup.run(load(WarmupConfig, CONFIGS / "embedded/warmup.yaml", flags=flags))
    return world / "warm"
