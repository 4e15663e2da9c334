"""What goes wrong in a Ray worker, on purpose; workers import this module by its name.

A test puts these in the place of the functions that they wrap, which is in its own process alone: a
worker finds the real ones there.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from geoguessr_rl import photos
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import predictions


def misbehave(
    name: str,
    notes: Path,
    poison: Sequence[str] = (),
    once: Sequence[str] = (),
    seconds: float = 0.0,
) -> None:
    """Notes on which host a photo is handled; dies of a poisonous one, or once of another."""
    with (notes / "handled.txt").open("a") as file:
        file.write(f"{os.readlink('/proc/self/ns/net')} {name}\n")
    time.sleep(seconds)
    if name in poison:
        os.kill(os.getpid(), signal.SIGKILL)
    if name in once:
        try:
            (notes / f"{name}.died").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def handled(notes: Path) -> list[str]:
    """The photos that workers have handled, again and again where they did so."""
    file = notes / "handled.txt"
    return [line.split()[1] for line in file.read_text().splitlines()] if file.exists() else []


def handled_by(notes: Path) -> Counter[str]:
    """How many photos each host has handled, the network namespace standing for the host."""
    file = notes / "handled.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return Counter(line.split()[0] for line in lines)


def examine(tasks: Sequence[photos.Task], *, faults: dict[str, Any], **rules: Any) -> Any:
    for task in tasks:
        misbehave(Path(task.path).stem, **faults)
    return photos.examine(tasks, **rules)


def start_answering(opening: Any, sampling: Any, *, faults: dict[str, Any]) -> Callable[..., Any]:
    answer = predictions.start_answering(opening, sampling)

    def work(block: Sequence[Any]) -> Any:
        for photo in block:
            misbehave(photo.id, **faults)
        return answer(block)

    return work


def start_counting(*, notes: Path, fault: str | None = None) -> Callable[[Sequence[int]], Any]:
    """Doubles numbers, with what can go wrong on the way."""

    def work(block: Sequence[int]) -> list[tuple[int, int]]:
        for number in block:
            misbehave(str(number), notes)
        if fault == "user":
            raise UserError("there is no such thing; name another")
        if fault == "bug":
            raise ZeroDivisionError("a bug of ours")
        return [(2 * number, os.getpid()) for number in block]

    if fault == "everything":
        os.kill(os.getpid(), signal.SIGKILL)
    return work


def start_seeing() -> Callable[[Sequence[int]], Any]:
    """Says for each number which GPUs its worker sees."""

    def work(block: Sequence[int]) -> list[tuple[str, int]]:
        time.sleep(0.1)
        return [(os.environ.get("CUDA_VISIBLE_DEVICES", "all"), os.getpid()) for _ in block]

    return work
