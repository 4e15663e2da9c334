"""The data card: counts that add up, pictures that may be shown, a page that is safe to open."""

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from geoguessr_rl import artifacts, data, data_card, embedded
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.records import PHOTO_SCHEMA

PLACES = {
    "FR": (48.86, 2.35), "DE": (52.52, 13.40), "JP": (35.68, 139.69), "BR": (-23.55, -46.63),
    "KE": (-1.29, 36.82),
}  # fmt: skip
NO_ROW = dict.fromkeys(data_card.REASONS, 0)
REPO = {"repo": "osv5m/osv5m", "revision": "4f5a0c2be31d"}
Prepared = Callable[..., Path]


def write_split(
    folder: Path,
    name: str,
    countries: Sequence[str],
    *,
    creator: str | None = "mapper",
    publishable: bool = True,
    dataset: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a split with a small photo a row; returns its part of the summary."""
    rows = []
    for number, code in enumerate(countries):
        path = folder / "images" / f"{name}{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 32), (5 * number % 256, 9 * len(name), 120)).save(path)
        place = {"latitude": PLACES[code][0], "longitude": PLACES[code][1] + 0.01 * number}
        rows.append(
            dict.fromkeys(PHOTO_SCHEMA)
            | {"image_path": f"images/{path.name}", "country_iso2": code, "creator": creator}
            | place
        )
    frame = pl.DataFrame(rows, schema=PHOTO_SCHEMA)
    role: data.Role = "train" if name.startswith("train") else "evaluation"
    manifest = data.build_manifest(
        name,
        role,
        frame,
        {f"{name}{number}": f"hash{number}" for number in range(len(rows))},
        image_policy={"long_edge": 64},
        dataset=REPO if dataset is None else dataset,
        publishable=publishable,
    )
    artifacts.write_parquet(folder / f"{name}.parquet", frame)
    artifacts.write_json(data.manifest_path(folder, name), manifest)
    return {
        "role": role,
        "rows": len(rows),
        "countries": len(set(countries)),
        "fingerprint": manifest["fingerprint"],
        "sizes": {"64x32": len(rows)},
    }


def source(before: Sequence[str], selected: int, **dropped: int) -> dict[str, Any]:
    """A source of the summary whose other rows were not drawn, unless said otherwise."""
    return {
        "csv_rows": len(before),
        "zip_photos": len(before),
        "zip_entries_ignored": {"junk_entry": 1},
        "photos_without_usable_row": 0,
        "labels_repaired": {},
        "countries_before": Counter(before),
        "dropped": NO_ROW | {"not_drawn": len(before) - selected - sum(dropped.values())} | dropped,
        "rows_selected": selected,
        "rejected": {},
    }


TRAIN = ["FR"] * 9 + ["DE"] * 4 + ["JP"] * 2


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    """Writes a prepared folder: train with a cap of 2, evaluation, and what a test adds."""

    def make(**options: Any) -> Path:
        splits = {
            "eval_osv": write_split(tmp_path, "eval_osv", ["BR", "KE", "JP"], **options),
            "train_pool": write_split(
                tmp_path, "train_pool", ["FR", "FR", "DE", "DE", "JP", "JP"], **options
            ),
        }
        summary = {
            "splits": splits,
            "test": source(["BR", "KE", "JP"], 3),
            "train": source(TRAIN, 6, same_sequence=1, burned_in_text=2),
        }
        artifacts.write_json(tmp_path / artifacts.SUMMARY, summary)
        return tmp_path

    return make


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the summary of a prepared folder."""
    path = folder / artifacts.SUMMARY
    summary = json.loads(path.read_text())
    change(summary)
    artifacts.write_json(path, summary)


def page(folder: Path) -> str:
    return data_card.write(folder).read_text(encoding="utf-8")


def text(html: str) -> str:
    """The page's words without its tags."""
    return " ".join(re.sub(r"<[^>]+>", " ", html.split("<body>")[1]).split())


class Elements(HTMLParser):
    """Collects the tags and attribute values of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]


# --- What it says


def test_each_split_stands_with_rows_countries_role_and_fingerprint(prepared: Prepared) -> None:
    folder = prepared()
    words = text(page(folder))
    summary = json.loads((folder / artifacts.SUMMARY).read_text())["splits"]
    assert "6 photos of 3 countries to train on, 3 photos of 3 countries to measure on" in words
    for name, role in (("train_pool", "training"), ("eval_osv", "evaluation")):
        split = summary[name]
        assert (
            f"{name} for {role} {split['rows']} photos {split['countries']} countries "
            f"fingerprint {split['fingerprint']}" in words
        )


def test_the_data_set_and_its_revision_are_named(prepared: Prepared) -> None:
    assert "train_pool osv5m/osv5m 4f5a0c2be31d" in text(page(prepared()))


@pytest.mark.parametrize("dataset", [{}, {"repo": None, "revision": None}])
def test_a_local_folder_is_called_one(prepared: Prepared, dataset: dict[str, Any]) -> None:
    assert "train_pool a local folder" in text(page(prepared(dataset=dataset)))


def test_every_row_of_a_table_is_accounted_for_in_words(prepared: Prepared) -> None:
    words = text(page(prepared()))
    assert "of one sequence with an evaluation photo 1 6.7 %" in words
    assert "burned-in text that gives the place away 2 13.3 %" in words
    assert "selected for train_pool 6 40.0 % all rows 15 100 %" in words
    shown = re.search(r"Rows of the train table(.*?)all rows", words)
    counts = re.findall(r" (\d+) [\d.]+ %", shown.group(1))  # type: ignore[union-attr]
    assert sum(map(int, counts)) == 15


def test_counts_that_do_not_add_up_are_refused_and_nothing_is_written(prepared: Prepared) -> None:
    folder = prepared()
    edit(folder, lambda summary: summary["train"].update(csv_rows=16))
    with pytest.raises(UserError, match=r"6 selected and 9 dropped rows of train are not its 16"):
        data_card.write(folder)
    assert not (folder / data_card.PAGE).exists()


def test_an_unknown_reason_is_shown_by_its_name(prepared: Prepared) -> None:
    folder = prepared()
    dropped = {"eaten_by_a_goat": 9}
    edit(folder, lambda summary: summary["train"].update(dropped=dropped))
    assert "eaten by a goat 9 60.0 %" in text(page(folder))


def test_rejected_photos_are_listed_up_to_a_limit(prepared: Prepared) -> None:
    folder = prepared()
    rejected = {f"{number:03d}": f"damaged: at {number}" for number in range(40)}
    edit(folder, lambda summary: summary["train"].update(rejected=rejected))
    words = text(page(folder))
    assert "029 damaged: at 29 and 10 more" in words and "030 damaged" not in words


def test_the_countries_before_and_after_stand_side_by_side(prepared: Prepared) -> None:
    words = text(page(prepared()))
    assert "France 9 2 Germany 4 2 Japan 2 2" in words
    assert "France held 60.0 % of the usable photos at hand" in words
    assert (
        "no country holds more than 33.3 % of train_pool, 2 photos. 2 countries had more" in words
    )


def test_a_country_that_lost_every_photo_is_named(prepared: Prepared) -> None:
    folder = prepared()
    edit(folder, lambda summary: summary["train"]["countries_before"].update(KE=3))
    assert "1 of 4 countries has no photo left: Kenya." in text(page(folder))


def test_many_countries_become_columns_with_a_line_at_the_cap_and_a_list_of_all(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_card, "BARS_WITH_NAMES", 2)
    html = page(prepared())
    assert len(re.findall(r'<path class="column before"[^>]* d="(?:M[\d.]+ 190v-[\d.]+){3}"', html))
    assert "none above 2" in text(html)
    assert "France 9 → 2 Germany 4 → 2 Japan 2 → 2" in text(html)


def test_the_axis_is_logarithmic_only_where_counts_differ_widely() -> None:
    near = data_card.country_chart({"FR": 20, "DE": 10}, {"FR": 10, "DE": 10})
    assert not near["log"] and [row["lengths"] for row in near["rows"]] == [(1, 0.5), (0.5, 0.5)]
    wide = data_card.country_chart({"US": 10_000, "FR": 100, "NR": 1}, {"US": 100, "FR": 100})
    lengths = [row["lengths"] for row in wide["rows"]]
    assert wide["log"] and lengths[0][0] == 1 and 0.5 < lengths[1][0] < 0.6
    assert 0 < lengths[2][0] < 0.1 and lengths[2][1] == 0  # one photo shows, none does not
    assert [label for _, label in wide["ticks"]] == ["1", "10", "100", "1,000", "10,000"]
    assert wide["line"] == lengths[1][0]


def test_no_line_is_drawn_where_nothing_was_cut() -> None:
    assert data_card.country_chart({"FR": 3, "DE": 2}, {"FR": 3, "DE": 1})["line"] is None


def test_sizes_stand_with_their_visual_tokens(prepared: Prepared) -> None:
    folder = prepared()
    sizes = {"640x480": 2, "1024x768": 4}
    edit(folder, lambda summary: summary["splits"]["train_pool"].update(sizes=sizes))
    words = text(page(folder))
    assert "train_pool 300 768 612 768 2" in words  # fewest, median, mean, most, sizes
    assert "1024 × 768 768 66.7 % 0 %" in words and "640 × 480 300 33.3 % 0 %" in words


def test_rare_sizes_are_summed_up() -> None:
    sizes = {f"{32 * n}x32": 1 for n in range(1, 12)}
    rows = data_card.size_table({"train_pool": {"sizes": sizes}})["rows"]
    assert len(rows) == data_card.LISTED_SIZES + 1
    assert rows[-1]["label"] == "3 other sizes" and rows[-1]["shares"][0][0] == "27.3 %"


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [
        (0, 7, "0 %"),
        (1, 3, "33.3 %"),
        (7, 7, "100 %"),
        (1, 10**6, "< 0.1 %"),  # a few are not none
        (10**6 - 1, 10**6, "> 99.9 %"),  # nor nearly all all
        (0, 0, "0 %"),
    ],
)
def test_shares_never_round_to_none_or_all(part: int, whole: int, shown: str) -> None:
    assert data_card.share(part, whole) == shown


# --- The maps


def photo(latitude: float, longitude: float) -> Any:
    return data.Photo("id", Path("id.jpg"), latitude, longitude, "FR")


def test_a_dot_lies_at_its_place() -> None:
    world = data_card.world_map([photo(48.86, 2.35)])
    assert world["layers"] == {"few": "M364.5 72.5h0"}  # 2 (lon + 180), 2 (85 - lat)


def test_photos_of_one_place_share_a_dot_that_is_drawn_stronger() -> None:
    places = [photo(0, 0)] * 12 + [photo(10, 10)] * 3 + [photo(20, 20)]
    layers = data_card.world_map(places)["layers"]
    assert layers == {"few": "M400 130h0", "some": "M380 150h0", "many": "M360 170h0"}


def test_tens_of_thousands_of_photos_stay_a_small_map() -> None:
    crowd = [photo(n % 173 * 0.2, n % 997 * 0.05) for n in range(30_000)]
    world = data_card.world_map(crowd)
    path = "".join(world["layers"].values())
    assert 5000 < path.count("M") < 8000 and "." not in path
    assert world["dense"]


def test_photos_below_the_map_are_counted() -> None:
    assert data_card.world_map([photo(-77.8, 166.7), photo(0, 0)])["below"] == 1


def test_every_map_shows_the_land(prepared: Prepared) -> None:
    html = page(prepared())
    assert html.count('href="#land"') == 2 and html.count('id="land"') == 1


# --- The pictures


def test_the_contact_sheet_names_country_and_creator_and_the_licence(prepared: Prepared) -> None:
    html = page(prepared(creator="anna_m"))
    assert html.count("data:image/jpeg;base64,") == 9
    assert "Brazil by anna_m Kenya by anna_m Japan by anna_m" in text(html)
    assert "OSV-5M / Mapillary contributors, CC BY-SA 4.0" in text(html)


def test_the_sheet_holds_the_first_photos_of_a_split_only(tmp_path: Path) -> None:
    write_split(tmp_path, "eval_osv", ["FR"] * 30)
    photos = data_card.contact_sheet(data.load_split(tmp_path, "eval_osv"))
    assert [photo["id"] for photo in photos] == [f"eval_osv{n}" for n in range(24)]


def test_a_photo_without_a_creator_or_a_file_says_so(prepared: Prepared) -> None:
    folder = prepared(creator=None)
    (folder / "images/eval_osv0.jpg").unlink()
    words = text(page(folder))
    assert "creator not named" in words and "the photo's file is gone Brazil" in words


def test_thumbnails_are_small_upright_copies(tmp_path: Path) -> None:
    Image.new("RGB", (1024, 768)).save(tmp_path / "a.jpg")
    small = Image.open(io.BytesIO(base64.b64decode(data_card.thumbnail(tmp_path / "a.jpg") or "")))
    assert small.size == (200, 150) and small.format == "JPEG"


def test_pictures_that_may_not_be_published_never_appear(prepared: Prepared) -> None:
    folder = prepared()
    pano = write_split(folder, "eval_pano", ["FR", "DE"], publishable=False)
    closed = write_split(folder, "eval_osv", ["BR", "KE", "JP"], publishable=False)
    edit(folder, lambda summary: summary["splits"].update(eval_pano=pano, eval_osv=closed))
    html = page(folder)
    assert html.count("data:image/jpeg;base64,") == 6  # train_pool's alone
    assert "eval_osv, eval_pano: the pictures are Google's" in text(html)
    for name in ("eval_pano0", "eval_osv0"):
        thumbnail = data_card.thumbnail(folder / f"images/{name}.jpg")
        assert thumbnail and thumbnail not in html


def test_the_embedded_world_shows_its_note_first_and_no_licence(prepared: Prepared) -> None:
    html = page(prepared(creator=embedded.CREATOR))
    assert html.split("<body>")[1].strip().startswith(f'<p class="note">{embedded.NOTE}</p>')
    assert "CC BY-SA" not in html and "Mapillary" not in html
    assert '<p class="note">' not in page(prepared())


# --- The page itself


def test_the_page_asks_the_network_for_nothing_and_runs_nothing(prepared: Prepared) -> None:
    html = page(prepared())
    elements = Elements(html)
    assert "default-src 'none'" in html
    assert not {"script", "iframe", "link", "a"} & set(elements.tags)
    assert not [value for value in elements.values if "//" in value[:12]]
    assert not re.search(r"@import|url\(", html)


def test_names_from_files_are_text_and_never_markup(prepared: Prepared) -> None:
    folder = prepared(
        creator="<script>alert(1)</script>", dataset={"repo": "<b>", "revision": None}
    )
    rejected = {"<i>": "damaged: <img src=x onerror=alert(2)>"}
    edit(folder, lambda summary: summary["train"].update(rejected=rejected))
    html = page(folder)
    assert not {"script", "b"} & set(Elements(html).tags)
    assert "by &lt;script&gt;alert(1)" in html and "&lt;img src=x" in html


def test_equal_files_give_equal_bytes_without_the_folders_name(prepared: Prepared) -> None:
    folder = prepared()
    first = data_card.write(folder).read_bytes()
    assert data_card.write(folder).read_bytes() == first
    assert str(folder).encode() not in first


def test_a_folder_prepared_with_a_limit_has_a_card_without_train(prepared: Prepared) -> None:
    folder = prepared()
    edit(folder, lambda summary: (summary.pop("train"), summary["splits"].pop("train_pool")))
    words = text(page(folder))
    assert "3 photos of 3 countries to measure on" in words and "train_pool" not in words


def test_a_folder_without_a_summary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"summary\.json does not exist; run scripts/prepare_data"):
        data_card.write(tmp_path)
