"""The data card: prepared splits -> a self-contained `report.html` that shows what they hold.

This module decides what is said, the template beside it how it looks. Everything is read from the
files that prepare wrote, so the page can be made again at any time; it holds no dates and no
scripts, and asks the network for nothing. How a model does on the photos is `phases/report.py`'s.
"""

import base64
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from geoguessr_rl import artifacts, charts, data, embedded
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.countries import CODES, name_of
from geoguessr_rl.images import visual_tokens
from geoguessr_rl.outlines import land_path
from geoguessr_rl.records import Photo
from geoguessr_rl.tables import templates

PAGE = "report.html"

SHEET_SPLITS = ("eval_osv", "train_pool")
SHEET_PHOTOS = 24  # a split
THUMBNAIL = 200  # pixels of the long edge
LISTED_SIZES = 8
LISTED_REJECTED = 30
BARS_WITH_NAMES = 30  # more countries are drawn as columns, and named in a list
LOG_FROM = 30  # times the smallest count, from which a linear axis would hide the small ones

# Each source of rows, and the split that it fills.
SOURCES = {"train": "train_pool", "test": "eval_osv", "pano": "eval_pano"}

REASONS = {
    "no_id": "no usable id",
    "no_photo": "no photo in the zips at hand",
    "duplicate_id": "an id that came before",
    "bad_coordinates": "no usable coordinates",
    "null_island": "coordinates 0, 0, which stand for none",
    "no_country": "no country",
    "same_photo": "the same photo as in an evaluation split",
    "same_sequence": "of one sequence with an evaluation photo",
    "within_min_km": "too near to an evaluation photo",
    "not_drawn": "usable but not drawn: enough of its country, or of all",
    "damaged": "a photo that cannot be decoded",
    "near_duplicate": "nearly the same picture as another",
    "burned_in_text": "burned-in text that gives the place away",
    "blank_frame": "a black, white or empty frame",
    "extreme_aspect": "far too wide or too tall",
}


def share(part: float, whole: float) -> str:
    """Writes a share in percent, and never calls a few photos none or all."""
    if not part or not whole:
        return "0 %"
    percent = 100 * part / whole
    if percent < 0.1:
        return "< 0.1 %"
    if percent > 99.9:
        return "100 %" if part >= whole else "> 99.9 %"
    return f"{percent:.1f} %"


def country_name(code: str) -> str:
    """Returns a code's English name; an unknown code stands for itself."""
    return name_of(code) if code in CODES else code


def world_map(photos: Sequence[Photo]) -> dict[str, Any]:
    """Returns one dot a place for a map of 720 × 290: SVG paths by how many photos a dot holds.

    Positions are rounded until the dots of tens of thousands of photos stay a small page.
    """
    step = 0.5 if len(photos) <= 2000 else 1.0  # a quarter or half of a degree
    dots = Counter(
        (
            round(2 * (photo.longitude + 180) / step) * step,
            round(2 * (85 - photo.latitude) / step) * step,
        )
        for photo in photos
    )
    layers = {
        level: "".join(f"M{x:g} {y:g}h0" for (x, y), n in sorted(dots.items()) if low <= n < high)
        for level, low, high in (("few", 1, 3), ("some", 3, 10), ("many", 10, math.inf))
    }
    return {
        "layers": {level: path for level, path in layers.items() if path},
        "dense": len(dots) > 2000,
        "below": sum(n for (_, y), n in dots.items() if y > 290),
    }


def country_chart(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Any]:
    """Lays out the photos a country before and after thinning, the largest country first.

    Lengths are fractions of the axis, which is logarithmic where counts differ widely. A line marks
    the largest count that thinning left, where a country had more before: with a cap, the cap.
    """
    codes = sorted({*before, *after}, key=lambda code: (-before.get(code, 0), code))
    counts = [n for n in (*before.values(), *after.values()) if n]
    most, least = max(counts, default=1), min(counts, default=1)
    log = most >= LOG_FROM * least

    def length(n: float) -> float:
        if log:  # a count of 1 is a short bar, not none
            return round(math.log(2 * n) / math.log(2 * most), 4) if n else 0.0
        return round(n / most, 4)

    largest = max(after.values(), default=0)
    cut = sum(n > largest for n in before.values())
    rows = [
        {
            "code": code,
            "name": country_name(code),
            "before": before.get(code, 0),
            "after": after.get(code, 0),
            "lengths": (length(before.get(code, 0)), length(after.get(code, 0))),
        }
        for code in codes
    ]
    marks = [10**i for i in range(6)] if log else charts.ticks(0, most)
    return {
        "rows": rows,
        "log": log,
        "named": len(rows) <= BARS_WITH_NAMES,
        "ticks": [(length(n), f"{n:,g}") for n in marks if 0 < n <= most and n == int(n)],
        "largest": largest,
        "line": length(largest) if cut else None,
        "cut": cut,
        "gone": [row["name"] for row in rows if not row["after"]],
        "top": (country_name(codes[0]), share(before.get(codes[0], 0), sum(before.values()))),
        "top_after": share(largest, sum(after.values())),
    }


