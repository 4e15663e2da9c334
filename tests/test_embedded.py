"""The embedded world: the cue table's promises, the layout on disk, and what mean colour tells."""

import csv
import io
import json
import zipfile
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from geoguessr_rl import embedded
from geoguessr_rl.countries import to_iso2
from geoguessr_rl.reward import geoscore, haversine_km

OSV5M_MINI = Path(__file__).resolve().parents[2] / "shared" / "osv5m_mini"
TRAINED_GEOSCORE = 4500  # what the tiny model reaches on test photos after GRPO


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    embedded.draw_world(root, train=480, test=120, seed=0)
    return root


def read_split(root: Path, split: str) -> tuple[list[dict[str, str]], list[Image.Image]]:
    with open(root / f"{split}.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with zipfile.ZipFile(root / "images" / split / "00.zip") as photos:
        names = [f"00/{row['id']}.jpg" for row in rows]
        assert sorted(photos.namelist()) == sorted(names)
        return rows, [Image.open(io.BytesIO(photos.read(name))) for name in names]


def mean_colour_geoscore(root: Path) -> float:
    """Mean GeoScore of copying the place of the train photo with the nearest mean colour."""
    train_rows, train_photos = read_split(root, "train")
    test_rows, test_photos = read_split(root, "test")
    train_colours, test_colours = (
        np.array([np.asarray(photo, dtype=float).mean(axis=(0, 1)) for photo in photos])
        for photos in (train_photos, test_photos)
    )
    scores = []
    for colour, row in zip(test_colours, test_rows, strict=True):
        near = train_rows[int(((train_colours - colour) ** 2).sum(axis=1).argmin())]
        d_km = haversine_km(
            float(near["latitude"]),
            float(near["longitude"]),
            float(row["latitude"]),
            float(row["longitude"]),
        )
        scores.append(geoscore(d_km))
    return sum(scores) / len(scores)


def test_there_are_at_least_twelve_countries_and_four_cues() -> None:
    assert len(embedded.COUNTRIES) >= 12
    assert len(embedded.CUES) >= 4
    assert embedded.COUNTRIES.keys() == embedded.PLACES.keys()


def test_every_cue_value_is_shared() -> None:
    for cue, values in zip(
        embedded.CUES, zip(*embedded.COUNTRIES.values(), strict=True), strict=True
    ):
        counts = Counter(values)
        assert counts.keys() == embedded.CLUES[cue].keys()
        assert min(counts.values()) >= 2, (cue, counts)


def test_no_pair_of_cues_names_most_countries() -> None:
    table = list(embedded.COUNTRIES.values())
    for one, other in combinations(range(len(embedded.CUES)), 2):
        counts = Counter((row[one], row[other]) for row in table)
        named = sum(count == 1 for count in counts.values())
        assert named <= len(table) // 3, (embedded.CUES[one], embedded.CUES[other], named)


def test_any_two_countries_differ_in_at_least_three_cues() -> None:
    for (one, mine), (other, theirs) in combinations(embedded.COUNTRIES.items(), 2):
        assert sum(a != b for a, b in zip(mine, theirs, strict=True)) >= 3, (one, other)


def test_a_wrong_country_is_a_bad_guess() -> None:
    for (_, lat1, lon1, *_), (_, lat2, lon2, *_) in combinations(embedded.PLACES.values(), 2):
        assert haversine_km(lat1, lon1, lat2, lon2) > 2000


def test_the_parser_knows_every_country_name() -> None:
    assert {iso2: to_iso2(place[0]) for iso2, place in embedded.PLACES.items()} == {
        iso2: iso2 for iso2 in embedded.COUNTRIES
    }


def test_the_same_arguments_give_the_same_bytes(world: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        embedded.draw_world(tmp_path / name, train=13, test=5, seed=7)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 5
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a/train.csv").read_bytes() != (world / "train.csv").read_bytes()


def test_a_larger_world_starts_with_the_smaller_one(world: Path, tmp_path: Path) -> None:
    embedded.draw_world(tmp_path, train=13, test=5, seed=0)
    for split, count in (("train", 13), ("test", 5)):
        rows, photos = read_split(tmp_path, split)
        more_rows, more_photos = read_split(world, split)
        assert rows == more_rows[:count]
        assert all(a == b for a, b in zip(photos, more_photos[:count], strict=True))


def test_the_layout_is_that_of_osv5m(world: Path) -> None:
    for split in ("train", "test"):
        header = (world / f"{split}.csv").read_text(encoding="utf-8").splitlines()[0]
        assert len(header.split(",")) == 32
        if OSV5M_MINI.is_dir():
            with open(OSV5M_MINI / f"{split}.csv", encoding="utf-8") as file:
                assert header == file.readline().rstrip("\r\n")


def test_rows_hold_what_prepare_reads(world: Path) -> None:
    rows = [row for split in ("train", "test") for row in read_split(world, split)[0]]
    for key in ("id", "sequence"):
        assert len({row[key] for row in rows}) == len(rows)
    for row in rows:
        assert row["id"].isdecimal() and len(row["id"]) in (15, 16)
        assert row["region"] and row["city"] and row["creator_username"]
        _, latitude, longitude, *_ = embedded.PLACES[row["country"]]
        assert abs(float(row["latitude"]) - latitude) <= embedded.JITTER_DEG
        assert abs(float(row["longitude"]) - longitude) <= embedded.JITTER_DEG
    counts = Counter(row["country"] for row in rows)
    assert counts == dict.fromkeys(embedded.COUNTRIES, len(rows) // len(embedded.COUNTRIES))


def test_photos_need_no_resize(world: Path) -> None:
    _, photos = read_split(world, "test")
    for photo in photos:
        assert photo.mode == "RGB" and photo.format == "JPEG"
        assert photo.size == embedded.SIZE
        assert all(side % 32 == 0 for side in photo.size)


def test_clues_name_every_cue_and_tell_countries_apart(world: Path) -> None:
    clues = json.loads((world / "clues.json").read_text(encoding="utf-8"))
    assert clues.keys() == embedded.COUNTRIES.keys()
    assert len(set(clues.values())) == len(clues)
    for iso2, sentence in clues.items():
        for cue, value in zip(embedded.CUES, embedded.COUNTRIES[iso2], strict=True):
            assert embedded.CLUES[cue][value] in sentence


def test_mean_colour_does_not_give_the_country_away(world: Path) -> None:
    assert mean_colour_geoscore(world) < TRAINED_GEOSCORE / 2
