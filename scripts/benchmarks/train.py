"""A step of ours against a bare `GRPOTrainer`'s, and the rewards' share of it."""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import trange

from benchmarks.inputs import CLUES, draw_embedded_world
from benchmarks.measure import Figure, median_of, microseconds, ratios, seconds
from geoguessr_rl.config import CONFIGS
from geoguessr_rl.prompt import format_completion

BOUND_RATIO = 1.03
BOUND_REWARD_PERCENT = 0.5
PAIRS = 21
COMPLETIONS = 128  # a step
CALLS, REPEATS = 20, 7  # of the rewards


def _train(root: Path, ours: bool, steps: int, pipe: Any) -> None:
    """Trains on the tiny model, one step whenever the pipe says so; completions of 64 tokens."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)

    from geoguessr_rl import data as splits
    from geoguessr_rl.backends.reference import bare_trainer, train_in_turns
    from geoguessr_rl.config import GrpoConfig, load
    from geoguessr_rl.phases import train as phase

    section = {
        "output_dir": str(root / f"ours-{ours}"),
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "generation_kwargs": {"min_new_tokens": 64},
        "mask_truncated_completions": False,  # each completion is cut: all must count
    }
    overrides = [f"trainer.{key}={json.dumps(value)}" for key, value in section.items()]
    flags = {"model.name": str(root / "embedded/tiny"), "data_dir": root / "data"}
    config = load(GrpoConfig, CONFIGS / "embedded/grpo.yaml", overrides=overrides, flags=flags)
    args = phase.build_args(config.trainer, use_cpu=True)
    photos = splits.load_split(root / "data", "train_pool").photos
    if ours:
        trainer = phase.build_trainer(config, args, photos)
        phase.attend(trainer, config, photos, time.monotonic())
    else:
        trainer = bare_trainer(config, args, photos)
    train_in_turns(trainer, pipe)


def _pairs(root: Path, pairs: int) -> tuple[list[float], list[float]]:
    """Returns seconds of a step of ours and of a bare trainer's, in turns on one core."""
    spawn = multiprocessing.get_context("spawn")
    turns, processes = {}, []
    for ours in (True, False):
        turns[ours], other = spawn.Pipe()
        parts = (root, ours, pairs + 2, other)  # one before the pairs, one that never begins
        processes.append(spawn.Process(target=_train, args=parts, daemon=True))
        processes[-1].start()
        other.close()
        turns[ours].recv()

    def step(ours: bool) -> None:
        turns[ours].send("go")
        turns[ours].recv()

    taken: dict[bool, list[float]] = {True: [], False: []}
    for n in trange(pairs + 1, desc="  pairs of steps", leave=False):
        for ours in (True, False) if n % 2 else (False, True):
            taken[ours].append(seconds(lambda ours=ours: step(ours)))
    for process in processes:
        process.kill()
    return taken[True][1:], taken[False][1:]  # less what the first step alone pays for


def run(scale: float) -> list[Figure]:
    """Times both trainers' steps, and the rewards of a step's completions."""
    from geoguessr_rl.reward import reward_functions

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        draw_embedded_world(root)
        print("  starting two trainers", flush=True)
        ours, bare = _pairs(root, max(3, int(scale * PAIRS)))
    batch = {
        "completions": [
            format_completion("Kazakhstan", n % 90, 73.1, clues=CLUES, style="think")
            for n in range(COMPLETIONS)
        ],
        "latitude": [43.2] * COMPLETIONS,
        "longitude": [76.9] * COMPLETIONS,
        "country_iso2": ["KZ"] * COMPLETIONS,
    }

    def score() -> None:
        # New functions each time: a batch is scored once, and here it stays the same.
        for function in reward_functions():
            function(**batch)

    step = statistics.median(ours)
    shares = [microseconds(score, CALLS) / 1e6 / step * 100 for _ in range(REPEATS)]
    name = f"train a step of {COMPLETIONS} completions of 64 tokens"
    return [
        median_of(name, ours, "s"),
        median_of(name, ratios(ours, bare), "times", "a bare GRPOTrainer", at_most=BOUND_RATIO),
        median_of(
            f"rewards of {COMPLETIONS} usual completions", shares, "%", "the step",
            at_most=BOUND_REWARD_PERCENT,
        ),
    ]  # fmt: skip
