"""Report: two runs over the same photos -> `report.md` and a self-contained `report.html`.

This module decides what is said, the two templates beside it how it looks; what may be compared is
decided in `runs.py`. Both pages say the same, hold no dates and no scripts, and ask the network for
nothing.
"""

import base64
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from geoguessr_rl import artifacts, data, embedded
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.charts import chart, running_mean
from geoguessr_rl.countries import CODES, name_of
from geoguessr_rl.eval_metrics import (
    Comparison,
    by_photo,
    compute_metrics,
    largest_changes,
    paired_bootstrap,
    paired_comparison,
    verdict,
)
from geoguessr_rl.records import Photo
from geoguessr_rl.reward import GEOSCORE_MAX
from geoguessr_rl.runs import Run, load_pair

RESAMPLES = 10_000
LISTED = 10  # rows of the lists of countries

# The table: group, unit, whether lower is better, and each metric with its label.
TABLE: tuple[tuple[str, str, bool, dict[str, str]], ...] = (
    (
        "GeoScore, 0 to 5,000 a photo", "score", False,
        {
            "mean_geoscore": "Mean GeoScore",
            "mean_geoscore_weighted": "Mean GeoScore, weighted by country share",
        },
    ),
    ("Distance in km, lower is better", "km", True, {"median_km": "Median distance"}),
    (
        "Share of photos in %", "share", False,
        {
            "country_acc": "Right country",
            "country_acc_parent": "Right country, territories as their parent",
            **{f"acc_at_km.{km}": f"Within {km:,} km" for km in (1, 25, 200, 750, 2500)},
            "format_rate": "Answer in the asked format",
        },
    ),
    (
        "Share of photos in %, lower is better", "share", True,
        {
            "share_over_km.2500": "Over 2,500 km off, or no place",
            "share_over_km.5000": "Over 5,000 km off, or no place",
            "zero_share": "No answer to score",
            "truncated_share": "Cut off at the token limit",
            "refusal_rate": "Refusal",
        },
    ),
)  # fmt: skip

# GeoScores published on the full OSV-5M test set.
PUBLISHED = (
    ("A random point on land", 328),
    ("Human annotators", 1009),
    ("Average GeoGuessr player, about", 2109),
    ("Claude 3.5 Sonnet, zero-shot", 2269),
    ("Small head on CLIP B/32 (hobby project, one test shard)", 2496),
    ("Best OSV-5M classifier", 3361),
    ("Expert player, about", 4579),
)

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


def compare(base: Run, tuned: Run, share: Mapping[str, float]) -> dict[str, Comparison]:
    """Compares every metric of the table, photo by photo.

    `paired_comparison` gives most. The weighted mean is here the mean of GeoScores times fixed
    weights a photo, which equals the metric's own figure on the photos at hand.
    """
    pairs = paired_comparison(base.rows, tuned.rows, resamples=RESAMPLES)
    found = {pair.metric: pair for pair in pairs}
    n = pairs[0].n

    def add(metric: str, old: Sequence[float], new: Sequence[float], lower: bool) -> None:
        interval = paired_bootstrap(old, new, resamples=RESAMPLES, lower_is_better=lower)
        found[metric] = Comparison(
            metric,
            float(np.mean(old)),
            float(np.mean(new)),
            interval.difference,
            interval.low,
            interval.high,
            interval.better,
            interval.worse,
            interval.ties,
            n,
            verdict(interval, n, lower_is_better=lower),
        )

    old, new = by_photo(base.rows), by_photo(tuned.rows)
    before, after = ([compute_metrics(rows, None) for rows in run.values()] for run in (old, new))
    for _, _, lower, metrics in TABLE:
        for key in metrics.keys() - found.keys() - {"mean_geoscore_weighted"}:
            add(key, [_get(one, key) for one in before], [_get(one, key) for one in after], lower)
    countries = [rows[0].country_iso2 for rows in old.values()]
    counts = Counter(countries)
    if total := math.fsum(share.get(code, 0) for code in counts):
        scale = len(countries) / total
        weights = [scale * share.get(code, 0) / counts[code] for code in countries]
        scores = (
            [w * one["mean_geoscore"] for w, one in zip(weights, side, strict=True)]
            for side in (before, after)
        )
        add("mean_geoscore_weighted", next(scores), next(scores), lower=False)
    return found


