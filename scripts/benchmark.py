"""Times what runs often or long against a named reference, and fails when it has become too slow.

`python scripts/benchmark.py` runs every task, `python scripts/benchmark.py reward` one. Each is a
module of `benchmarks/` whose `run(scale)` returns figures; to add one, write it and name it in
`TASKS`. Run it alone on the machine. `data` needs Linux and 10 GB of disk, `eval` vLLM.
"""

import argparse
import importlib
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from geoguessr_rl.artifacts import end_with_parent
from geoguessr_rl.config import run_script

TASKS = ("reward", "data", "score", "eval", "train", "ray")


def run_task(name: str, scale: float) -> Any:
    """Returns the figures of one task."""
    return importlib.import_module(f"benchmarks.{name}").run(scale)


def run_apart(name: str, scale: float) -> Any:
    """Runs a task in a process of its own.

    What one leaves behind (vLLM's threads, memory, the cores that a process was bound to) would be
    measured with the next.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=end_with_parent) as pool:
        return pool.submit(run_task, name, scale).result()


def share(text: str) -> float:
    """Reads a number over 0 and up to 1; argparse says what is wrong with any other."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not over 0 and at most 1")
    return value


def main() -> None:
    """Runs the chosen tasks, and with `--check` exits with 1 when one breaks its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "tasks", nargs="*", metavar="TASK", help=f"any of {', '.join(TASKS)}; all without one"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bound is broken")
    parser.add_argument(
        "--scale", type=share, default=1.0, metavar="X",
        help="do this part of the work, over 0 and up to 1: a trial, kept apart from results",
    )  # fmt: skip
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/benchmark"),
        help="gets benchmark.json and benchmark.md: the last results of every task",
    )  # fmt: skip
    args = parser.parse_args()
    if unknown := [name for name in args.tasks if name not in (*TASKS, "all")]:
        parser.error(f"no task {unknown[0]!r}; there are: {', '.join(TASKS)}, all")
    every = not args.tasks or "all" in args.tasks

    from benchmarks import results

    from geoguessr_rl import artifacts

    trial = f" (trial at {args.scale:g} of the size)" if args.scale < 1 else ""
    broken = []
    with artifacts.run_lock(args.output_dir):
        book = results.read(args.output_dir)
        around = results.machine()  # before the tasks, which are a load themselves
        if around["load"] > results.BUSY:
            print(
                f"warning: the load is {around['load']} before the run, and a neighbour falsifies "
                "what is measured; run it again alone"
            )
        for name in TASKS if every else dict.fromkeys(args.tasks):
            print(f"{name}{trial}", flush=True)
            start = time.perf_counter()
            figures = run_apart(name, args.scale)
            taken = time.perf_counter() - start
            book["trials" if trial else "results"][name] = results.entry(
                figures, scale=args.scale, seconds=taken, around=around
            )
            results.write(args.output_dir, book)
            print(f"{results.table(figures)}\n", flush=True)
            broken += [f"{name}, {figure.name}" for figure in figures if figure.kept is False]
    print(f"results in {args.output_dir}/benchmark.json and benchmark.md")
    if broken:
        print(f"bounds broken: {'; '.join(broken)}")
    if broken and args.check:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
