"""A report that cannot mislead: what it refuses, what it escapes, and what it says."""

import html as html_text
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from browser import require_browser
from conftest import make_checkpoint
from PIL import Image
from scipy.stats import rankdata, spearmanr

from geoguessr_rl import (
    artifacts,
    bootstrap,
    charts,
    config,
    data,
    eval_metrics,
    report_figures,
    report_tables,
    reproduce,
    runs,
    tables,
    uncertainty,
)
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import EvalConfig
from geoguessr_rl.eval_metrics import consensus, look_up, make_prediction
from geoguessr_rl.phases import evaluate, report
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import PHOTO_SCHEMA, Completion, Prediction
from geoguessr_rl.reward import EARTH_RADIUS_KM, haversine_km

PLACES = (
    ("FR", "France", 48.86, 2.35), ("DE", "Germany", 52.52, 13.40), ("IT", "Italy", 41.90, 12.50),
    ("JP", "Japan", 35.68, 139.69), ("BR", "Brazil", -23.55, -46.63), ("KE", "Kenya", -1.29, 36.82),
    ("US", "United States", 39.74, -104.99), ("AU", "Australia", -33.87, 151.21),
)  # fmt: skip
RIGHT = [format_completion(*place[1:], style="direct") for place in PLACES]
FRANCE = [RIGHT[0]] * len(PLACES)
POLICY = {"long_edge": 64, "multiple": 32}
TEMPERED = {"generation": {"temperature": 1.0}}
ROOT = Path(report.__file__).parents[2]
Evaluate = Callable[..., Path]


def make_split(
    folder: Path, name: str = "eval_osv", shift: float = 0.0, shares: bool = True
) -> None:
    """Writes one small photo a place, its parquet and its manifest."""
    rows = []
    for number, (code, _, latitude, longitude) in enumerate(PLACES):
        path = folder / "images" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 32), (20 * number, 90, 120)).save(path)
        row = dict.fromkeys(PHOTO_SCHEMA)
        row |= {
            "image_path": f"images/{number}.jpg",
            "latitude": latitude + shift,
            "longitude": longitude,
            "country_iso2": code,
            "creator": f"mapper<{number}>",
            **{level: f"{level} of {code}" for level in ("region", "sub_region", "city")},
        }
        rows.append(row)
    frame = pl.DataFrame(rows, schema=PHOTO_SCHEMA)
    frame.write_parquet(folder / f"{name}.parquet")
    manifest = data.build_manifest(
        name,
        "evaluation",
        frame,
        {str(i): f"hash{i}" for i in range(len(rows))},
        image_policy=POLICY,
        dataset={"repo": "test"},
        publishable=not name.startswith("eval_pano"),
        country_share=dict(zip([place[0] for place in PLACES], range(1, 9), strict=True))
        if shares
        else None,
    )
    artifacts.write_json(data.manifest_path(folder, name), manifest)


@pytest.fixture
def evaluated(tmp_path: Path) -> Evaluate:
    """Evaluates given completions on the photos as `run_eval.py` does; returns the run folder."""

    def go(
        name: str, answers: Sequence[str | list[str]], split: str = "eval_osv", **options: Any
    ) -> Path:
        folder = tmp_path / "data"
        if not (folder / f"{split}.parquet").exists():
            make_split(folder, split)
        script = tmp_path / f"{name}.json"
        script.write_text(json.dumps({str(i): text for i, text in enumerate(answers)}))
        generation = {"backend": "scripted", "script": script, "block_size": 4}
        generation |= options.pop("generation", {})
        config = EvalConfig.model_validate(
            {
                "generation": generation,
                "data_dir": folder,
                "split": split,
                "run_name": name,
                "output_dir": tmp_path / "eval",
                **options,
            }
        )
        evaluate.run(config)
        return tmp_path / "eval" / name / split

    return go


def pages(out: Path) -> tuple[str, str]:
    return tuple((out / f"report.{kind}").read_bytes().decode() for kind in ("md", "html"))  # type: ignore[return-value]


def write_report(base: Path, tuned: Path, out: Path, **options: Any) -> tuple[str, str]:
    report.run(base, tuned, output_dir=out, **options)
    return pages(out)