def _get(metrics: Mapping[str, Any], key: str) -> Any:
    """Reads `a.b` from nested metrics."""
    for part in key.split("."):
        metrics = metrics[part]
    return metrics


def number(value: float | None, unit: str, *, signed: bool = False) -> str:
    """Writes a figure as the tables show it: thousands parted, a real minus, shares in percent."""
    if value is None:
        return "–"
    digits = 1 if unit == "share" or (unit == "km" and abs(value) < 100) else 0
    value = round(value * (100 if unit == "share" else 1), digits) + 0.0  # no minus zero
    return f"{value:{'+' if signed and value else ''},.{digits}f}".replace("-", "−")


def table(found: Mapping[str, Comparison]) -> list[dict[str, Any]]:
    """Returns the groups of the before-and-after table with every figure written out."""

    def line(pair: Comparison, label: str, unit: str) -> dict[str, Any]:
        low, high = (number(end, unit, signed=True) for end in (pair.low, pair.high))
        return {
            "label": label,
            "before": number(pair.before, unit),
            "after": number(pair.after, unit),
            "change": number(pair.difference, unit, signed=True),
            "interval": f"{low} to {high}",
            "photos": (pair.better, pair.worse, pair.ties),
            "verdict": pair.verdict.partition(" at n")[0],
            "tone": pair.verdict if pair.verdict in ("better", "worse") else "open",
        }

    return [
        {
            "title": title,
            "rows": [line(found[m], label, unit) for m, label in metrics.items() if m in found],
        }
        for title, unit, _, metrics in TABLE
    ]


def country_name(code: str | None) -> str:
    """Returns a code's English name; a name without a code stays as the model wrote it."""
    return name_of(code) if code is not None and code in CODES else printable(str(code))


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


def printable(text: str) -> str:
    """Replaces what UTF-8 and HTML cannot hold: lone surrogates and control characters."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "�", text)


def gallery(base: Run, tuned: Run, split: data.Split, k: int) -> dict[str, Any]:
    """Returns the k photos that gained most and the k that lost most, with all that was said."""
    photos = {photo.id: photo for photo in split.photos}
    answers = {side: by_photo(run.rows) for side, run in (("before", base), ("after", tuned))}

    def picture(photo: Photo) -> tuple[str | None, str]:
        if split.name.startswith("eval_pano"):
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
                    "completion": printable(row.completion),
                }
                for side, photo_rows in answers.items()
                for row in photo_rows[identifier]
            ],
        }

    gains, losses = largest_changes(base.rows, tuned.rows, k)
    return {"gain": [card(*change) for change in gains], "loss": [card(*c) for c in losses]}


def place(latitude: float | None, longitude: float | None) -> str:
    """Writes coordinates as people do: 48.857° N, 2.352° E."""
    if latitude is None or longitude is None:
        return "no place"
    ns, ew = "S" if latitude < 0 else "N", "W" if longitude < 0 else "E"
    return f"{abs(latitude):.3f}°\u00a0{ns}, {abs(longitude):.3f}°\u00a0{ew}"


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


def describe(base: Run, tuned: Run, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns what the two runs are: a label and one text a run, where they may differ."""

    def line(run: Run, fresh: Mapping[str, Any]) -> dict[str, str]:
        identity, tokens = run.identity, fresh["completion_tokens"]
        adapter = "none"
        if identity["adapter"] is not None:
            lora = run.config["lora"]
            adapter = f"{lora and Path(lora).name} (weights {identity['adapter']})"
            if run.stored["allow_base_mismatch"]:
                adapter += ", base mismatch allowed"
        return {
            "Run": run.name,
            "Model": identity["model"]
            + (f" ({dtype})" if (dtype := identity.get("dtype")) else ""),
            "Adapter": adapter,
            "Prompt style": identity["prompt_style"],
            "Backend": identity["backend"],
            "Completion tokens": ", ".join(f"{key} {value}" for key, value in tokens.items()),
        }

    old, new = (line(*pair) for pair in zip((base, tuned), metrics, strict=True))
    return [(label, old[label], new[label]) for label in old]


