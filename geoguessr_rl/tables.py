"""How figures read: their groups, labels, units and digits, in every table alike.

The score table, the comparison and the report share it, so that one figure has one name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from geoguessr_rl.countries import CODES, name_of
from geoguessr_rl.eval_metrics import look_up
from geoguessr_rl.prompt import THINK_CLOSE, THINK_OPEN

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
            "country_acc_coords": "Right country by the point",
            "country_acc_coords_parent": "Right country by the point, territories as their parent",
            "region_acc": "Right region by the point",
            "sub_region_acc": "Right sub-region by the point",
            "city_acc": "Right city by the point",
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


def number(value: float | None, unit: str, *, signed: bool = False) -> str:
    """Writes a figure as the tables show it: thousands parted, a real minus, shares in percent."""
    if value is None:
        return "–"
    digits = 1 if unit == "share" or (unit == "km" and abs(value) < 100) else 0
    value = round(value * (100 if unit == "share" else 1), digits) + 0.0  # no minus zero
    return f"{value:{'+' if signed and value else ''},.{digits}f}".replace("-", "−")


def country_name(code: str | None) -> str:
    """Returns a code's English name; a name without a code stays as the model wrote it."""
    return name_of(code) if code is not None and code in CODES else printable(str(code))


def printable(text: str) -> str:
    """Replaces what UTF-8 and HTML cannot hold: lone surrogates and control characters."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "�", text)


def clues(completion: str, longest: int | None = None) -> str:
    """Returns what stands between the think tags, on one line and cut at `longest` characters."""
    thinking, close, _ = printable(completion).partition(THINK_CLOSE)
    text = " ".join(thinking.rpartition(THINK_OPEN)[2].split()) if close else ""
    if longest is None or len(text) <= longest:
        return text
    return text[:longest].rsplit(" ", 1)[0] + " …"


def place(latitude: float | None, longitude: float | None) -> str:
    """Writes coordinates as people do: 48.857° N, 2.352° E."""
    if latitude is None or longitude is None:
        return "no place"
    ns, ew = "S" if latitude < 0 else "N", "W" if longitude < 0 else "E"
    return f"{abs(latitude):.3f}°\u00a0{ns}, {abs(longitude):.3f}°\u00a0{ew}"


def inert(text: str) -> str:
    """Escapes every character that Markdown or HTML could read as markup, in one line of text."""
    return re.sub(r"([\\`*_\[\]<>|&~])", r"\\\1", " ".join(text.split()))


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lays out rows of text in columns: the first flush left, the others flush right."""
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def metric_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Returns the table of one run's metrics, in lines of text; figures of nothing are left out."""
    lines = []
    for title, unit, _, labels in TABLE:
        rows = [
            (f"  {label}", number(look_up(metrics, key), unit))
            for key, label in labels.items()
            if look_up(metrics, key) is not None
        ]
        if rows:
            lines += [title, *columns(rows)]
    return lines


def templates() -> jinja2.Environment:
    """Returns where every page's template comes from, by its path in the package.

    Values are escaped in HTML, and a name that a template does not get is an error.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