class Elements(HTMLParser):
    """Collects the tags and attribute values of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]


# --- What it says


def test_the_lines_give_both_scores_the_interval_and_the_verdict(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    line = report.run(evaluated("base", FRANCE), evaluated("rl", RIGHT), output_dir=tmp_path)
    pattern = (
        r"before: GeoScore (\d+), .*\nafter:  GeoScore 5000, .*\n"
        r"gain:   \+(\d+) GeoScore, 95 % interval (\d+) to (\d+): better\nreport: .*report.html"
    )
    before, gain, low, high = map(int, re.fullmatch(pattern, line).groups())  # type: ignore[union-attr]
    assert before + gain in (4999, 5000, 5001)
    assert low < gain < high


def test_every_headline_metric_stands_in_both_pages(evaluated: Evaluate, tmp_path: Path) -> None:
    md, html = write_report(evaluated("base", FRANCE), evaluated("rl", RIGHT), tmp_path)
    for _, _, _, metrics in tables.TABLE:
        for label in metrics.values():
            assert f"| {label} |" in md and f"<th>{label}</th>" in html
    for share in ("Within 25 km | 12.5 | 100.0 | +87.5", "Over 5,000 km off, or no place | 62.5"):
        assert share in md


def test_a_falling_distance_is_better_and_a_rising_refusal_rate_is_worse(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    refusal = "I'm sorry, I cannot say."
    near, refusing = evaluated("near", RIGHT), evaluated("refusing", [refusal] * len(PLACES))
    md, _ = write_report(evaluated("base", FRANCE), near, tmp_path)
    assert re.search(r"Median distance .*\| better \|", md)
    md, _ = write_report(near, refusing, tmp_path)
    assert re.search(r"Refusal \| 0.0 \| 100.0 \|.*\| 0 / 8 / 0 \| worse \|", md)
    assert re.search(r"Median distance \| 0.0 \| – \| – \|", md)  # infinite: all miss


def test_the_weighted_mean_of_the_table_is_the_metrics_own(evaluated: Evaluate) -> None:
    (base, tuned), split = runs.load_runs([evaluated("base", FRANCE), evaluated("rl", RIGHT)])
    found = report_tables.compare(base, tuned, split.country_share)
    for run, figure in ((base, "before"), (tuned, "after")):
        for metric, pair in found.items():
            stored = look_up(run.stored, metric)
            assert getattr(pair, figure) == pytest.approx(stored), metric
    assert found["mean_geoscore_weighted"].before != pytest.approx(found["mean_geoscore"].before)


@pytest.mark.parametrize(
    ("value", "unit", "signed", "text"),
    [
        (1234.5, "score", False, "1,234"),
        (-1922.4, "km", True, "−1,922"),
        (0.6, "km", False, "0.6"),
        (0.2275, "share", True, "+22.8"),
        (-0.0001, "share", True, "0.0"),  # neither +0.0 nor −0.0
        (None, "km", False, "–"),
    ],
)
def test_figures_are_written_for_a_column(
    value: float | None, unit: str, signed: bool, text: str
) -> None:
    assert report.number(value, unit, signed=signed) == text


def test_equal_runs_are_not_distinguishable(evaluated: Evaluate, tmp_path: Path) -> None:
    base = evaluated("base", FRANCE)
    line = report.run(base, base, output_dir=tmp_path)
    assert "+0 GeoScore, 95 % interval 0 to 0: not distinguishable at n = 8" in line


def test_a_hot_spot_stands_beside_how_often_it_is_true(evaluated: Evaluate, tmp_path: Path) -> None:
    md, _ = write_report(evaluated("base", FRANCE), evaluated("rl", RIGHT), tmp_path)
    assert "| France | 100.0 | 12.5 | 12.5 |" in md


def test_what_got_worse_lists_the_worst_country_first_and_warns_of_chance(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    worse = [*RIGHT[:6], RIGHT[5], RIGHT[3]]  # the US as Kenya, Australia as Japan
    md, html = write_report(evaluated("base", RIGHT), evaluated("rl", worse), tmp_path)
    section = md.split("## What got worse")[1].split("##")[0]
    assert re.findall(r"^\| (\w[\w ]+) \| 1 ", section, re.M) == ["United States", "Australia"]
    assert "Mean GeoScore fell in 2 of 8 countries" in html and "by chance" in html


def test_the_note_comes_before_everything(evaluated: Evaluate, tmp_path: Path) -> None:
    note = "This is the embedded world: drawn pictures & a tiny model."
    runs_ = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    md, html = write_report(*runs_, tmp_path, note=note)
    assert md.split("\n")[0] == note
    body = html.split("<body>")[1].strip()
    assert body.startswith(f'<p class="note">{note.replace("&", "&amp;")}</p>')
    md, html = write_report(*runs_, tmp_path)
    assert md.startswith("# geoguessr-rl report") and '<p class="note">' not in html


@pytest.mark.parametrize(
    ("split", "note", "shown"),
    [("eval_osv", "", True), ("eval_osv", "drawn", False), ("eval_quick", "", False)],
)
def test_published_numbers_stand_only_beside_real_osv_photos(
    evaluated: Evaluate, tmp_path: Path, split: str, note: str, shown: bool
) -> None:
    base, tuned = evaluated("base", FRANCE, split), evaluated("rl", RIGHT, split)
    md, html = write_report(base, tuned, tmp_path, note=note)
    for page in (md, html):
        assert ("Best OSV-5M classifier" in page) == shown
        assert ("on the full OSV-5M test set, or where" in page) == shown
        assert ("and not on this sample" in page) == shown


# --- What it refuses


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_identity(folder: Path, **values: Any) -> None:
    """Makes a run another one, in its record and in the header of its rows alike."""
    edit(folder / artifacts.IDENTITY, **values)
    path = folder / artifacts.PREDICTIONS
    first, rest = path.read_text().split("\n", 1)
    header = json.loads(first)["header"] | values
    path.write_text(json.dumps({"header": header}) + "\n" + rest)


@pytest.mark.parametrize("key", runs.COMPARABLE)
def test_runs_that_differ_are_refused_with_both_values(
    evaluated: Evaluate, tmp_path: Path, key: str
) -> None:
    base, tuned = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    edit_identity(tuned, **{key: "other"})
    before = json.loads((base / artifacts.IDENTITY).read_text())[key]
    with pytest.raises(UserError, match=f"{key} is {re.escape(repr(before))} in .* and 'other' in"):
        report.run(base, tuned, output_dir=tmp_path)


def test_runs_may_differ_in_model_and_prompt(evaluated: Evaluate, tmp_path: Path) -> None:
    base = evaluated("base", FRANCE)
    tuned = evaluated("rl", RIGHT, prompt={"style": "direct"})
    md, _ = write_report(base, tuned, tmp_path)
    assert "| Prompt style | think | direct |" in md


def test_another_sampling_is_refused(evaluated: Evaluate, tmp_path: Path) -> None:
    tuned = evaluated("rl", RIGHT, generation={"temperature": 1.0})
    with pytest.raises(UserError, match="sampling"):
        report.run(evaluated("base", FRANCE), tuned, output_dir=tmp_path)


def test_a_limited_run_is_refused_with_both_counts(evaluated: Evaluate, tmp_path: Path) -> None:
    whole, part = evaluated("base", FRANCE), evaluated("rl", RIGHT, limit=4)
    with pytest.raises(UserError, match=r"covers 8 photos and .* 4, .*--limit"):
        report.run(whole, part, output_dir=tmp_path)
    md, _ = write_report(evaluated("small", FRANCE, limit=4), part, tmp_path)
    assert "The same 4 photos" in md


def test_both_runs_of_an_older_score_version_are_refused(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    folders = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    for folder in folders:
        edit_identity(folder, score_version="0")
    with pytest.raises(UserError, match="score_version '0' and this code has"):
        report.run(*folders, output_dir=tmp_path)


def test_an_incomplete_run_is_refused(evaluated: Evaluate, tmp_path: Path) -> None:
    base, tuned = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    path = tuned / artifacts.PREDICTIONS
    path.write_text(path.read_text().replace('"outcome": "answered"', '"outcome": "error"', 1))
    with pytest.raises(UserError, match="incomplete: 1 of its 8 rows are transport errors"):
        report.run(base, tuned, output_dir=tmp_path)
    path.write_text(path.read_text().split("\n")[0] + "\n")
    with pytest.raises(UserError, match="incomplete: it has no row"):
        report.run(base, tuned, output_dir=tmp_path)


def test_a_folder_that_is_no_run_is_refused(evaluated: Evaluate, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.json does not exist; give a folder that"):
        report.run(evaluated("base", FRANCE), tmp_path / "none", output_dir=tmp_path)


def test_figures_that_the_completions_do_not_give_are_refused(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    base, tuned = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    edit(tuned / artifacts.METRICS, mean_geoscore=5001.0)
    with pytest.raises(UserError, match=r"says mean_geoscore = 5001\.0, and the rows .* give 50"):
        report.run(base, tuned, output_dir=tmp_path)


def test_scores_that_were_edited_in_the_rows_count_for_nothing(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    base, tuned = evaluated("base", FRANCE), evaluated("rl", FRANCE)
    path = tuned / artifacts.PREDICTIONS
    path.write_text(re.sub(r'"geoscore": [\d.e-]+', '"geoscore": 5000.0', path.read_text()))
    assert "gain:   +0 GeoScore" in report.run(base, tuned, output_dir=tmp_path)


def test_photos_that_were_prepared_anew_are_refused(evaluated: Evaluate, tmp_path: Path) -> None:
    base, tuned = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    make_split(tmp_path / "data", shift=0.5)
    with pytest.raises(UserError, match=r"holds another eval_osv than .* was measured on"):
        report.run(base, tuned, output_dir=tmp_path)


def test_a_refusal_writes_nothing(evaluated: Evaluate, tmp_path: Path) -> None:
    base = evaluated("base", FRANCE)
    with pytest.raises(UserError, match="--gallery -1"):
        report.run(base, base, output_dir=tmp_path / "out", cards=-1)
    with pytest.raises(UserError, match="does not exist; give the trainer's"):
        report.run(base, base, output_dir=tmp_path / "out", training=tmp_path / "none")
    assert not (tmp_path / "out").exists()


# --- The model's text is material, never markup

HOSTILE = (
    '<script>alert(1)</script><img src="https://evil.example/x.png" onerror="alert(2)">'
    '<a href="javascript:alert(3)">x</a> [y](javascript:alert(4)) ![z](https://evil.example/z.png)'
    "\r</pre></details>\n```\n# heading\n"
)
HOSTILE_COUNTRY = "<b onclick=alert(5)>|\\*_`[q](javascript:alert(6))"


@pytest.fixture
def hostile(evaluated: Evaluate, tmp_path: Path) -> tuple[str, str]:
    answers = [HOSTILE + text for text in RIGHT]
    answers[3] = HOSTILE + format_completion(HOSTILE_COUNTRY, 80.0, 10.0, style="direct")
    return write_report(evaluated("base", answers), evaluated("rl", FRANCE), tmp_path, cards=8)


def test_html_holds_the_models_text_as_text(hostile: tuple[str, str]) -> None:
    page = Elements(hostile[1])
    assert not {"script", "a", "b", "iframe", "link"} & set(page.tags)
    assert page.tags.count("img") == len(PLACES) - 1  # one photo is named right by both
    assert not [value for value in page.values if "javascript:" in value or "alert" in value]
    assert "&lt;script&gt;alert(1)" in hostile[1]


def test_html_asks_the_network_for_nothing(hostile: tuple[str, str]) -> None:
    page = hostile[1]
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert not [value for value in Elements(page).values if "//" in value[:12]]
    assert not re.search(r"@import|url\(", page)


def test_markdown_holds_the_models_text_as_text(hostile: tuple[str, str]) -> None:
    md = hostile[0]
    for line in md.splitlines():
        if "alert(1)" in line or line.strip() in ("</pre></details>", "```", "# heading"):
            assert line.startswith("    ")  # an indented block: nothing in it is markup
    assert "| before | \\<b onclick=alert(5)\\>\\|\\\\\\*\\_\\`\\[q\\](javascript" in md


def test_an_alarm_about_a_hostile_name_is_text(evaluated: Evaluate, tmp_path: Path) -> None:
    named = [format_completion(HOSTILE_COUNTRY, 1.0, 1.0, style="direct")] * len(PLACES)
    md, html = write_report(evaluated("base", named), evaluated("rl", RIGHT), tmp_path)
    assert "names \\<b onclick=alert(5)\\>\\|" in md.split("## All arms")[0]
    assert "names &lt;b onclick=alert(5)&gt;|" in html.split("</header>")[0]
    assert "b" not in Elements(html).tags


def test_text_that_utf_8_cannot_hold_is_shown_with_a_mark(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    broken = ["\ud800\x07" + text for text in FRANCE]
    md, html = write_report(evaluated("base", broken), evaluated("rl", RIGHT), tmp_path)
    assert "��&lt;answer&gt;" in html and "��<answer>" in md


# --- Photos


def test_the_gallery_shows_the_greatest_changes_with_their_photos(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    mixed = [*FRANCE[:3], *RIGHT[3:]]
    swapped = [*RIGHT[:3], *FRANCE[3:]]
    md, html = write_report(evaluated("base", mixed), evaluated("rl", swapped), tmp_path, cards=2)
    gains, losses = md.split("## Greatest gains")[1].split("## Greatest losses")
    assert re.findall(r"^### (\w+): \+", gains, re.M) == ["Italy", "Germany"]
    assert re.findall(r"^### (\w+): −", losses, re.M) == ["Australia", "Japan"]
    assert html.count("data:image/jpeg;base64,/9j/") == 4
    assert "by mapper&lt;7&gt;" in html and "by mapper\\<7\\>" in md  # CC BY-SA: named


def test_a_photo_whose_file_is_gone_is_said_so(evaluated: Evaluate, tmp_path: Path) -> None:
    base, tuned = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    (tmp_path / "data/images/7.jpg").unlink()
    for page in write_report(base, tuned, tmp_path, cards=8):
        assert page.count("The photo's file is gone: images/7.jpg") == 1 or (
            page.count("The photo&#39;s file is gone: images/7.jpg") == 1
        )


def test_google_pictures_are_never_shown(evaluated: Evaluate, tmp_path: Path) -> None:
    base, tuned = evaluated("base", FRANCE, "eval_pano"), evaluated("rl", RIGHT, "eval_pano")
    _, html = write_report(base, tuned, tmp_path)
    assert "data:image" not in html and "are Google&#39;s" in html


# --- Curves


def make_training(folder: Path, log: list[dict[str, Any]]) -> Path:
    make_checkpoint(folder, 3, json.dumps({"log_history": log}))
    return folder


def test_the_training_log_becomes_labelled_curves(evaluated: Evaluate, tmp_path: Path) -> None:
    keys = {key for _, _, _, series in report.CURVES for key in series.values()}
    log = [{"step": step, **dict.fromkeys(keys, 0.1 * step)} for step in (1, 2, 3)]
    log += [{"step": 4, "reward": float("nan")}, {"step": 4, "train_runtime": 9.0}]
    base = evaluated("base", FRANCE)
    training = make_training(tmp_path / "grpo", log)
    _, html = write_report(base, base, tmp_path, training=training)
    for title, axis, _, _ in report.CURVES:
        assert html.count(f'aria-label="{title}: {axis} over optimizer step"') == 1
    assert "nan" not in html.split("<h2>Training")[1].split("<h2>")[0]


def test_a_training_folder_without_a_checkpoint_is_said_so(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    base = evaluated("base", FRANCE)
    (tmp_path / "grpo").mkdir()
    _, html = write_report(base, base, tmp_path, training=tmp_path / "grpo")
    assert "No curves: grpo holds no whole checkpoint" in html


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (-3.2, 7.1), (0.31, 0.32), (0, 5e-4)])
def test_ticks_are_few_and_cover_the_range(low: float, high: float) -> None:
    marks = charts.ticks(low, high)
    assert 2 <= len(marks) <= 8 and marks == sorted(set(marks))
    assert marks[0] <= low + 1e-9 and high - 1e-9 <= marks[-1]


def test_a_running_mean_looks_back_only() -> None:
    points = [(1.0, 2.0), (2.0, 4.0), (3.0, 9.0)]
    assert charts.running_mean(points, 2) == [(1.0, 2.0), (2.0, 3.0), (3.0, 6.5)]


def test_a_log_of_one_step_draws() -> None:
    drawn = charts.chart("t", ("x", "y"), {"line": [(5.0, 0.0)]})
    assert all(0 <= value <= 100 for point in drawn["lines"]["line"] for value in point)


# --- All arms


def answer(
    identifier: str, truth: tuple[str, float, float], text: str, sample: int = 0
) -> Prediction:
    code, latitude, longitude = truth
    completion = Completion(text, len(text.split()), "stop")
    return make_prediction(identifier, sample, latitude, longitude, code, completion)


def section(page: str, title: str) -> str:
    """The part of a page under one heading."""
    parts = re.split(r"^## |<h2>", page, flags=re.M)
    return next(part for part in parts if part.startswith(title))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def test_the_table_of_all_arms_holds_the_metrics_own_figures(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    half = [*RIGHT[:4], *FRANCE[4:7], "no idea"]
    folders = [evaluated("base", FRANCE), evaluated("rl", RIGHT), evaluated("half", half)]
    md, html = write_report(*folders[:2], tmp_path, more=folders[2:])
    loaded, split = runs.load_runs(folders)
    lines = section(md, "All arms").strip().splitlines()[-3:]
    for run, line in zip(loaded, lines, strict=True):
        name, score, interval, change, around, verdict, country, median, share = cells(line)
        stored = run.stored
        assert (name, score) == (run.name, report.number(stored["mean_geoscore"], "score"))
        low, high = stored["intervals"]["mean_geoscore"]
        assert interval == f"{report.number(low, 'score')} to {report.number(high, 'score')}"
        assert country == report.number(stored["country_acc"], "share")
        assert median == report.number(stored["median_km"], "km")
        assert share == report.number(stored["format_rate"], "share")
        if run is loaded[0]:
            assert (change, around, verdict) == ("–", "–", "the base")
            continue
        pair = report_tables.compare(loaded[0], run, split.country_share)["mean_geoscore"]
        assert change == report.number(pair.difference, "score", signed=True)
        ends = [report.number(end, "score", signed=True) for end in (pair.low, pair.high)]
        assert around == " to ".join(ends)
        assert verdict == pair.verdict.partition(" at n")[0]
    assert all(f"<th>{run.name}</th>" in html for run in loaded)


def test_a_further_arm_changes_no_verdict_and_no_figure_of_the_two(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    folders = evaluated("base", FRANCE), evaluated("rl", [*RIGHT[:5], *FRANCE[5:]])
    alone, _ = write_report(*folders, tmp_path / "1")
    more, _ = write_report(*folders, tmp_path / "2", more=[evaluated("third", RIGHT)])
    for title in ("Before and after", "Two means"):
        start = section(alone, title).split("### Held")[0]
        assert section(more, title).startswith(start)
    assert section(alone, "All arms").strip() in section(more, "All arms")


def test_a_further_arm_that_is_not_comparable_is_refused(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    folders = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    with pytest.raises(UserError, match="sampling"):
        report.run(*folders, [evaluated("warm", RIGHT, **TEMPERED)], output_dir=tmp_path)


def test_both_means_stand_side_by_side_with_what_they_may_be_held_against(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    md, html = write_report(evaluated("base", FRANCE), evaluated("rl", RIGHT), tmp_path)
    (base, _), split = runs.load_runs([tmp_path / "eval/base/eval_osv"] * 2)
    plain, weighted = (
        cells(line)[1] for line in section(md, "Two means").splitlines() if "5,000 (" in line
    )
    shares = [split.country_share[row.country_iso2] for row in base.rows]
    mean = np.average([row.geoscore for row in base.rows], weights=shares)
    assert weighted.startswith(f"{report.number(float(mean), 'score')} (")
    assert plain.startswith(report.number(base.stored["mean_geoscore"], "score"))
    assert plain != weighted
    metric = eval_metrics.weighted_geoscore(base.rows, split.country_share)
    assert metric is not None
    own = bootstrap.interval_of_mean([metric.value(row) or 0.0 for row in base.rows])
    assert weighted.endswith(f"({report_tables.interval_text(own, 'score')})")
    for page in (md, html):
        assert "with nothing published" in page
        assert "comparable with GeoScores published on the full test set" in page


def test_without_shares_of_countries_there_is_no_weighted_mean(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    make_split(tmp_path / "data", shares=False)
    pages_ = write_report(evaluated("base", FRANCE), evaluated("rl", RIGHT), tmp_path)
    for page in pages_:
        assert "so there is no weighted mean" in page and "Best OSV-5M" not in page


def test_every_arm_stands_among_the_published_numbers_in_order(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    folders = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    md, _ = write_report(*folders, tmp_path, more=[evaluated("third", RIGHT[:1] * 8)])
    lines = md.split("### Held")[1].split("##")[0].splitlines()
    rungs = [cells(line) for line in lines if re.search(r"\d \|$", line)]
    scores = [int(rung[1].replace(",", "")) for rung in rungs]
    assert scores == sorted(scores) and len(scores) == len(report_tables.PUBLISHED) + 3
    assert [rung[0] for rung in rungs if "*" in rung[0]] == [
        "**base (before)**", "**third**", "**rl (after)**",
    ]  # fmt: skip


def test_the_adjusted_p_stands_beside_each_verdict(evaluated: Evaluate, tmp_path: Path) -> None:
    folders = [evaluated("base", FRANCE), evaluated("rl", RIGHT)]
    md, html = write_report(*folders, tmp_path)
    (base, tuned), split = runs.load_runs(folders)
    found = report_tables.compare(base, tuned, split.country_share)
    rows = [cells(line) for line in section(md, "Before and after").splitlines() if " / " in line]
    by_label = {row[0]: row[5] for row in rows}
    labels = {m: label for *_, group in tables.TABLE for m, label in group.items()}
    for metric, pair in found.items():
        assert by_label[labels[metric]] == report_tables.p_value(pair.p)
    assert len({*by_label.values()}) > 2
    for page in (md, html):
        assert "adjusted for the family of all metrics in this table" in page
        assert "and intervals are not" in page


def test_a_p_value_is_never_written_as_none() -> None:
    assert [report_tables.p_value(p) for p in (0.0002, 0.001, 0.0426, 1.0)] == [
        "< 0.001", "0.001", "0.043", "1.000",
    ]  # fmt: skip


# --- The collapse alarm


def test_naming_one_country_far_too_often_raises_the_alarm_for_either_run(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    france, right = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    sentence = "names France in 100.0 % of its answers; that is true of 12.5 % of the photos."
    for runs_, name, side in (
        ((france, right), "base", "before"),
        ((right, france), "base", "after"),
    ):
        for page in write_report(*runs_, tmp_path):
            assert f"Collapse alarm: {name} ({side}) {sentence}" in page
            assert page.count("Collapse alarm: ") == 1
    _, html = write_report(france, right, tmp_path)
    assert "Collapse alarm" in html.split("</header>")[0].split("<header>")[1]
    for page in write_report(right, right, tmp_path):
        assert "Collapse alarm: " not in page and "neither run does" in page


def of_countries(true: str, named: str, n: int) -> list[Prediction]:
    """`n` photos of one country that are said to be of another."""
    text = format_completion(named, 1.0, 1.0, style="direct")
    return [answer(f"{true}{named}{i}", (true, 0.0, 0.0), text) for i in range(n)]


@pytest.mark.parametrize(
    ("rows", "alarm"),
    [
        (of_countries("FR", "Germany", 26) + of_countries("FR", "France", 74), True),
        (of_countries("FR", "Germany", 25) + of_countries("FR", "France", 75), False),  # not over
        (of_countries("DE", "Germany", 10) + of_countries("FR", "Germany", 20)
         + of_countries("FR", "", 70), True),  # 30 %, three times the truth
        (of_countries("DE", "Germany", 11) + of_countries("FR", "Germany", 20)
         + of_countries("FR", "", 69), False),  # 31 %, less than three times
        (of_countries("FR", "", 50), False),  # nobody is named
    ],
)  # fmt: skip
def test_the_alarm_needs_a_quarter_of_the_answers_and_three_times_the_truth(
    rows: list[Prediction], alarm: bool
) -> None:
    run = runs.Run("x", Path(), {}, {}, {}, rows)
    assert (report.collapse(run) is not None) == alarm


# --- The map of guesses


def sphere(points: Sequence[tuple[float, float]]) -> np.ndarray:
    longitude, latitude = zip(*points, strict=True)
    return data.unit_vectors(np.array(latitude), np.array(longitude))


WAYS = [
    ((48.9, 2.4), (35.7, 139.7)), ((10.0, 170.0), (20.0, -150.0)), ((-33.9, 151.2), (39.7, -105.0)),
    ((50.0, 10.0), (60.0, -170.0)), ((0.0, 0.0), (0.0, 180.0)), ((10.0, 20.0), (-10.0, -160.0)),
    ((5.0, 180.0), (5.0, -170.0)), ((5.0, -180.0), (-40.0, 170.0)), ((0.0, 0.0), (0.1, 0.1)),
    ((90.0, 0.0), (-90.0, 0.0)),
]  # fmt: skip


@pytest.mark.parametrize(("start", "end"), WAYS)
def test_lines_follow_the_great_circle(
    start: tuple[float, float], end: tuple[float, float]
) -> None:
    lines = report_figures.great_circle(start, end)
    points = sphere([point for line in lines for point in line])
    a, b = sphere([start[::-1], end[::-1]])
    assert np.allclose([points[0], points[-1]], [a, b], atol=1e-9)
    km = haversine_km(*start, *end)
    if km < 0.999 * math.pi * EARTH_RADIUS_KM:  # opposite points span no one plane
        normal = np.cross(a, b) / np.linalg.norm(np.cross(a, b))
        assert np.abs(points @ normal).max() < 1e-9
    angles = np.arccos(np.clip((points[1:] * points[:-1]).sum(axis=1), -1, 1))
    assert EARTH_RADIUS_KM * angles.sum() == pytest.approx(km, abs=0.5)
    assert np.degrees(angles.max()) <= report_figures.STEP_DEGREES + 1e-6


@pytest.mark.parametrize(("start", "end"), WAYS)
def test_no_line_crosses_the_antimeridian(
    start: tuple[float, float], end: tuple[float, float]
) -> None:
    lines = report_figures.great_circle(start, end)
    for line in lines:
        longitudes = [x for x, _ in line]
        assert min(longitudes) >= -180 and max(longitudes) <= 180
        for (x0, y0), (x1, _) in pairwise(line):
            assert abs(x1 - x0) <= 180 or abs(y0) > 89
    for before, after in pairwise(lines):
        assert before[-1][0] == -after[0][0] and abs(after[0][0]) == 180
        assert before[-1][1] == after[0][1]


def test_a_way_over_the_pacific_is_cut_in_two_where_it_meets_the_edge() -> None:
    west, east = report_figures.great_circle((0.0, 170.0), (0.0, -170.0))
    assert west[-1] == pytest.approx((180, 0)) and east[0] == pytest.approx((-180, 0))
    assert len(report_figures.great_circle((0.0, 10.0), (0.0, 30.0))) == 1


def test_equal_points_make_a_line_of_no_length() -> None:
    (line,) = report_figures.great_circle((5.0, 7.0), (5.0, 7.0))
    assert np.allclose(line, (7.0, 5.0))


def guesses(n: int, spread: float = 40.0, k: int = 1, seed: int = 0) -> list[Prediction]:
    """`n` photos with `k` answers each, from near to far; one in ten photos gets no answer."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        code, country, latitude, longitude = PLACES[i % len(PLACES)]
        off = rng.random() * spread
        for sample in range(k):
            north, east = rng.gauss(0, off) / 4, rng.gauss(0, off)
            place = (max(-89.0, min(89.0, latitude + north)), (longitude + east + 180) % 360 - 180)
            text = format_completion(country, *place, style="direct") if i % 10 else "no idea"
            rows.append(answer(f"photo{i}", (code, latitude, longitude), text, sample))
    return rows


