"""A report that cannot mislead: what it refuses, what it escapes, and what it says."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from geoguessr_rl import artifacts, charts, data, runs
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import EvalConfig
from geoguessr_rl.phases import evaluate, report
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import PHOTO_SCHEMA

PLACES = (
    ("FR", "France", 48.86, 2.35), ("DE", "Germany", 52.52, 13.40), ("IT", "Italy", 41.90, 12.50),
    ("JP", "Japan", 35.68, 139.69), ("BR", "Brazil", -23.55, -46.63), ("KE", "Kenya", -1.29, 36.82),
    ("US", "United States", 39.74, -104.99), ("AU", "Australia", -33.87, 151.21),
)  # fmt: skip
RIGHT = [format_completion(*place[1:], style="direct") for place in PLACES]
FRANCE = [RIGHT[0]] * len(PLACES)
POLICY = {"long_edge": 64, "multiple": 32}
Evaluate = Callable[..., Path]


def make_split(folder: Path, name: str = "eval_osv", shift: float = 0.0) -> None:
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
        source="test",
        country_share={place[0]: share for place, share in zip(PLACES, range(1, 9), strict=True)},
    )
    artifacts.write_json(data.manifest_path(folder, name), manifest)


@pytest.fixture
def evaluated(tmp_path: Path) -> Evaluate:
    """Evaluates given completions on the photos as `run_eval.py` does; returns the run folder."""

    def go(name: str, answers: Sequence[str], split: str = "eval_osv", **options: Any) -> Path:
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
    for _, _, _, metrics in report.TABLE:
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
    base, tuned, split = runs.load_pair(evaluated("base", FRANCE), evaluated("rl", RIGHT))
    found = report.compare(base, tuned, split.country_share)
    for run, figure in ((base, "before"), (tuned, "after")):
        for metric, pair in found.items():
            stored = report._get(run.stored, metric)
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
        assert ("full OSV-5M test set. The two runs" in page) == shown


# --- What it refuses


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("key", runs.COMPARABLE)
def test_runs_that_differ_are_refused_with_both_values(
    evaluated: Evaluate, tmp_path: Path, key: str
) -> None:
    base, tuned = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    edit(tuned / artifacts.IDENTITY, **{key: "other"})
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
        edit(folder / artifacts.IDENTITY, score_version="0")
    with pytest.raises(UserError, match="score_version '0' and this code has"):
        report.run(*folders, output_dir=tmp_path)


def test_an_incomplete_run_is_refused(evaluated: Evaluate, tmp_path: Path) -> None:
    base, tuned = evaluated("base", FRANCE), evaluated("rl", RIGHT)
    path = tuned / artifacts.PREDICTIONS
    path.write_text(path.read_text().replace('"outcome": "answered"', '"outcome": "error"', 1))
    with pytest.raises(UserError, match="incomplete: 1 of its 8 rows are transport errors"):
        report.run(base, tuned, output_dir=tmp_path)
    path.write_text("")
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
    with pytest.raises(UserError, match="holds another eval_osv than the runs were measured on"):
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
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    for name in (*artifacts.CHECKPOINT_FILES, "adapter_model.safetensors"):
        (checkpoint / name).touch()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": log}))
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
    assert "holds no whole checkpoint" in html


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
