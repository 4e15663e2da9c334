"""The report's tables of figures: before and after, all arms, K samples, published scores."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from geoguessr_rl.bootstrap import interval_of_mean
from geoguessr_rl.comparison import Comparison, paired_comparison
from geoguessr_rl.eval_metrics import by_photo, weighted_geoscore
from geoguessr_rl.report_figures import log_scatter
from geoguessr_rl.runs import Run
from geoguessr_rl.tables import TABLE, number
from geoguessr_rl.uncertainty import Agreement, agreement

# GeoScores published on the full OSV-5M test set, except where the name says otherwise.
PUBLISHED = (
    ("A random point on land", 328),
    ("Human annotators", 1009),
    ("Average GeoGuessr player, about", 2109),
    ("Claude 3.5 Sonnet, zero-shot", 2269),
    ("Small head on CLIP B/32 (a hobby project, on one test shard)", 2496),
    ("Best OSV-5M classifier", 3361),
    ("Expert player, about", 4579),
)


def compare(base: Run, tuned: Run, share: Mapping[str, float]) -> dict[str, Comparison]:
    """Compares every metric of the table, photo by photo."""
    pairs = paired_comparison(
        base.rows, tuned.rows, country_weights=share, hits=(base.hits, tuned.hits)
    )
    return {pair.metric: pair for pair in pairs}


def table(found: Mapping[str, Comparison]) -> list[dict[str, Any]]:
    """Returns the groups of the before-and-after table with every figure written out."""

    def line(pair: Comparison, label: str, unit: str) -> dict[str, Any]:
        return {
            "label": label,
            "before": number(pair.before, unit),
            "after": number(pair.after, unit),
            "change": number(pair.difference, unit, signed=True),
            "interval": interval_text((pair.low, pair.high), unit, signed=True),
            "p": p_value(pair.p),
            "photos": (pair.better, pair.worse, pair.ties),
            "verdict": pair.verdict.partition(" at n")[0],
            "tone": tone(pair),
        }

    return [
        {
            "title": title,
            "rows": [line(found[m], label, unit) for m, label in metrics.items() if m in found],
        }
        for title, unit, _, metrics in TABLE
    ]


def arms(runs: Sequence[Run], found: Sequence[Mapping[str, Comparison]]) -> list[dict[str, Any]]:
    """Returns the table of all arms: each run's figures, and what parts it from the first.

    A verdict is that of the run's own comparison with the base, so that a further arm changes none.

    Args:
        runs: The base first.
        found: The comparison of every other run with it.
    """
    rows = []
    for run, pairs in zip(runs, [found[0], *found], strict=True):
        figures = {m: pair.before if run is runs[0] else pair.after for m, pair in pairs.items()}
        head, ends = pairs["mean_geoscore"], run.stored["intervals"]["mean_geoscore"]
        row = {
            "name": run.name,
            "mean": figures["mean_geoscore"],
            "ends": ends,
            "score": number(figures["mean_geoscore"], "score"),
            "interval": interval_text(ends, "score"),
            "country": number(figures["country_acc"], "share"),
            "median": number(figures["median_km"], "km"),
            "format": number(figures["format_rate"], "share"),
            "change": "",
            "change_interval": "",
            "verdict": "",
            "tone": "open",
        }
        if run is not runs[0]:
            row["change"] = number(head.difference, "score", signed=True)
            row["change_interval"] = interval_text((head.low, head.high), "score", signed=True)
            row["verdict"] = head.verdict.partition(" at n")[0]
            row["tone"] = tone(head)
        rows.append(row)
    return rows


def of_k(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns mean-of-K, best-of-K and consensus-of-K of each run; nothing where K is 1."""
    return [
        {
            "name": run.name,
            "cells": [
                (
                    number(figures[key]["value"], unit),
                    interval_text(figures[key]["interval"], unit),
                )
                for key, unit in (("mean_geoscore", "score"), ("country_acc", "share"))
                for figures in run.stored["of_k"].values()
            ],
        }
        for run in runs
        if run.stored["of_k"]
    ]