def size_table(splits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the common photo sizes with their share a split, and each split's visual tokens."""
    sizes = {
        name: Counter({_size(key): count for key, count in split["sizes"].items()})
        for name, split in splits.items()
    }
    total = sum(sizes.values(), Counter())
    common = sorted(total, key=lambda size: (-total[size], size))[:LISTED_SIZES]
    most = max(
        (count[size] / count.total() for count in sizes.values() if count for size in common),
        default=1,
    )
    rows = [
        {
            "label": f"{size[0]} × {size[1]}",
            "tokens": visual_tokens(size),
            "shares": [_bar(sizes[name][size], sizes[name].total(), most) for name in sizes],
        }
        for size in common
    ]
    rest = {name: sum(count[s] for s in count if s not in common) for name, count in sizes.items()}
    if any(rest.values()):
        rows.append(
            {
                "label": f"{len(total) - len(common)} other sizes",
                "tokens": None,
                "shares": [_bar(rest[name], sizes[name].total(), None) for name in sizes],
            }
        )
    tokens = {
        name: sorted(visual_tokens(size) for size in count.elements())
        for name, count in sizes.items()
    }
    return {
        "rows": rows,
        "tokens": [
            (name, len(sizes[name]), each[0], each[len(each) // 2], each[-1], sum(each) / len(each))
            for name, each in tokens.items()
            if each
        ],
    }


def _size(key: str) -> tuple[int, int]:
    """Reads the summary's "640x480"."""
    width, height = key.split("x")
    return int(width), int(height)


def _bar(part: int, whole: int, most: float | None) -> tuple[str, float]:
    """Returns a share as text, and as a fraction of the longest bar; without `most` no bar."""
    return share(part, whole), round(part / whole / most, 3) if most and whole else 0.0


def removed(name: str, source: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns why the rows of one CSV are not in its split, with every count and share.

    Raises:
        UserError: The rows that were selected and dropped are not all rows of the CSV.
    """
    dropped, total = source["dropped"], source["csv_rows"]
    if source["rows_selected"] + sum(dropped.values()) != total:
        raise UserError(
            f"{path}: {source['rows_selected']} selected and {sum(dropped.values())} dropped rows "
            f"of {name} are not its {total}; {data.PREPARE_REMEDY}"
        )
    rejected = sorted(source.get("rejected", {}).items())
    return {
        "name": name,
        "split": SOURCES[name],
        "total": total,
        "selected": (source["rows_selected"], share(source["rows_selected"], total)),
        "rows": [
            (in_words(reason), count, share(count, total))
            for reason, count in sorted(dropped.items(), key=lambda item: -item[1])
            if count
        ],
        "none": [in_words(reason) for reason, count in dropped.items() if not count],
        "facts": [
            (label, count)
            for label, count in (
                ("photos in the zips", source.get("zip_photos")),
                *_labelled("zip entries ignored", source.get("zip_entries_ignored", {})),
                ("photos without a usable row", source.get("photos_without_usable_row")),
                *_labelled("labels repaired", source.get("labels_repaired", {})),
            )
            if count
        ],
        "rejected": rejected[:LISTED_REJECTED],
        "more_rejected": max(0, len(rejected) - LISTED_REJECTED),
    }


def in_words(reason: str) -> str:
    """Says a reason as a reader would; one that is not known here by its name."""
    return REASONS.get(reason, reason.replace("_", " "))


def _labelled(label: str, counts: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Returns counts with their keys as part of the label."""
    return ((f"{label} ({key.replace('_', ' ')})", n) for key, n in sorted(counts.items()))


def thumbnail(path: Path) -> str | None:
    """Returns a photo as a small JPEG in base64, or None when its file is gone."""
    if not path.is_file():
        return None
    with Image.open(path) as image:
        small = image.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=75)
    return base64.b64encode(out.getvalue()).decode()


def contact_sheet(split: data.Split) -> list[dict[str, Any]]:
    """Returns the first photos of a split with their countries and creators."""
    return [
        {
            "id": photo.id,
            "picture": thumbnail(photo.path),
            "country": country_name(photo.country_iso2),
            "creator": photo.creator,
        }
        for photo in split.photos[:SHEET_PHOTOS]
    ]


def write(data_dir: Path) -> Path:
    """Writes the data card of a prepared folder and returns its path.

    Raises:
        UserError: The summary, a split or a manifest is missing or damaged, or the counts of the
            summary do not add up.
    """
    summary_path = data_dir / artifacts.SUMMARY
    summary = artifacts.read_json(summary_path, remedy=data.PREPARE_REMEDY)
    # What is trained on comes first on the page.
    about = dict(sorted(summary["splits"].items(), key=lambda item: item[1]["role"] != "train"))
    splits = {name: data.load_split(data_dir, name) for name in about}
    manifests = {name: data.read_manifest(data.manifest_path(data_dir, name)) for name in about}
    private = [name for name, split in splits.items() if not split.publishable]
    creators = {photo.creator for split in splits.values() for photo in split.photos}
    after = {
        name: Counter(photo.country_iso2 for photo in split.photos)
        for name, split in splits.items()
    }
    context = {
        "note": embedded.NOTE if creators == {embedded.CREATOR} else "",
        "train": about.get("train_pool"),
        "evaluation": about.get("eval_osv"),
        "splits": about,
        "datasets": {name: one["dataset"] or {} for name, one in manifests.items()},
        "private": private,
        "land": land_path(),
        "maps": {name: world_map(split.photos) for name, split in splits.items()},
        "country_charts": [
            (split, country_chart(summary[name]["countries_before"], after[split]))
            for name, split in SOURCES.items()
            if name in summary and split in splits and summary[name].get("countries_before")
        ],
        "sizes": size_table(about),
        "removed": [
            removed(name, summary[name], summary_path) for name in SOURCES if name in summary
        ],
        "sheets": {
            name: contact_sheet(splits[name])
            for name in SHEET_SPLITS
            if name in splits and name not in private
        },
    }
    environment = templates()
    environment.filters["count"] = lambda n: f"{n:,}"
    page = environment.get_template("data_card.html.jinja").render(context)
    artifacts.write_text(data_dir / PAGE, page + "\n")
    return data_dir / PAGE
