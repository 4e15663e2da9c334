"""Report: runs over the same photos -> `report.md` and a self-contained `report.html`.

The first run is the base, the second the one that the pages are about; further ones, such as the
baselines, stand in the table of all arms. This module decides what is said, the two templates
beside it how it looks; what may be compared is decided in `runs.py`. Both pages say the same, hold
no dates and no scripts, and ask the network for nothing.
"""

import base64
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geoguessr_rl import artifacts, data, embedded
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.bootstrap import CONFIDENCE, RESAMPLES
from geoguessr_rl.charts import chart, running_mean
from geoguessr_rl.comparison import largest_changes
from geoguessr_rl.eval_metrics import by_photo, consensus
from geoguessr_rl.outlines import land_path
from geoguessr_rl.records import Photo, Prediction
from geoguessr_rl.report_figures import MAPPED, confusion, guess_map
from geoguessr_rl.report_tables import (
    agreements,
    arms,
    compare,
    conditions,
    interval_text,
    ladder,
    means,
    of_k,
    table,
    tone,
)
from geoguessr_rl.reproduce import describe, reproduce
from geoguessr_rl.reward import GEOSCORE_MAX
from geoguessr_rl.runs import Run, load_runs
from geoguessr_rl.tables import clues, country_name, inert, number, place, printable, templates

LISTED = 10  # rows of the lists of countries
CLUES = 280  # characters of a card's clues; the whole answer stands below them

# A run collapses when it names one country in more than COLLAPSE_SHARE of its answers, and at least
# COLLAPSE_TIMES as often as that is true. A quarter: a split that is drawn country by country has
# a few percent of any, and a model that is unsure spreads. Three times: where photos are few or
# lopsided, a country may well be true of a tenth or more, and naming it often is then no fault.
COLLAPSE_SHARE = 0.25
COLLAPSE_TIMES = 3


# The training curves: title, axis, factor, and each series with its key in the log.
CURVES: tuple[tuple[str, str, float, dict[str, str]], ...] = (
    (
        "Reward and its components", "mean reward, 0 to 1", 1,
        {
            "total": "reward",
            "format": "rewards/reward_format/mean",
            "country": "rewards/reward_country/mean",
            "distance": "rewards/reward_dist/mean",
        },
    ),
    (
        "Country accuracy of the rollouts", "% of completions", 100,
        {"right country": "rewards/reward_country/mean"},
    ),
    ("Completion length", "tokens, mean", 1, {"tokens": "completions/mean_length"}),
    (
        "Groups of equal rewards (frac_reward_zero_std)", "% of groups", 100,
        {"frac_reward_zero_std": "frac_reward_zero_std"},
    ),
)  # fmt: skip


def collapse(run: Run) -> tuple[str, float, float] | None:
    """Returns the country that a run names far too often, its share of the answers and of truths.

    Of several it is the one named most. An answer without a country counts among the answers.
    """
    named = Counter(row.pred_country_iso2 or row.pred_country for row in run.rows)
    true = Counter(row.country_iso2 for row in run.rows)
    n = len(run.rows)
    for code, count in sorted(named.items(), key=lambda item: (-item[1], str(item[0]))):
        truth = true[code or ""]
        if code and count > COLLAPSE_SHARE * n and count >= COLLAPSE_TIMES * truth:
            return country_name(code), count / n, truth / n
    return None


def alarms(base: Run, tuned: Run) -> list[str]:
    """Returns one sentence for each run that collapses to one country."""
    return [
        f"Collapse alarm: {run.name} ({side}) names {found[0]} in {number(found[1], 'share')} % of "
        f"its answers; that is true of {number(found[2], 'share')} % of the photos."
        for side, run in (("before", base), ("after", tuned))
        if (found := collapse(run))
    ]


def named_countries(base: Run, tuned: Run) -> list[dict[str, Any]]:
    """Returns the countries named most in either run beside how often they are true, in shares."""
    old, new = (
        Counter(row.pred_country_iso2 or row.pred_country for row in run.rows if row.pred_country)
        for run in (base, tuned)
    )
    true = Counter(row.country_iso2 for row in base.rows)
    n = len(base.rows)
    top = sorted(old | new, key=lambda code: (-max(old[code], new[code]), str(code)))[:LISTED]
    return [
        {
            "name": country_name(code),
            "before": old[code] / n,
            "after": new[code] / n,
            "true": true[code or ""] / n,
            "most": max(old[code], new[code], true[code or ""]) / n,
        }
        for code in top
    ]