def conditions(base: Run, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what both runs have in common."""
    identity, sampling = base.identity, base.identity["sampling"]
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


def ladder(base: Run, tuned: Run, found: Mapping[str, Comparison]) -> list[tuple[str, float, bool]]:
    """Returns the published GeoScores and the two runs' own, lowest first; True marks a run's."""
    weighted = found["mean_geoscore_weighted"]
    return sorted(
        [
            *((name, float(score), False) for name, score in PUBLISHED),
            (f"{base.name} (before)", weighted.before or 0.0, True),
            (f"{tuned.name} (after)", weighted.after or 0.0, True),
        ],
        key=lambda rung: rung[1],
    )


def run(
    base_folder: Path,
    tuned_folder: Path,
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
        training: A training run's folder, for the curves.
        output_dir: Where the two files go.
        note: Stands before everything else.
        cards: Photos of greatest gain, and as many of greatest loss.

    Raises:
        UserError: A run is missing, incomplete, damaged or not comparable with the other.
    """
    if cards < 0:
        raise UserError(f"--gallery {cards} must be 0 or more")
    if training is not None and not training.is_dir():
        raise UserError(f"{training} does not exist; give the trainer's output folder")
    base, tuned, split = load_pair(base_folder, tuned_folder)
    metrics = [compute_metrics(run.rows, split.country_share) for run in (base, tuned)]
    found = compare(base, tuned, split.country_share)
    drawn = {photo.creator for photo in split.photos} == {embedded.CREATOR}
    note = " ".join(note.split()) or (embedded.NOTE if drawn else "")
    published = split.name == "eval_osv" and not note and "mean_geoscore_weighted" in found
    head = found["mean_geoscore"]
    context = {
        "note": note,
        "base": base.name,
        "tuned": tuned.name,
        "head": head,
        "tone": head.verdict if head.verdict in ("better", "worse") else "open",
        "found": found,
        "table": table(found),
        "runs": describe(base, tuned, metrics),
        "conditions": conditions(base, metrics[0]),
        "ladder": ladder(base, tuned, found) if published else [],
        "licence": split.name in ("eval_osv", "eval_quick") and not note,
        "named": named_countries(base, tuned),
        "fallen": fallen_countries(base, tuned),
        "gallery": gallery(base, tuned, split, cards),
        "map": change_map(base, tuned),
        "distances": distance_chart(base, tuned),
        "training": training,
        "curves": training_curves(artifacts.read_training_log(training)) if training else [],
        "resamples": RESAMPLES,
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("geoguessr_rl", "phases"),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "inert": inert}
    for suffix in ("md", "html"):
        text = environment.get_template(f"report.{suffix}.jinja").render(context)
        artifacts.write_text(output_dir / f"report.{suffix}", text + "\n")
    lines = [
        f"{name} GeoScore {one['mean_geoscore']:.0f}, country {one['country_acc']:.1%}, "
        f"format {one['format_rate']:.1%}"
        for name, one in zip(("before:", "after: "), metrics, strict=True)
    ]
    lines += [
        f"gain:   {head.difference:+.0f} GeoScore, 95 % interval {head.low:.0f} to "
        f"{head.high:.0f}: {head.verdict}",
        f"report: {output_dir / 'report.html'}",
    ]
    return "\n".join(lines)


def inert(text: str) -> str:
    """Escapes every character that Markdown or HTML could read as markup, in one line of text."""
    return re.sub(r"([\\`*_\[\]<>|&~])", r"\\\1", " ".join(text.split()))
