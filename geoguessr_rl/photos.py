"""Photos where they lie -> photos checked, cut to size and stored, in parallel.

Processes read and decode; this one writes, so that a photo is stored by a single writer even after
a kill. What became of each photo stands in a ledger, `photos.jsonl`, so that nothing is read twice.
"""

import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from geoguessr_rl import artifacts
from geoguessr_rl.config import ImagePolicy, Screen, View
from geoguessr_rl.images import BadImageError, Prepared, open_upright, perceptual_hash, prepare
from geoguessr_rl.screen import active_reasons, screen
from geoguessr_rl.sources import read_photo

T = TypeVar("T")
R = TypeVar("R")
Outcomes = list[tuple["Stored", bytes]]
Parallel = Callable[[Callable[[Sequence["Task"]], Outcomes], Sequence["Task"]], Iterator[Outcomes]]

LEDGER = "photos.jsonl"
BLOCK = 32  # photos that a process handles at a time
FEW = 128  # photos for which no process is worth its start


@dataclass(frozen=True, slots=True)
class Task:
    """One photo to be stored: where it lies, and the names of its place.

    `path` is where it goes, relative to the output folder; the rest is as in
    `sources.MEMBER_SCHEMA`.
    """

    path: str
    archive: str
    entry: str
    offset: int
    version: str
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of one photo.

    Attributes:
        path: As in `Task`.
        version: As in `Task`: another one means other bytes, and the row is void.
        reason: Why the photo is unfit, or None. `damaged`, or a rule of `screen.py`.
        detail: More about it, for a person.
        sha256: Of the stored bytes.
        size: Bytes stored.
        width: Pixels.
        height: Pixels.
        phash: The perceptual hash, hexadecimal.
    """

    path: str
    version: str
    reason: str | None = None
    detail: str = ""
    sha256: str = ""
    size: int = 0
    width: int = 0
    height: int = 0
    phash: str = ""


def examine(
    tasks: Sequence[Task], policy: ImagePolicy, view: View, rules: Screen
) -> list[tuple[Stored, bytes]]:
    """Reads, decodes, screens and cuts a block of photos; returns what to store, in order."""
    results = []
    for task in tasks:
        unfit: tuple[str, str] | None = None
        try:
            photo = prepare(read_photo(task.archive, task.entry), policy, view)
            if active_reasons(rules):
                unfit = screen(open_upright(photo.jpeg), rules, task.places)
        except BadImageError as error:
            unfit = ("damaged", str(error))
        if unfit:
            results.append((Stored(task.path, task.version, *unfit), b""))
        else:
            results.append((describe(task.path, task.version, photo), photo.jpeg))
    return results


def describe(path: str, version: str, photo: Prepared) -> Stored:
    """Returns the ledger's row of a photo that is fit."""
    sha256 = hashlib.sha256(photo.jpeg).hexdigest()
    size, phash = len(photo.jpeg), f"{photo.phash:064x}"
    return Stored(path, version, None, "", sha256, size, *photo.size, phash)


def measure_files(files: Sequence[tuple[str, Path]]) -> list[Stored]:
    """Reads stored photos again, by (name, file); a missing or damaged one says so as `reason`."""
    results = []
    for path, file in files:
        try:
            jpeg = file.read_bytes()
            photo = Prepared(jpeg, open_upright(jpeg).size, perceptual_hash(jpeg))
            results.append(describe(path, "", photo))
        except FileNotFoundError:
            results.append(Stored(path, "", "missing"))
        except BadImageError as error:
            results.append(Stored(path, "", "damaged", str(error)))
    return results


def in_parallel(
    work: Callable[[Sequence[T]], R], items: Sequence[T], workers: int | None
) -> Iterator[R]:
    """Yields `work` of each block of items, in order, from several processes.

    Only a few blocks are under way at a time, so that results do not pile up.
    """
    count = workers or os.cpu_count() or 1
    blocks = artifacts.blocks(items, BLOCK)
    if count == 1 or len(items) <= FEW:
        yield from map(work, blocks)
        return
    # Not fork: polars has threads, and a forked child could find their locks held.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=context, initializer=artifacts.end_with_parent
    ) as pool:
        try:
            running: deque[Future[R]] = deque()
            for block in blocks:
                running.append(pool.submit(work, block))
                if len(running) > 2 * count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def read_ledger(out: Path) -> dict[str, Stored]:
    """Returns what became of each photo, by its path."""
    return {row.path: row for row in artifacts.read_rows(out / LEDGER, Stored)}


def store(
    tasks: Sequence[Task],
    out: Path,
    policy: ImagePolicy,
    *,
    view: View = "strip",
    rules: Screen,
    parallel: Parallel,
    name: str,
) -> dict[str, Stored]:
    """Stores photos, and skips those that stand in the ledger and on disk.

    Args:
        tasks: The photos.
        out: The output folder, which holds the ledger.
        policy: Their size.
        view: What to take of a panorama.
        rules: What makes a photo unfit.
        parallel: Does `examine`'s work on blocks of tasks, in any order: `in_parallel` with its
            workers, or another engine.
        name: Stands before the progress bar.

    Returns:
        What became of each photo, by its path. A photo that is unfit is not stored.
    """
    known = read_ledger(out)

    def done(task: Task) -> bool:
        row = known.get(task.path)
        if row is None or row.version != task.version:
            return False
        file = out / task.path
        return row.reason is not None or (file.is_file() and file.stat().st_size == row.size)

    todo = sorted(
        (task for task in tasks if not done(task)), key=lambda task: (task.archive, task.offset)
    )
    work = partial(examine, policy=policy, view=view, rules=rules)
    with tqdm(total=len(todo), desc=name, unit="photo", mininterval=1, disable=not todo) as bar:
        for block in parallel(work, todo):
            for row, stored in block:
                if row.reason is None:
                    artifacts.write_bytes(out / row.path, stored, sync=False)
            artifacts.append_rows(out / LEDGER, [row for row, _ in block], sync=False)
            known |= {row.path: row for row, _ in block}
            bar.update(len(block))
    return {task.path: known[task.path] for task in tasks}


def tidy(out: Path, keep: set[str]) -> None:
    """Removes photos outside `keep`, half files, and the traces of kills from the ledger.

    What stands in the folder afterwards depends on what was prepared and not on how often.

    Args:
        out: The output folder.
        keep: Paths, relative to it.
    """
    for file in (out / "images").rglob("*"):
        if file.is_file() and file.relative_to(out).as_posix() not in keep:
            file.unlink()
    rows = [row for row in read_ledger(out).values() if row.reason is not None or row.path in keep]
    rows.sort(key=lambda row: row.path)
    artifacts.write_rows(out / LEDGER, rows)