def test_the_map_counts_every_photo_in_one_band() -> None:
    rows = guesses(100)
    drawn = report_figures.guess_map(rows)
    counts = {band["name"]: band["count"] for band in drawn["bands"]}
    d_km = [row.d_km for row in rows if row.d_km is not None]
    assert counts == {
        "near": sum(km < 750 for km in d_km),
        "mid": sum(750 <= km < 2500 for km in d_km),
        "far": sum(km >= 2500 for km in d_km),
    }
    assert min(counts.values()) > 0
    assert (drawn["drawn"], drawn["placed"], drawn["none"]) == (90, 90, 10)
    bands = [report_figures.band_of(km) for km in (0, 749.9, 750, 2499.9, 2500, math.inf)]
    assert bands == ["near", "near", "mid", "mid", "far", "far"]
    assert drawn["below"] == 0
    pole = answer("pole", ("AQ", -82.0, 0.0), RIGHT[0])
    assert report_figures.guess_map([pole])["below"] == 1
    for band in drawn["bands"]:
        assert band["truths"].count("M") == band["guesses"].count("M") == counts[band["name"]]


def test_of_many_photos_the_map_draws_the_same_sample_in_any_order() -> None:
    rows = guesses(1000)
    drawn = report_figures.guess_map(rows)
    assert (drawn["drawn"], drawn["placed"]) == (report_figures.MAPPED, 900)
    assert report_figures.guess_map(rows[::-1]) == drawn
    other = [row for row in guesses(1000, spread=5.0)]  # another run over the same photos
    marks = [
        {
            mark
            for band in report_figures.guess_map(run)["bands"]
            for mark in band["truths"].split("M")
        }
        for run in (rows, other)
    ]
    assert marks[0] == marks[1]
    assert sum(len(band["lines"]) for band in drawn["bands"]) < 60_000


