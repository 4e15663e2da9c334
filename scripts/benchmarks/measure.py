"""How the benchmark measures: a figure and its bound, seconds, and the memory of processes."""

import math
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Figure:
    """One number that was measured.

    Attributes:
        name: What was measured.
        value: The number; a median where there were repeats.
        unit: `times` where the value is a ratio.
        against: What the ratio is to, in words; empty for a number that stands alone.
        at_least: The lower bound, or None.
        at_most: The upper bound, or None.
        spread: The lowest and the highest of the repeats.
        repeats: How often it was measured.
    """

    name: str
    value: float
    unit: str
    against: str = ""
    at_least: float | None = None
    at_most: float | None = None
    spread: tuple[float, float] | None = None
    repeats: int = 1

    @property
    def kept(self) -> bool | None:
        """Whether the value is within its bounds; None where it has none."""
        if self.at_least is None and self.at_most is None:
            return None
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= self.value <= high


def median_of(
    name: str,
    values: Sequence[float],
    unit: str,
    against: str = "",
    *,
    at_most: float | None = None,
) -> Figure:
    """Returns the figure of a measurement that was repeated."""
    spread, middle = (min(values), max(values)), statistics.median(values)
    return Figure(name, middle, unit, against, at_most=at_most, spread=spread, repeats=len(values))


def ratios(ours: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns ours over the reference, pair by pair: a neighbour slows both of a pair."""
    return [one / other for one, other in zip(ours, reference, strict=True)]


def seconds(call: Callable[[], object]) -> float:
    """Returns how long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Returns how long a short call takes, as the mean of many."""
    return timeit.timeit(call, number=calls) / calls * 1e6


def _tree_bytes(pid: int) -> int:
    """Returns the memory of a process and its children; shared pages count once."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
            todo += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except OSError:  # it has just ended
            continue
        total += sum(
            1024 * int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total


def run_script(*command: object) -> tuple[float, int]:
    """Runs a script of the project; returns its seconds and its peak memory in bytes.

    Raises:
        RuntimeError: It failed; the message is what it printed.
    """
    peak, start = 0, time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=log, stderr=log, cwd=ROOT
        ) as process,
    ):
        try:
            while process.poll() is None:
                peak = max(peak, _tree_bytes(process.pid))
                time.sleep(0.05)
        finally:
            process.kill()  # only where this was interrupted: else it has ended
        taken = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            raise RuntimeError(log.read())
    return taken, peak
