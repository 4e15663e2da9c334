"""Compare: evaluated runs over the same photos -> what is better, what is worse, what is chance.

The first run is the base that every other one is held against. Runs that did not do the same task
are refused (`runs.py`); the report shows one such comparison in pictures.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.bootstrap import CONFIDENCE
from geoguessr_rl.comparison import Comparison, GroupChange, changes_by_group, paired_comparison
from geoguessr_rl.countries import continent_of
from geoguessr_rl.runs import Run, load_runs
from geoguessr_rl.tables import TABLE, columns, country_name, number

LISTED = 10  # countries a table shows
HEAD = ("", "before", "after", "change", "95 % interval", "p", "+ / - / =", "verdict")


def compare(base: Run, other: Run, share: dict[str, float]) -> dict[str, Any]:
    """Compares one run with the base; returns metrics, continents and countries."""
    pair = (base.rows, other.rows)
    return {
        "run": other.name,
        "metrics": paired_comparison(*pair, country_weights=share, hits=(base.hits, other.hits)),
        "continents": changes_by_group(*pair, continent_of),
        "countries": changes_by_group(*pair, country_name),
    }


def metric_table(found: Sequence[Comparison]) -> list[str]:
    """Returns the table of metrics in lines of text."""
    by_key = {row.metric: row for row in found}
    rows = [HEAD]
    for _, unit, _, labels in TABLE:
        for key, label in labels.items():
            if (row := by_key.get(key)) is None:
                continue
            low, high = (number(end, unit, signed=True) for end in (row.low, row.high))
            rows.append(
                (
                    label,
                    number(row.before, unit),
                    number(row.after, unit),
                    number(row.difference, unit, signed=True),
                    f"{low} to {high}",
                    f"{row.p:.3f}",
                    f"{row.better} / {row.worse} / {row.ties}",
                    row.verdict,
                )
            )
    return columns(rows)


def group_table(title: str, changes: Sequence[GroupChange], most: int) -> list[str]:
    """Returns the groups that fell most, in lines of text."""
    rows = [(title, "photos", "before", "after", "change", "95 % interval")]
    for change in changes[:most]:
        low, high = (number(end, "score", signed=True) for end in (change.low, change.high))
        rows.append(
            (
                f"  {change.name}",
                str(change.n),
                number(change.before, "score"),
                number(change.after, "score"),
                number(change.difference, "score", signed=True),
                f"{low} to {high}",
            )
        )
    return columns(rows)


def run(folders: Sequence[Path], output: Path | None = None) -> list[str]:
    """Compares runs with the first of them, and returns the tables' lines.

    Args:
        folders: Run folders as `scripts/run_eval.py` writes them, the base first.
        output: Where the figures go as JSON.

    Raises:
        UserError: There are fewer than two, or they may not be compared.
    """
    if len(folders) < 2:
        raise UserError("a comparison needs two runs or more; give their folders, the base first")
    runs, split = load_runs(folders)
    base = runs[0]
    found = [compare(base, other, split.country_share) for other in runs[1:]]
    if output is not None:
        artifacts.write_json(output, {"base": base.name, "comparisons": _plain(found)})
    lines = []
    for one in found:
        head = one["metrics"][0]
        countries = one["countries"]
        lines += [
            f"{one['run']} against {base.name} on {split.name}, {head.n} photos: mean GeoScore is "
            f"{head.verdict}",
            *metric_table(one["metrics"]),
            f"The p-values of these {len(one['metrics'])} metrics are adjusted as one family "
            f"(Holm); a verdict needs p at most {1 - CONFIDENCE:.2f}. Intervals are not adjusted.",
            "",
            *group_table("Mean GeoScore by continent", one["continents"], len(one["continents"])),
            "",
            *group_table(f"By country, worst {LISTED} of {len(countries)}", countries, LISTED),
            "Among so many countries some stand out by chance, and with few photos the intervals "
            "are too narrow: look there, and conclude nothing.",
            "",
        ]
    return lines[:-1]


def _plain(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns the dataclasses into what JSON holds."""
    return [
        {key: [asdict(row) for row in value] if isinstance(value, list) else value
         for key, value in one.items()}
        for one in found
    ]  # fmt: skip