def test_the_page_says_that_a_sample_is_drawn(
    evaluated: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = evaluated("base", FRANCE), evaluated("rl", [*RIGHT[:7], "no idea"])
    _, html = write_report(*folders, tmp_path)
    part = section(html, "Where rl")
    assert "Every photo with a guess is drawn" in part and "no place: 1" in part
    assert part.count("M704.3 38.7h0") == 0 and part.count('class="way near"') == 2
    monkeypatch.setattr(report_figures, "MAPPED", 3)
    monkeypatch.setattr(report, "MAPPED", 3)
    _, html = write_report(*folders, tmp_path)
    assert "a fixed sample of 3 of the 7 photos with a guess" in html


def test_the_land_lies_under_both_maps(evaluated: Evaluate, tmp_path: Path) -> None:
    _, html = write_report(evaluated("base", FRANCE), evaluated("rl", RIGHT), tmp_path)
    assert html.count('<path class="land" d="M') == 2


# --- Confusions


def test_confusions_are_counted_with_other_countries_and_no_answer() -> None:
    rows = [
        *of_countries("FR", "France", 3), *of_countries("FR", "Germany", 2),
        *of_countries("DE", "France", 1), *of_countries("DE", "Atlantis", 1),
        *of_countries("DE", "Japan", 1), *of_countries("DE", "", 2),
        *of_countries("IT", "Italy", 1),
    ]  # fmt: skip
    found = report_figures.confusion(rows)
    assert found["codes"] == ["FR", "DE", "IT"] and found["of"] == 3
    counts = {row["code"]: [count for count, _ in row["cells"]] for row in found["rows"]}
    assert counts == {"FR": [3, 2, 0, 0, 0], "DE": [1, 0, 0, 2, 2], "IT": [0, 0, 1, 0, 0]}
    for row in found["rows"]:
        assert sum(count for count, _ in row["cells"]) == row["n"]
        assert sum(share for _, share in row["cells"]) == pytest.approx(1)


def test_the_twenty_most_frequent_countries_stand_and_ties_go_by_how_often_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_figures, "CONFUSED", 2)
    rows = [
        *of_countries("AT", "Austria", 1), *of_countries("BE", "Chile", 1),
        *of_countries("CL", "Chile", 1), *of_countries("DE", "Chile", 2),
    ]  # fmt: skip
    found = report_figures.confusion(rows)
    assert found["codes"] == ["DE", "CL"] and found["of"] == 4


