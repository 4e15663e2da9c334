"""A bare `GRPOTrainer` on the same model and photos: what a step of ours is timed against.

`scripts/benchmark.py` lets both take turns, a step at a time, each in a process of its own.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset, Image
from transformers import TrainerCallback
from trl import GRPOTrainer

from geoguessr_rl import data
from geoguessr_rl.backends import models
from geoguessr_rl.config import GrpoConfig
from geoguessr_rl.records import Photo


def bare_trainer(config: GrpoConfig, args: Any, photos: Sequence[Photo]) -> Any:
    """Builds the trainer as TRL's documentation does, with a reward that costs nothing."""
    args.reward_weights = None
    columns = data.training_columns(photos, config.prompt.style)
    return GRPOTrainer(
        model=models.load_model(config.model, str(args.device)),
        processing_class=models.load_processor(config.model.name),
        args=args,
        train_dataset=Dataset.from_dict(columns).cast_column("image", Image()),
        reward_funcs=lambda completions, **columns: [len(str(text)) % 7 for text in completions],
        peft_config=models.lora_config(config.lora),
    )


class Turns(TrainerCallback):
    """Waits before each step until the other end of a pipe says so."""

    def __init__(self, pipe: Any) -> None:
        """Takes this end of the pipe."""
        self._pipe = pipe

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Says that the step before is over, logs and all, and waits."""
        self._pipe.send("ready")
        self._pipe.recv()


def train_in_turns(trainer: Any, pipe: Any) -> None:
    """Trains on one thread of one core, the same one for whoever takes turns.

    The waiting process leaves the core alone, and a neighbour that slows one core slows both.
    """
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    trainer.add_callback(Turns(pipe))
    trainer.train()
    pipe.send("done")
