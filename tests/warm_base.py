"""Tiny bases that answer in the format, and an adapter that can be heard, at little cost."""

from pathlib import Path

from geoguessr_rl.config import CONFIGS, Lora, Model, WarmupConfig, load


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


def warm_up_thinking(world: Path) -> Path:
    """Teaches the tiny model of `world` to write clues, and to say Brazil, once a session."""
    from geoguessr_rl.phases import warmup

    flags = {
        "model.name": str(world / "tiny"),
        "data_dir": world / "data",
        "output_dir": world / "thinking",
        "clues": world / "world/clues.json",
        "steps": 100,
        "batch_size": 16,
        "learning_rate": 4e-3,
    }
    warmup.run(load(WarmupConfig, CONFIGS / "embedded/warmup.yaml", flags=flags))
    return world / "thinking"


def loud_adapter(base: Path, folder: Path) -> Path:
    """Writes an adapter on a base whose B matrices are large enough to be heard."""
    import torch
    from peft import get_peft_model

    from geoguessr_rl.backends import models

    torch.manual_seed(0)
    model = models.load_model(Model(name=str(base)), "cpu")
    tuned = get_peft_model(model, models.lora_config(Lora(r=4, alpha=8)))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    tuned.save_pretrained(str(folder))
    return folder