def test_the_confusions_stand_in_both_pages(evaluated: Evaluate, tmp_path: Path) -> None:
    wrong = [*RIGHT[:6], RIGHT[5], "no idea"]
    md, html = write_report(evaluated("base", FRANCE), evaluated("rl", wrong), tmp_path)
    table = section(md, "Which countries rl confuses")
    columns = cells(next(line for line in table.splitlines() if line.startswith("| True")))
    row = dict(zip(columns, cells(re.search(r"^\| United States .*", table, re.M)[0]), strict=True))  # type: ignore[index]
    assert {key: value for key, value in row.items() if value} == {
        "True country": "United States (US, 1)", "KE": "1",
    }  # fmt: skip
    assert re.search(r"^\| Australia \(AU, 1\).*\| 1 \|$", table, re.M)
    assert html.count('<td class="right') == len(PLACES)


# --- Agreement of K answers


def test_the_rank_correlation_is_spearmans_with_ties() -> None:
    rows = guesses(40, k=4)
    found = uncertainty.agreement(rows, resamples=200)
    assert found.left_out == 4 and len(found.spread) == 36
    assert found.correlation == pytest.approx(spearmanr(found.spread, found.error).statistic)
    tied = [row for row in rows if int(row.id[5:]) % 3]
    tied += [answer(f"tied{i}", ("FR", 48.86, 2.35), RIGHT[0], k) for i in range(5) for k in (0, 1)]
    found = uncertainty.agreement(tied, resamples=200)
    assert found.spread.count(0.0) == 5
    assert found.correlation == pytest.approx(spearmanr(found.spread, found.error).statistic)


