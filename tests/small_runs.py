"""Small GRPO runs that several test modules and their child processes share.

`python small_runs.py CONFIG.json` trains in a process of its own. Without a file it reads files'
names from its input, and trains each in a fork, which starts at once and can be killed. Every
process writes what it trained on to the file's `record`; with `scripted`, completions follow from
the photo and the place in its group.
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

from geoguessr_rl.config import CONFIGS, DataConfig, GrpoConfig, load


def build_world(root: Path) -> Path:
    """Draws a small embedded world, prepares it, and puts an untrained tiny model beside it."""
    from geoguessr_rl import embedded
    from geoguessr_rl.backends.tiny import build_tiny
    from geoguessr_rl.phases import prepare

    embedded.draw_world(root / "world", train=48, test=24, seed=0)
    flags = {"source.root": root / "world", "output_dir": root / "data"}
    prepare.run(load(DataConfig, CONFIGS / "embedded/data.yaml", flags=flags))
    build_tiny(root / "tiny", 0, embedded.sample_texts())
    return root


def small_run(world: Path, name: str, steps: int, **flags: Any) -> GrpoConfig:
    """Two prompts of four completions a step, a checkpoint every second step."""
    section = {
        "output_dir": str(world / name),
        "max_steps": steps,
        "save_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "report_to": "none",
        **{key: flags.pop(key) for key in list(flags) if key in TRAINER},
    }
    overrides = [f"trainer.{key}={json.dumps(value)}" for key, value in section.items()]
    ours = {"model.name": str(world / "tiny"), "data_dir": world / "data", "split": "train_pool"}
    flags = ours | flags
    return load(GrpoConfig, CONFIGS / "embedded/grpo.yaml", overrides=overrides, flags=flags)


TRAINER = ("report_to", "run_name", "save_steps", "save_strategy", "per_device_train_batch_size")


def lucky_functions(shape: Any = None) -> list[Any]:
    """An untrained model never answers; rewarding long words gives it something to learn."""

    def reward_total(completions: list[Any], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("id", list(columns["id"]))
        log_extra("country", ["FR"] * len(completions))
        log_extra("d_km", [100.0] * len(completions))
        record("photos", columns["trainer_state"].global_step, columns["id"])
        return [len(c[0]["content"]) / 100 for c in completions]

    others = [lambda completions, **columns: [0.0] * len(completions) for _ in range(3)]
    for number, function in enumerate(others):
        function.__name__ = f"reward_{number}"
    return [reward_total, *others]


def record(*values: Any) -> None:
    """Appends a line to the file that the environment names."""
    if path := os.environ.get("RECORD"):
        with Path(path).open("a") as file:
            file.write(json.dumps([os.environ.get("RANK", "0"), *values]) + "\n")


def scripted(trainer: Any) -> None:
    """Makes each completion follow from its photo and its place in the group alone."""
    tokenize = trainer._tokenize_prompts

    def sized(prompts: Any) -> Any:
        ids, images, fields = tokenize(prompts)
        trainer.seen = [images[n][0].tobytes()[:3000] for n in range(len(ids))]
        return ids, images, fields

    def generate(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        place = range(rank * len(prompt_ids), (rank + 1) * len(prompt_ids))
        assert world == int(os.environ.get("WORLD_SIZE", 1))
        completions = []
        for n, photo in zip(place, trainer.seen, strict=True):
            rng = random.Random(photo + bytes([n % trainer.num_generations]))
            completions.append([rng.randrange(100, 300) for _ in range(rng.randrange(3, 8))] + [2])
        return completions, None

    trainer._tokenize_prompts = sized
    trainer._generate_single_turn = generate


def run_file(path: str) -> None:
    """Trains as a file says."""
    from geoguessr_rl.phases import train

    flags = json.loads(Path(path).read_text())
    os.environ["RECORD"] = flags.pop("record")
    train.reward_functions = lucky_functions
    if flags.pop("scripted", False):
        build = train.build_trainer

        def build_scripted(*args: Any) -> Any:
            trainer = build(*args)
            scripted(trainer)
            return trainer

        train.build_trainer = build_scripted
    config = small_run(Path(flags.pop("world")), flags.pop("name"), flags.pop("steps"), **flags)
    if done := train.run(config):
        print(train.summary_line(done), flush=True)


def fork_runs() -> None:
    """Reads names of files, and prints for each the process that trains, then how it ended."""
    import peft  # noqa: F401
    import torch  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    for line in sys.stdin:
        if not (child := os.fork()):
            log = os.open(f"{line.strip()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                run_file(line.strip())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    run_file(sys.argv[1]) if len(sys.argv) > 1 else fork_runs()
