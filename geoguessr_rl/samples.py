"""Sample completions of a training run -> `samples.html`, with photo, answer and distance.

The page is written again whenever samples are added, and is self-contained. The photos stay in it,
on this machine: what goes to Weights & Biases and the like is text alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from geoguessr_rl import artifacts
from geoguessr_rl.data_card import thumbnail
from geoguessr_rl.records import Photo
from geoguessr_rl.tables import country_name, printable, templates

ROWS, PAGE = "samples.jsonl", "samples.html"
SHOWN = 80  # on the page, the newest; the rows hold all of them
A_TABLE = 4  # photos

HEAD = ("photo", "truth", "answer", "km off", "reward", "completion")


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a rollout: what was asked, said and given for it.

    Attributes:
        step: Optimizer steps that were done when it was sampled.
        id: The photo's.
        truth: The photo's country, alpha-2.
        answer: The answered country's code or name; empty without an answer.
        d_km: Great-circle distance in km; None without an answer.
        reward: The rollouts' total reward, in [0, 1].
        completion: The raw text.
    """

    step: int
    id: str
    truth: str
    answer: str
    d_km: float | None
    reward: float
    completion: str


def cells(sample: Sample) -> tuple[str, ...]:
    """Returns a sample as text under `HEAD`."""
    return (
        sample.id,
        country_name(sample.truth),
        country_name(sample.answer) if sample.answer else "no answer",
        "–" if sample.d_km is None else f"{sample.d_km:,.0f}",
        f"{sample.reward:.3f}",
        printable(sample.completion),
    )


def lines(samples: Sequence[Sample], width: int = 100) -> list[str]:
    """Returns two lines a sample for the terminal; the completion is cut to `width` characters."""
    found = []
    for sample in samples:
        identifier, truth, answer, km, reward, completion = cells(sample)
        text = " ".join(completion.split())
        cut = text if len(text) <= width else text[: width - 1] + "…"
        away = f"{km} km off" if sample.d_km is not None else "0 points"
        found += [
            f"       {truth}: {answer}, {away}, reward {reward} ({identifier})",
            f"         {cut}",
        ]
    return found


def add(folder: Path, samples: Sequence[Sample], photos: Mapping[str, Photo]) -> None:
    """Adds samples to a run's rows, and writes the page again."""
    artifacts.append_rows(folder / ROWS, samples)
    rows = artifacts.read_rows(folder / ROWS, Sample)[-SHOWN:]
    tables = [
        {
            "step": step,
            "rows": [
                {
                    "cells": dict(zip(HEAD, cells(sample), strict=True)),
                    "picture": thumbnail(photos[sample.id].path),
                    "creator": photos[sample.id].creator,
                }
                for sample in group
            ],
        }
        for step, group in groupby(reversed(rows), key=lambda sample: sample.step)
    ]
    environment = templates()
    page = environment.get_template("samples.html.jinja").render(run=folder.name, tables=tables)
    artifacts.write_text(folder / PAGE, page + "\n")


def cut_after(folder: Path, step: int) -> None:
    """Drops the samples of steps that a resumed run does again."""
    rows = artifacts.read_rows(folder / ROWS, Sample)
    kept = [row for row in rows if row.step < step]
    if len(kept) < len(rows):
        artifacts.write_rows(folder / ROWS, kept)