def fallen_countries(base: Run, tuned: Run) -> dict[str, Any]:
    """Returns the countries whose mean GeoScore fell, worst first."""
    scores: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for side, run in enumerate((base, tuned)):
        for row in run.rows:
            scores[row.country_iso2][side].append(row.geoscore)
    samples = base.identity["sampling"]["n"]
    rows = []
    for code, (old, new) in sorted(scores.items()):
        before, after = float(np.mean(old)), float(np.mean(new))
        rows.append((after - before, country_name(code), len(old) // samples, before, after))
    fell = sorted(row for row in rows if row[0] < 0)
    return {
        "of": len(rows),
        "fell": len(fell),
        "typical": f"{np.median([row[2] for row in rows]):g}",
        "rows": [
            (name, n, number(before, "score"), number(after, "score"), number(change, "score"))
            for change, name, n, before, after in fell[:LISTED]
        ],
    }


def gallery(base: Run, tuned: Run, split: data.Split, k: int) -> dict[str, Any]:
    """Returns the k photos that gained most and the k that lost most, with all that was said."""
    photos = {photo.id: photo for photo in split.photos}
    answers = {side: by_photo(run.rows) for side, run in (("before", base), ("after", tuned))}

    def picture(photo: Photo) -> tuple[str | None, str]:
        if not split.publishable:
            return None, "Not shown: pictures of this split are Google's and stay on the machine."
        if not photo.path.is_file():
            return None, f"The photo's file is gone: {photo.path.relative_to(base.data_dir)}"
        return base64.b64encode(photo.path.read_bytes()).decode(), ""

    def card(identifier: str, change: float) -> dict[str, Any]:
        photo = photos[identifier]
        encoded, reason = picture(photo)
        return {
            "id": identifier,
            "creator": photo.creator,
            "photo": encoded,
            "reason": reason,
            "country": country_name(photo.country_iso2),
            "place": place(photo.latitude, photo.longitude),
            "change": number(change, "score", signed=True),
            "answers": [
                {
                    "side": side,
                    "sample": row.sample if len(photo_rows[identifier]) > 1 else None,
                    "country": printable(row.pred_country) if row.pred_country else None,
                    "right": row.country == 1,
                    "place": place(row.pred_latitude, row.pred_longitude),
                    "km": number(row.d_km, "km"),
                    "score": number(row.geoscore, "score"),
                    "outcome": row.outcome,
                    "clues": clues(row.completion, CLUES),
                    "completion": printable(row.completion),
                }
                for side, photo_rows in answers.items()
                for row in photo_rows[identifier]
            ],
        }

    gains, losses = largest_changes(base.rows, tuned.rows, k)
    return {"gain": [card(*change) for change in gains], "loss": [card(*c) for c in losses]}


def training_curves(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the charts of a training log: running means, one series alone with its raw values."""
    charts = []
    for title, axis, factor, keys in CURVES:
        series, raw = {}, []
        for name, key in keys.items():
            values = [
                (float(entry["step"]), float(entry[key]) * factor)
                for entry in log
                if math.isfinite(entry.get(key, math.nan))
            ]
            if values:
                series[name] = running_mean(values, max(1, len(values) // 25))
                raw = values if len(keys) == 1 else []
        if series:
            charts.append(chart(title, ("optimizer step", axis), series, faint=raw))
    return charts


def checkpoint_curves(training: Path) -> dict[str, Any] | None:
    """Returns the checkpoints' charts, table and plateau; None where they were not evaluated.

    Raises:
        UserError: `checkpoints.json` is damaged.
    """
    path, remedy = training / artifacts.CHECKPOINTS, "run scripts/eval_checkpoints.py again"
    if not path.is_file():
        return None
    record = artifacts.read_json(path, remedy=remedy)
    try:
        points = sorted(record["points"], key=lambda point: point["step"])
        step, scores = "optimizer step", [(p["step"], p["mean_geoscore"]) for p in points]
        shares = {
            name: [(p["step"], 100 * p[key]) for p in points]
            for name, key in (
                ("asked format", "format_rate"),
                ("right country", "country_acc"),
                ("no answer to score", "zero_share"),
            )
        }
        charts = [
            chart(
                "Mean GeoScore with its 95 % interval", (step, "GeoScore"), {"GeoScore": scores},
                band=[(p["step"], p["low"], p["high"]) for p in points], from_zero=False,
                mark=record["plateau_step"],
            ),
            chart("Format, country and answers that score 0", (step, "% of photos"), shares),
            chart(
                "Length of the answers", (step, "tokens, median"),
                {"tokens": [(p["step"], p["tokens_p50"]) for p in points]},
            ),
        ]  # fmt: skip
        rows = [
            (
                str(p["step"]),
                number(p["mean_geoscore"], "score"),
                interval_text((p["low"], p["high"]), "score"),
                *(number(p[key], "share") for key in ("country_acc", "format_rate", "zero_share")),
                str(p["tokens_p50"]),
            )
            for p in points
        ]
        return {
            "charts": charts,
            "rows": rows,
            "plateau": record["plateau_step"],
            "last": points[-1]["step"],
            "split": record["split"],
            "photos": record["photos"],
        }
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{path} is damaged ({error!r}); {remedy}") from None


def distance_chart(base: Run, tuned: Run) -> dict[str, Any]:
    """Returns the share of photos within each distance, on a logarithmic axis from 1 km."""
    grid = np.logspace(0, math.log10(20_000), 90)
    series = {}
    for side, run in (("before", base), ("after", tuned)):
        d_km = np.sort([math.inf if row.d_km is None else row.d_km for row in run.rows])
        shares = 100 * np.searchsorted(d_km, grid) / len(d_km)
        series[side] = [(math.log10(x), float(y)) for x, y in zip(grid, shares, strict=True)]
    marks = {math.log10(km): f"{km:,}" for km in (1, 25, 200, 750, 2500, 20_000)}
    return chart(
        "Photos placed within a distance", ("km off", "% of photos"), series, x_ticks=marks
    )


def change_map(base: Run, tuned: Run) -> dict[str, Any]:
    """Returns where GeoScore rose and fell: x and y of an equirectangular map, greatest on top."""
    old, new = by_photo(base.rows), by_photo(tuned.rows)
    points = []
    for identifier, rows in old.items():
        change = float(np.mean([r.geoscore for r in new[identifier]]))
        change -= float(np.mean([r.geoscore for r in rows]))
        tone = "same" if change == 0 else "better" if change > 0 else "worse"
        x, y = 2 * (rows[0].longitude + 180), 2 * (85 - rows[0].latitude)
        strength = 0.25 + 0.75 * min(1.0, 2 * abs(change) / GEOSCORE_MAX)
        points.append((abs(change), identifier, tone, round(x, 1), round(y, 1), round(strength, 2)))
    return {
        "points": [point[2:] for point in sorted(points)],
        "counts": Counter(point[2] for point in points),
    }


def consensus_rows(run: Run) -> list[Prediction]:
    """Returns one answer a photo: of K the one that is nearest to the others."""
    return [consensus(rows) for rows in by_photo(run.rows).values()]


def run(
    base_folder: Path,
    tuned_folder: Path,
    more: Sequence[Path] = (),
    *,
    training: Path | None = None,
    output_dir: Path = Path("outputs"),
    note: str = "",
    cards: int = 5,
) -> str:
    """Writes `report.md` and `report.html`, and returns the four lines that a script prints.

    Args:
        base_folder: The run before, as `scripts/run_eval.py` wrote it.
        tuned_folder: The run after.
        more: Further runs for the table of all arms, such as the baselines.
        training: A training run's folder, for the curves.
        output_dir: Where the two files go.
        note: Stands before everything else.
        cards: Photos of greatest gain, and as many of greatest loss.

    Raises:
        UserError: A run is missing, incomplete, damaged or not comparable with the first.
    """
    if cards < 0:
        raise UserError(f"--gallery {cards} must be 0 or more")
    if training is not None and not training.is_dir():
        raise UserError(f"{training} does not exist; give the trainer's output folder")
    runs, split = load_runs([base_folder, tuned_folder, *more])
    base, tuned = runs[:2]
    comparisons = [compare(base, other, split.country_share) for other in runs[1:]]
    found = comparisons[0]
    drawn = {photo.creator for photo in split.photos} == {embedded.CREATOR}
    note = " ".join(note.split()) or (embedded.NOTE if drawn else "")
    published = split.name == "eval_osv" and not note and "mean_geoscore_weighted" in found
    head = found["mean_geoscore"]
    context = {
        "note": note,
        "base": base.name,
        "tuned": tuned.name,
        "head": head,
        "tone": tone(head),
        "alarms": alarms(base, tuned),
        "collapse": (COLLAPSE_SHARE, COLLAPSE_TIMES),
        "found": found,
        "alpha": 1 - CONFIDENCE,
        "table": table(found),
        "arms": arms(runs, comparisons),
        "k": base.stored["samples"],
        "of_k": of_k(runs),
        "means": means(base, tuned, found, split.country_share),
        "runs": describe(runs),
        "conditions": conditions(base),
        "ladder": ladder(runs, comparisons) if published else [],
        "licence": split.name in ("eval_osv", "eval_quick") and not note,
        "named": named_countries(base, tuned),
        "confusion": confusion(tuned.rows),
        "fallen": fallen_countries(base, tuned),
        "gallery": gallery(base, tuned, split, cards),
        "land": land_path(),
        "map": change_map(base, tuned),
        "guesses": guess_map(consensus_rows(tuned)),
        "mapped": MAPPED,
        "distances": distance_chart(base, tuned),
        "agreement": agreements(base, tuned),
        "training": training.resolve().name if training else None,
        "curves": training_curves(artifacts.read_training_log(training)) if training else [],
        "checkpoints": checkpoint_curves(training) if training else None,
        "reproduce": reproduce(runs, training),
        "resamples": RESAMPLES,
    }
    environment = templates()
    environment.filters |= {"number": number, "inert": inert}
    for suffix in ("md", "html"):
        text = environment.get_template(f"phases/report.{suffix}.jinja").render(context)
        artifacts.write_text(output_dir / f"report.{suffix}", text + "\n")
    lines = [
        f"{name} GeoScore {one.stored['mean_geoscore']:.0f}, country "
        f"{one.stored['country_acc']:.1%}, format {one.stored['format_rate']:.1%}"
        for name, one in (("before:", base), ("after: ", tuned))
    ]
    lines += [
        f"gain:   {head.difference:+.0f} GeoScore, 95 % interval {head.low:.0f} to "
        f"{head.high:.0f}: {head.verdict}",
        f"report: {output_dir / 'report.html'}",
    ]
    return "\n".join(lines)
