"""`--engine ray` against `local` on two workers, and what a worker holds. It needs Ray."""

import io
import itertools
import tempfile
import threading
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.inputs import csv_rows, photos
from benchmarks.measure import Figure, seconds
from geoguessr_rl import config as configs
from geoguessr_rl.config import CONFIGS

BOUND_RATIO = 1.5
BOUND_MEMORY = 1.1
PHOTOS = (2_000, 20_000)  # prepared by both engines; what both counts share is start-up
ANSWERS = (64, 640)  # photos that the tiny model answers
WORKERS = 2


def _workers() -> list[Path]:
    """Returns where this machine's Ray Data workers stand in /proc."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if (process / "cmdline").read_bytes().startswith(b"ray::MapWorker"):
                found.append(process)
    return found


def _held(process: Path) -> int:
    """Returns a process' memory in bytes, shared pages left out."""
    with suppress(OSError):
        rows = (process / "status").read_text().splitlines()
        return sum(1024 * int(row.split()[1]) for row in rows if row.startswith("RssAnon"))
    return 0


def _timed(call: Callable[[], object]) -> tuple[float, int]:
    """Calls, and returns the seconds and the largest memory of a Ray worker meanwhile."""
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        # A block's copies live for tens of milliseconds: a long run must not be likelier to show
        # them than a short one.
        workers: list[Path] = []
        for turn in itertools.count():
            if over.wait(0.02):
                return
            workers = workers if turn % 50 else _workers()
            peak = max(peak, *map(_held, workers), 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with redirect_stdout(io.StringIO()):
            taken = seconds(call)
    finally:
        over.set()
        watcher.join()
    return taken, peak


def _draw_test_set(root: Path, count: int) -> None:
    """Writes the test half of a synthetic OSV-5M."""
    rng = np.random.default_rng(0)
    ids, drawn = rng.permutation(count).astype(np.int64) + 10**15, photos(min(1000, count), rng)
    (root / "images/test").mkdir(parents=True)
    with zipfile.ZipFile(root / "images/test/00.zip", "w") as file:
        for n, identifier in enumerate(ids):
            file.writestr(f"00/{identifier}.jpg", drawn[n % len(drawn)])
    csv_rows(ids, rng).write_csv(root / "test.csv")


def _compare(
    what: str, counts: tuple[int, int], call: Callable[[str, int], object]
) -> tuple[Figure, list[int]]:
    """Returns the ratio of both engines without their start-up, and Ray's peaks by count."""
    taken, peaks = {}, {}
    for count in counts:
        for engine in ("local", "ray"):
            taken[engine, count], peaks[engine, count] = _timed(partial(call, engine, count))
            print(f"  {what}, {count:,} photos, {engine}: {taken[engine, count]:.1f} s", flush=True)
    few, many = counts
    local, on_ray = (taken[engine, many] - taken[engine, few] for engine in ("local", "ray"))
    figure = Figure(
        f"{what} with Ray, from {few:,} to {many:,} photos", on_ray / local, "times",
        f"the local engine, {WORKERS} workers each", at_most=BOUND_RATIO,
    )  # fmt: skip
    return figure, [peaks["ray", count] for count in counts]


def run(scale: float) -> list[Figure]:
    """Prepares and evaluates with both engines."""
    from geoguessr_rl.backends import ray_engine, tiny
    from geoguessr_rl.embedded import sample_texts
    from geoguessr_rl.phases import evaluate, prepare

    cluster = configs.Ray(workers=WORKERS)
    answers = (ANSWERS[0], max(2 * ANSWERS[0], int(scale * ANSWERS[1])))
    few = max(answers[1], int(scale * PHOTOS[0]))
    many = max(2 * few, int(scale * PHOTOS[1]))

    with tempfile.TemporaryDirectory() as folder, ray_engine.session("ray", cluster):
        root = Path(folder)
        print(f"  drawing {many:,} photos", flush=True)
        _draw_test_set(root / "osv5m", many)
        tiny.build_tiny(root / "tiny", 0, sample_texts())

        def prepared(engine: str, count: int) -> None:
            settings = {
                "source": configs.Source(root=root / "osv5m"),
                "output_dir": root / f"{engine}-{count}",
                "eval": configs.EvalDraw(size=count),
                "workers": WORKERS,
                "limit": count,  # the test half alone
                "engine": engine,
                "ray": cluster,
            }
            prepare.run(configs.DataConfig(**settings))

        def evaluated(engine: str, count: int) -> None:
            flags = {
                "model.name": str(root / "tiny"),
                "data_dir": root / f"local-{few}",
                "output_dir": root / f"runs-{engine}-{count}",
                "limit": count,
                "engine": engine,
                "ray.workers": WORKERS,
                "generation.block_size": 64,
                "generation.batch_size": 16,
            }
            evaluate.run(
                configs.load(configs.EvalConfig, CONFIGS / "embedded/eval.yaml", flags=flags)
            )

        preparing, (small, large) = _compare("prepare", (few, many), prepared)
        evaluating, _ = _compare("evaluate", answers, evaluated)
    held = f"a worker's memory, {many:,} photos"
    return [
        preparing,
        evaluating,
        Figure(held, large / 1e6, "MB"),
        Figure(held, large / small, "times", f"its memory, {few:,} photos", at_most=BOUND_MEMORY),
    ]