def means(
    base: Run, tuned: Run, found: Mapping[str, Comparison], share: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Returns the mean over photos and the mean weighted by country share, with both intervals."""
    cards = []
    for key, title in (
        ("mean_geoscore", "Every photo counts the same"),
        ("mean_geoscore_weighted", "Countries weighted by their share"),
    ):
        if key not in found:
            continue
        own = []
        for run in (base, tuned):
            weighted = weighted_geoscore(run.rows, share) if key != "mean_geoscore" else None
            values = [
                float(np.mean([weighted.value(row) if weighted else row.geoscore for row in rows]))
                for rows in by_photo(run.rows).values()
            ]
            own.append(interval_text(interval_of_mean(values), "score"))
        pair = found[key]
        cards.append(
            {
                "key": key,
                "title": title,
                "before": number(pair.before, "score"),
                "after": number(pair.after, "score"),
                "own": own,
                "change": number(pair.difference, "score", signed=True),
                "interval": interval_text((pair.low, pair.high), "score", signed=True),
                "verdict": pair.verdict,
                "tone": tone(pair),
            }
        )
    return cards


def conditions(base: Run) -> list[tuple[str, str]]:
    """Returns what all runs have in common."""
    identity, sampling, metrics = base.identity, base.identity["sampling"], base.stored
    how = (
        "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    ) + f", top-p {sampling['top_p']:g}, {sampling['max_tokens']} tokens at most"
    image = identity["image"]
    countries = len({row.country_iso2 for row in base.rows})
    return [
        ("Split", f"{identity['split']} (fingerprint {identity['split_fingerprint']})"),
        ("Photos", f"{metrics['n'] // metrics['samples']:,} in {countries} countries"),
        ("Sampling", f"{how}, {sampling['n']} a photo, seed {sampling['seed']}"),
        ("Photo size", ", ".join(f"{key} {value}" for key, value in image.items())),
        ("Score version", identity["score_version"]),
    ]


def ladder(
    runs: Sequence[Run], found: Sequence[Mapping[str, Comparison]]
) -> list[tuple[str, float, bool]]:
    """Returns the published GeoScores and the runs' own, lowest first; True marks a run's."""
    weighted = [pairs["mean_geoscore_weighted"] for pairs in found]
    own = [weighted[0].before, *(pair.after for pair in weighted)]
    sides = ["before", "after", *[""] * (len(runs) - 2)]
    return sorted(
        [
            *((name, float(score), False) for name, score in PUBLISHED),
            *(
                (f"{run.name} ({side})" if side else run.name, score or 0.0, True)
                for run, side, score in zip(runs, sides, own, strict=True)
            ),
        ],
        key=lambda rung: rung[1],
    )


def agreements(base: Run, tuned: Run) -> dict[str, Any] | None:
    """Returns whether the spread of K answers predicts their error; None where K is 1."""
    if base.stored["samples"] < 2:
        return None
    rows = []
    for side, run in (("before", base), ("after", tuned)):
        found = agreement(run.rows)
        by_spread = [error for _, error in sorted(zip(found.spread, found.error, strict=True))]
        third = len(by_spread) // 3
        ends = (by_spread[:third], by_spread[-third:]) if third else ((), ())
        rows.append(
            {
                "side": side,
                "photos": len(found.spread),
                "left_out": found.left_out,
                "rho": correlation(found.correlation),
                "interval": correlations(found.interval),
                "shuffled": correlations(found.shuffled),
                "thirds": [number(float(np.median(end)), "km") if end else "–" for end in ends],
                "verdict": _predicts(found),
            }
        )
    return {
        "rows": rows,
        "k": base.stored["samples"],
        "scatter": log_scatter(zip(found.spread, found.error, strict=True)),
    }


def p_value(p: float) -> str:
    """Writes a p-value with three digits, and never as none at all."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def tone(pair: Comparison) -> str:
    """Returns the class of a verdict, which decides its colour."""
    return pair.verdict if pair.verdict in ("better", "worse") else "open"


def interval_text(ends: Sequence[float | None] | None, unit: str, *, signed: bool = False) -> str:
    """Writes an interval as "low to high"; a dash without one."""
    return " to ".join(number(end, unit, signed=signed) for end in ends) if ends else "–"


def _predicts(found: Agreement) -> str:
    """Says whether the spread tells more than chance would, and more than nothing."""
    if found.correlation is None or found.interval is None or found.shuffled is None:
        return "has too few photos to tell"
    if found.interval[0] > 0 and found.correlation > found.shuffled[1]:
        return "predicts the error"
    return "tells no more than chance"


def correlation(value: float | None) -> str:
    """Writes a correlation with two digits and a real minus."""
    return "–" if value is None else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def correlations(ends: tuple[float, float] | None) -> str:
    """Writes an interval of correlations."""
    return " to ".join(map(correlation, ends)) if ends else "–"