def test_spread_and_error_are_those_of_the_answers() -> None:
    rows = guesses(20, k=3)
    found = uncertainty.agreement(rows, resamples=50)
    photos = [samples for _, samples in sorted(eval_metrics.by_photo(rows).items())]
    placed = [photo for photo in photos if photo[0].pred_latitude is not None]
    for photo, spread, error in zip(placed, found.spread, found.error, strict=True):
        pairs = [
            haversine_km(a.pred_latitude, a.pred_longitude, b.pred_latitude, b.pred_longitude)  # type: ignore[arg-type]
            for a, b in ((photo[0], photo[1]), (photo[0], photo[2]), (photo[1], photo[2]))
        ]
        assert spread == pytest.approx(sorted(pairs)[1])
        assert error == consensus(photo).d_km


def test_weighted_ranks_are_those_of_the_drawn_values() -> None:
    rng = np.random.default_rng(0)
    values = np.array([3.0, 1.0, 2.0, 2.0, math.inf, 1.0])
    weights = rng.multinomial(6, np.full(6, 1 / 6), size=50).astype(float)
    ranks = uncertainty._midranks(values, weights)
    for weight, rank in zip(weights, ranks, strict=True):
        drawn = np.repeat(np.arange(6), weight.astype(int))
        assert np.allclose(rank[drawn], rankdata(values[drawn]))


def test_the_interval_and_the_shuffles_are_what_theory_says() -> None:
    rows = guesses(120, k=4)
    found = uncertainty.agreement(rows, resamples=4000)
    n, rho = len(found.spread), found.correlation
    assert found.interval is not None and found.shuffled is not None and rho is not None
    half = 1.96 / math.sqrt(n - 1)
    assert found.shuffled == pytest.approx((-half, half), abs=0.02)
    z = 1.96 * math.sqrt((1 + rho**2 / 2) / (n - 3))  # Bonett and Wright (2000)
    expected = (math.tanh(math.atanh(rho) - z), math.tanh(math.atanh(rho) + z))
    assert found.interval == pytest.approx(expected, abs=0.04)
    assert found == uncertainty.agreement(rows, resamples=4000)


def test_too_few_photos_or_no_variation_give_no_correlation() -> None:
    few = [row for row in guesses(6, k=2) if row.pred_country]
    equal = [answer(f"e{i}", ("FR", 48.86, 2.35), RIGHT[0], k) for i in range(9) for k in (0, 1)]
    for rows in (few, equal):
        found = uncertainty.agreement(rows, resamples=50)
        assert (found.correlation, found.interval, found.shuffled) == (None, None, None)


def sampled(seed: int, off: float) -> list[str | list[str]]:
    """Two answers a place, of which later places are farther off and farther apart."""
    rng = random.Random(seed)
    return [
        [
            format_completion(
                name, lat + rng.gauss(0, off * (i + 1)), lon + rng.gauss(0, off), style="direct"
            )
            for _ in range(3)
        ]
        for i, (_, name, lat, lon) in enumerate(PLACES)
    ]


def test_k_answers_give_the_agreement_and_three_columns(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    folders = [
        evaluated(name, sampled(seed, off), samples=3, **TEMPERED)
        for name, seed, off in (("base", 1, 4.0), ("rl", 2, 1.0))
    ]
    md, html = write_report(*folders, tmp_path)
    loaded, _ = runs.load_runs(folders)
    lines = section(md, "Does agreement").splitlines()
    for run, side in zip(loaded, ("before", "after"), strict=True):
        found = uncertainty.agreement(run.rows)
        row = next(cells(line) for line in lines if line.startswith(f"| {side} "))
        assert row[1] == report_tables.correlation(found.correlation)
        assert row[2] == report_tables.correlations(found.interval)
        assert row[3] == report_tables.correlations(found.shuffled) and row[6] == "8"
        figures = [
            run.stored["of_k"][kind][key]
            for key in ("mean_geoscore", "country_acc")
            for kind in ("mean", "best", "consensus")
        ]
        texts = cells(
            next(
                line for line in md.split("### What 3")[1].splitlines() if f"| {run.name} |" in line
            )
        )
        for figure, text, unit in zip(
            figures, texts[1:], ["score"] * 3 + ["share"] * 3, strict=True
        ):
            value, interval = (
                report.number(figure["value"], unit),
                report_tables.interval_text(figure["interval"], unit),
            )  # fmt: skip
            assert text == f"{value} ({interval})"
    dots = re.search(r'<path class="dots" d="([^"]*)"', html)
    assert dots is not None and dots[1].count("M") == 8
    assert "no spread to look at" not in md + html


def test_one_answer_a_photo_says_how_to_get_the_agreement(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    for page in write_report(evaluated("base", FRANCE), evaluated("rl", RIGHT), tmp_path):
        part = section(page, "Does agreement")
        assert "no spread to look at" in part and "--samples 4" in part
        assert "<svg" not in part and "What 1 answer" not in page


def test_the_verdict_on_the_spread_needs_both_intervals() -> None:
    def verdict(rho: float | None, low: float, above: float) -> str:
        ends = None if rho is None else ((low, 0.9), (-above, above))
        return report_tables._predicts(
            uncertainty.Agreement([], [], 0, rho, *(ends or (None, None)))
        )

    assert verdict(0.5, 0.2, 0.3) == "predicts the error"
    assert verdict(0.25, 0.1, 0.3) == "tells no more than chance"  # as a shuffle may give
    assert verdict(0.5, -0.1, 0.3) == "tells no more than chance"
    assert verdict(None, 0, 0) == "has too few photos to tell"


def test_the_scatter_is_logarithmic_and_holds_every_point() -> None:
    drawn = report_figures.log_scatter([(0.0, 1.0), (20_000.0, 30_000.0), (math.sqrt(2e4), 1.0)])
    assert drawn["points"] == [(0.0, 100.0), (100.0, 0.0), (50.0, 100.0)]


# --- Clues


def test_a_card_quotes_the_clues_and_cuts_them_at_a_word() -> None:
    assert report.clues("<think> red\n soil </think><answer>{}</answer>") == "red soil"
    assert (
        report.clues("red soil</think><answer>{}</answer>") == "red soil"
    )  # the template opened it
    assert report.clues("<answer>{}</answer>") == ""
    long = report.clues("<think>" + "poles " * 100 + "</think>", report.CLUES)
    assert long.endswith("poles …") and len(long) <= report.CLUES + 2


def test_clues_stand_on_the_card_as_text(evaluated: Evaluate, tmp_path: Path) -> None:
    written = [f"<think>{HOSTILE}soil</think>{text}" for text in FRANCE]
    _, html = write_report(evaluated("base", written), evaluated("rl", RIGHT), tmp_path)
    page = Elements(html)
    assert html.count('class="quiet clues"') == 5 and not {"script", "a"} & set(page.tags)


# --- Checkpoints


def make_checkpoints(folder: Path, **changes: Any) -> dict[str, Any]:
    points = [
        {
            "step": step, "mean_geoscore": score, "low": score - 100, "high": score + 150,
            "country_acc": 0.3, "format_rate": 0.9, "zero_share": 0.1, "tokens_p50": 60,
        }
        for step, score in ((0, 1000.0), (50, 1500.0), (100, 1600.0))
    ]  # fmt: skip
    record = {"split": "eval_quick", "photos": 100, "plateau_step": 50, "points": points, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / artifacts.CHECKPOINTS).write_text(json.dumps(record))
    return record


def test_checkpoints_become_a_curve_with_its_band_and_the_plateau(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    base = evaluated("base", FRANCE)
    make_checkpoints(tmp_path / "grpo")
    drawn = report.checkpoint_curves(tmp_path / "grpo")
    assert drawn is not None
    score, shares, tokens = drawn["charts"]
    # The axis reaches from 800 to 1800: 1000 lies 20 % up, its band from 10 to 35 %.
    assert score["lines"]["GeoScore"][0] == (0.0, 80.0) and score["mark"] == 50.0
    assert score["band"][0] == (0.0, 65.0) and score["band"][-1] == (0.0, 90.0)
    assert shares["lines"]["asked format"][0] == (0.0, 10.0) and tokens["y_ticks"][0][1] == "0"
    md, html = write_report(base, base, tmp_path, training=tmp_path / "grpo")
    assert "| 50 | 1,500 | 1,400 to 1,650 | 30.0 | 90.0 | 10.0 | 60 |" in md
    for page in (md, html):
        assert "Plateau at step 50" in page and "saved 50 of 100 steps" in page
    assert html.count('<polygon class="band"') == 1 and ">plateau</text>" in html
    make_checkpoints(tmp_path / "grpo", plateau_step=100)
    md, _ = write_report(base, base, tmp_path, training=tmp_path / "grpo")
    assert "No plateau" in md


def test_a_damaged_record_of_checkpoints_is_one_sentence(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    base = evaluated("base", FRANCE)
    make_checkpoints(tmp_path / "grpo", points=[{"step": 1}])
    with pytest.raises(UserError, match=r"checkpoints\.json is damaged .*; run scripts/eval_check"):
        report.run(base, base, output_dir=tmp_path / "out", training=tmp_path / "grpo")
    assert not (tmp_path / "out").exists()


def test_without_checkpoints_nothing_is_said_of_them(evaluated: Evaluate, tmp_path: Path) -> None:
    base = evaluated("base", FRANCE)
    (tmp_path / "grpo").mkdir()
    for page in write_report(base, base, tmp_path, training=tmp_path / "grpo"):
        assert "plateau" not in page.split("</style>")[-1] and "## Checkpoints" not in page


# --- How to reproduce


def test_the_printed_commands_make_the_same_predictions(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    options = {"samples": 2, "prompt": {"style": "direct"}, "generation": {"temperature": 0.7}}
    base, tuned = evaluated("base", FRANCE, **options), evaluated("rl", RIGHT, **options)
    md, _ = write_report(base, tuned, tmp_path / "out")
    commands = re.findall(r"^    (python scripts/.*)$", section(md, "How to reproduce"), re.M)
    assert len(commands) == 3
    for command in commands:
        _, script, *arguments = shlex.split(command)
        done = [sys.executable, str(ROOT / script), *arguments]
        subprocess.run(done, check=True, capture_output=True, cwd=tmp_path)
    for folder in (base, tuned):
        again = tmp_path / "outputs" / folder.relative_to(tmp_path) / artifacts.PREDICTIONS
        assert again.read_bytes() == (folder / artifacts.PREDICTIONS).read_bytes()
    assert (tmp_path / "outputs/report.md").read_text() == md


def test_the_defaults_are_what_the_shipped_config_says() -> None:
    assert config.load(EvalConfig, ROOT / "configs/eval.yaml") == EvalConfig()


def test_a_models_command_names_its_adapter_without_a_path(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    (run, _), _ = runs.load_runs([evaluated("base", FRANCE)] * 2)
    generation = EvalConfig().generation.model_dump(mode="json") | {"temperature": 0.5}
    settings = EvalConfig().model_dump(mode="json") | {
        "model": {"name": str(tmp_path / "tiny model"), "dtype": "float32"},
        "lora": str(tmp_path / "grpo/checkpoint-9"),
        "generation": generation,
        "data_dir": str(tmp_path),
        "allow_base_mismatch": True,
        "limit": 7,
    }
    local = replace(run, config=settings, identity={**run.identity, "model_files": "abc"})
    assert reproduce.evaluation_command(local) == (
        "python scripts/run_eval.py --run_name base --split eval_osv --backend vllm "
        "--model 'tiny model' --lora checkpoint-9 --limit 7 --set model.dtype=float32 "
        "--set generation.temperature=0.5 --allow_base_mismatch"
    )
    hub = replace(run, config=EvalConfig().model_dump(mode="json"), identity={})
    assert "--model Qwen/Qwen3-VL-4B-Instruct" in reproduce.evaluation_command(hub)


def test_versions_and_hashes_are_those_of_the_runs(evaluated: Evaluate, tmp_path: Path) -> None:
    folders = [evaluated("base", FRANCE), evaluated("rl", RIGHT)]
    pages_ = write_report(*folders, tmp_path)
    header = artifacts.read_header(folders[0] / artifacts.PREDICTIONS)
    assert header is not None
    for page in map(html_text.unescape, pages_):
        for folder in folders:
            assert artifacts.file_sha256(folder / artifacts.PREDICTIONS)[:16] in page
        for name, number in header["versions"].items():
            assert name in page and number in page
        assert header["split_fingerprint"] in page and header["model_files"] in page


def test_no_page_names_a_path_of_this_machine(evaluated: Evaluate, tmp_path: Path) -> None:
    training = make_training(tmp_path / "grpo", [{"step": 1, "reward": 0.5}])
    make_checkpoints(training)
    folders = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    for page in write_report(*folders, tmp_path, training=training, more=[folders[0]]):
        assert str(tmp_path) not in page


# --- In a browser

MEASURE = """
const close = (a, b) => a <= b + 1.5;
function measure(frame, width) {
  const page = frame.contentDocument, faults = [];
  const root = page.documentElement;
  if (!close(root.scrollWidth, width)) faults.push("page is " + root.scrollWidth + " wide");
  for (const e of page.body.querySelectorAll("*")) {
    const box = e.getBoundingClientRect();
    const inner = e.closest("svg") && e.tagName !== "svg" && e.tagName !== "text";
    if (inner || e.closest(".box table") || !box.width) continue;
    const scrolls = e.closest("svg") || e.matches(".box, pre");
    if (e.clientWidth && !scrolls && !close(e.scrollWidth, e.clientWidth))
      faults.push("spills: " + e.tagName + " " + e.textContent.trim().slice(0, 40));
    if (!close(box.right, width) || !close(0, box.left))
      faults.push([e.tagName, e.getAttribute("class"), box.left + ".." + box.right].join(" "));
  }
  for (const e of page.querySelectorAll("img"))
    if (!e.complete || !e.naturalWidth || !e.width) faults.push("img " + e.alt);
  const svgs = [...page.querySelectorAll("svg")];
  for (const svg of svgs) {
    const box = svg.getBoundingClientRect();
    if (!box.width || !box.height) faults.push("svg " + svg.getAttribute("aria-label"));
    const texts = [...svg.querySelectorAll("text")]
      .map((t) => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([name, t], i) => {
      const across = close(box.left, t.left) && close(t.right, box.right);
      if (!across || !close(box.top, t.top) || !close(t.bottom, box.bottom))
        faults.push("cut: " + name);
      for (const [other, o] of texts.slice(i + 1))
        if (t.left < o.right && o.left < t.right && t.top < o.bottom - 2 && o.top < t.bottom - 2)
          faults.push("overlap: " + name + ", " + other);
    });
  }
  return {width, faults, images: page.images.length, svgs: svgs.length,
          height: root.scrollHeight, scripts: page.scripts.length};
}
addEventListener("load", () => {
  const frames = [...document.querySelectorAll("iframe")];
  document.querySelector("pre").textContent =
    JSON.stringify(frames.map((frame) => measure(frame, frame.clientWidth)));
});
"""


def in_browser(page: str, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Opens a page 1280, 768 and 400 pixels wide; returns what was measured and its messages.

    It stands in frames, so that it is left as it is and the script is outside of it. There is no
    network.
    """
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html_text.escape(page)}">'
        "</iframe>"
        for width in (1280, 768, 400)
    )
    outer = folder / "outer.html"
    outer.write_text(f"<!doctype html>{frames}<pre></pre><script>{MEASURE}</script>")
    command = [
        require_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,1000", "--virtual-time-budget=20000", "--dump-dom", outer.as_uri(),
    ]  # fmt: skip
    env = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    found = re.search(r"<pre>(\[.*?\])</pre>\s*<script>", done.stdout, re.S)
    assert found, done.stderr[-2000:]
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html_text.unescape(found[1])), messages


def full_report(evaluated: Evaluate, folder: Path) -> str:
    """A page with every section: K answers, three runs, an alarm, curves and checkpoints."""
    keys = {key for _, _, _, series in report.CURVES for key in series.values()}
    log = [{"step": step, **dict.fromkeys(keys, 0.1 * step)} for step in range(1, 8)]
    training = make_training(folder / "grpo", log)
    make_checkpoints(training)
    options = {"samples": 3, **TEMPERED}
    arms = [
        evaluated("base", [f"<think>{'Red soil. ' * 50}</think>{FRANCE[0]}"] * 8, **options),
        evaluated("a-run-with-quite-a-long-name", sampled(1, 9.0), **options),
        evaluated("third", ["no idea"] * 8, **options),
    ]
    _, html = write_report(*arms[:2], folder, more=arms[2:], training=training)
    return html


def test_a_browser_draws_the_page_whole_at_every_width(evaluated: Evaluate, tmp_path: Path) -> None:
    measured, messages = in_browser(full_report(evaluated, tmp_path), tmp_path)
    assert not messages
    assert [one["width"] for one in measured] == [1280, 768, 400]
    for one in measured:
        assert not one["faults"], one
        assert one["images"] == 8 and one["svgs"] > 15 and not one["scripts"]
    assert measured[2]["height"] > measured[0]["height"] > 5000


def test_the_browser_test_sees_what_it_looks_for(tmp_path: Path) -> None:
    page = """<!doctype html>
    <meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'">
    <body style="margin:0"><p style="width:1300px">wide</p>
    <h2 style="width:20px">spilling</h2>
    <img alt="gone" src="https://evil.example">
    <svg viewBox="0 0 10 10" width="90">
    <text x="-5" y="5">cut</text><text x="-4" y="5">x</text></svg>"""
    measured, messages = in_browser(page, tmp_path)
    faults = " ".join(measured[0]["faults"])
    assert re.search(
        r"page is 1300.*P  0\.\.1300.*spills: H2 spilling.*img gone.*cut: cut.*overlap: cut, x",
        faults,
    )
    assert any("violates" in line for line in messages)


# --- Files and the command


def test_the_same_runs_give_the_same_bytes(evaluated: Evaluate, tmp_path: Path) -> None:
    folders = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    assert write_report(*folders, tmp_path / "1") == write_report(*folders, tmp_path / "2")


def test_the_command_prints_four_lines_and_a_mistake_is_one_sentence(
    evaluated: Evaluate, tmp_path: Path
) -> None:
    script = Path(report.__file__).parents[2] / "scripts/write_report.py"
    base, tuned = evaluated("base", FRANCE), evaluated("rl", RIGHT)

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, str(script), *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)

    done = command(base, tuned)
    assert done.returncode == 0 and done.stdout.count("\n") == 4
    assert done.stdout.endswith(": better\nreport: outputs/report.html\n")
    assert (tmp_path / "outputs/report.md").exists()
    wrong = command(base, tmp_path / "none")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ")
    assert wrong.stderr.count("\n") == 1


def test_no_model_library_is_loaded() -> None:
    code = "import sys, geoguessr_rl.phases.report; print({'torch', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
