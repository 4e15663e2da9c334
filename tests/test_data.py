"""Data: CSVs and zips as they come, draws that are fair and repeatable, train apart from eval."""

import io
import random
import struct
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from conftest import OSV5M_COLUMNS, csv_text, make_jpeg, make_rows, write_zip
from hypothesis import given, settings
from hypothesis import strategies as st

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import Source
from geoguessr_rl.records import PHOTO_SCHEMA
from geoguessr_rl.reward import haversine_km

MINI = Path(__file__).parents[1].parent / "shared" / "osv5m_mini"
HEADER = "id,latitude,longitude,country,city,sequence\n"


def labels_of(tmp_path: Path, content: str | bytes, ids: str = "123456789") -> data.Labels:
    path = tmp_path / "test.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    labels = data.read_labels(path, set(ids.split() if " " in ids else ids))
    assert labels.rows.height + sum(labels.dropped.values()) == labels.total
    return labels


def refusal(tmp_path: Path, content: str | bytes) -> str:
    with pytest.raises(UserError) as refused:
        labels_of(tmp_path, content)
    message = str(refused.value)
    assert str(tmp_path / "test.csv") in message and "\n" not in message
    return message


def dropped(labels: data.Labels) -> dict[str, int]:
    return {reason: count for reason, count in labels.dropped.items() if count}


def test_a_namibian_row_stays_namibian(tmp_path: Path) -> None:
    labels = labels_of(
        tmp_path,
        csv_text(
            [{"id": 1, "latitude": -22.5, "longitude": 17.0, "country": "NA", "city": "Windhoek"}]
        ),
    )
    assert labels.rows["country_iso2"].to_list() == ["NA"]
    assert labels.repaired == {"namibia": 0}


def test_lost_namibian_labels_are_repaired_and_counted_and_other_null_labels_counted(
    tmp_path: Path,
) -> None:
    rows = "1,-22,17,NMB,,\n2,-22,17,,Windhoek,\n3,-22,17,,Paris,\n4,-22,17,nan,,\n5,1,2,ZZ,,\n"
    rows += '6,-22,17,"",windhoek,\n7,-22,17,NA,,\n8,-22,17, na ,,\n'
    labels = labels_of(tmp_path, HEADER + rows)
    assert dict(labels.rows.select("id", "country_iso2").iter_rows()) == dict.fromkeys(
        "12678", "NA"
    )
    assert labels.repaired == {"namibia": 4}
    assert dropped(labels) == {"no_country": 3}


PLAIN = {
    "id": "1",
    "latitude": 48.5,
    "longitude": 2.25,
    "country": "FR",
    "region": "Île, de",
    "sub-region": "S",
    "city": "P",
    "sequence": "q",
    "creator_username": "c",
    "cell": "(0, 8)",
}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: text, id="as it is"),
        pytest.param(lambda text: text.replace("\n", "\r\n"), id="CRLF"),
        pytest.param(lambda text: "\ufeff" + text, id="BOM"),
        pytest.param(lambda text: "\ufeff" + text.replace("\n", "\r\n"), id="BOM and CRLF"),
        pytest.param(lambda text: text.rstrip("\n"), id="no last line break"),
    ],
)
@pytest.mark.parametrize("order", ["own", "sorted", "reversed", "country last"])
def test_columns_are_read_by_name_and_nothing_shifts(
    change: Callable[[str], str], order: str, tmp_path: Path
) -> None:
    columns = {
        "own": OSV5M_COLUMNS,
        "sorted": sorted(OSV5M_COLUMNS),
        "reversed": OSV5M_COLUMNS[::-1],
        "country last": [*(name for name in OSV5M_COLUMNS if name != "country"), "country"],
    }[order]
    labels = labels_of(tmp_path, change(csv_text([PLAIN], columns)))
    assert labels.rows.to_dicts() == [
        {
            "id": "1",
            "latitude": 48.5,
            "longitude": 2.25,
            "country_iso2": "FR",
            "region": "Île, de",
            "city": "P",
            "sequence": "q",
            "sub_region": "S",
            "creator": "c",
        }
    ]


def test_text_in_a_column_that_was_numeric_for_200_rows_is_no_error(tmp_path: Path) -> None:
    rows = [
        {
            "id": n,
            "latitude": 1.5,
            "longitude": 2,
            "country": "FR",
            "quadtree_10_5000": n,
            "sequence": n,
            "city": n,
        }
        for n in range(300)
    ]
    rows[250].update({"quadtree_10_5000": "none", "sequence": "abc", "city": "Paris"})
    labels = labels_of(tmp_path, csv_text(rows), " ".join(map(str, range(300))))
    assert labels.rows.height == 300
    kept = labels.rows.filter(pl.col("id") == "250").row(0, named=True)
    assert (kept["sequence"], kept["city"]) == ("abc", "Paris")
    assert set(labels.rows["id"]) == set(map(str, range(300)))


def test_text_in_a_coordinate_after_200_rows_names_file_row_and_column(tmp_path: Path) -> None:
    rows = [{"id": n, "latitude": 1.5, "longitude": 2, "country": "FR"} for n in range(300)]
    rows[250]["longitude"] = "east"
    message = refusal(tmp_path, csv_text(rows))
    assert "row 252" in message and "'longitude'" in message and "'east'" in message


@pytest.mark.parametrize("text", ["3859149887465501.0", "3.859149887465501e15", "1e5", "12."])
def test_a_float_id_names_file_row_and_column(text: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, HEADER + f"1,1,2,FR,,\n{text},1,2,FR,,\n")
    assert "row 3" in message and "'id'" in message and text in message


def test_ids_are_text(tmp_path: Path) -> None:
    ids = "0012 3859149887465501 99999999999999999999 a-B_c"
    rows = "".join(f"{one},1,2,FR,,\n" for one in ids.split())
    assert labels_of(tmp_path, HEADER + rows, ids).rows["id"].to_list() == sorted(ids.split())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (HEADER.replace(",", ";") + "1;1;2;FR;;\n", ["'id'", "id;latitude;longitude"]),
        (HEADER.replace("longitude", "lng"), ["'longitude'", "id,latitude,lng"]),
        (HEADER.replace("country", "Country"), ["'country'", "Country"]),
        ("<!DOCTYPE html>\n<html></html>\n", ["'id'", "<!DOCTYPE html>"]),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", ["'id'", "git-lfs"]),
        ("", ["empty", "'id'"]),
        ("\n\n", ["empty", "'id'"]),
        ((HEADER + "1,1,2,FR,Besançon,\n").encode("latin-1"), ["UTF-8", "download again"]),
        (HEADER + '1,1,2,"FR,,\n', ["download again"]),
        (HEADER + "1,1,2,FR,,,,,\n", ["more fields", "download again"]),
    ],
)
def test_a_file_that_is_no_such_csv_says_what_is_missing_and_what_was_found(
    content: str | bytes, says: list[str], tmp_path: Path
) -> None:
    message = refusal(tmp_path, content)
    assert all(part in message for part in says), message


def test_a_csv_with_a_header_only_has_no_rows(tmp_path: Path) -> None:
    assert labels_of(tmp_path, HEADER).total == 0


def test_impossible_coordinates_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = "1,91,2,FR,,\n2,1,,FR,,\n3,0,0,FR,,\n4,0.0,-0.0,FR,,\n5,nan,2,FR,,\n6,1,180.1,FR,,\n"
    labels = labels_of(tmp_path, HEADER + rows + "7,0,5,FR,,\n8, 90 ,-180,FR,,\n9,1,inf,FR,,\n")
    assert labels.rows["id"].to_list() == ["7", "8"]
    assert dropped(labels) == {"bad_coordinates": 5, "null_island": 2}


def test_an_id_given_twice_is_one_row(tmp_path: Path) -> None:
    rows = "1,1,2,FR,first,\n2,1,2,FR,,\n1,3,4,DE,second,\n1,1,2,FR,,\n"
    labels = labels_of(tmp_path, HEADER + rows)
    assert labels.rows["city"].to_list() == ["first", None]
    assert dropped(labels) == {"duplicate_id": 2}


def test_rows_without_a_photo_or_an_id_are_counted(tmp_path: Path) -> None:
    labels = labels_of(tmp_path, HEADER + "1,1,2,FR,,\nxyz,1,2,FR,,\n,1,2,FR,,\n\n")
    assert labels.total == 4
    assert dropped(labels) == {"no_photo": 1, "no_id": 2}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "1", "2", "3", "x"]),
            st.sampled_from(["0", "12.5", "91", "", "-90"]),
            st.sampled_from(["0", "-180", "181", ""]),
            st.sampled_from(["NA", "FR", "", "NMB", "France", "xx"]),
            st.sampled_from(["", "Windhoek", "Paris"]),
        ),
        max_size=12,
    )
)
def test_every_row_is_usable_or_counted_under_one_reason(
    tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[str, ...]]
) -> None:
    text = HEADER + "".join(",".join([*row, "s"]) + "\n" for row in cells)
    labels = labels_of(tmp_path_factory.getbasetemp(), text)  # checks the sum
    assert labels.total == len(cells)
    assert labels.rows["id"].is_unique().all()
    assert labels.rows["country_iso2"].is_in(["NA", "FR"]).all()


def members_of(tmp_path: Path, *entries: tuple[str, bytes]) -> tuple[list[str], dict[str, int]]:
    write_zip(tmp_path / "00.zip", entries)
    members, ignored = data.list_members([tmp_path / "00.zip"])
    assert len(entries) == len(members) + sum(ignored.values())
    return sorted(members), ignored


def test_zip_entries_are_joined_by_stem_and_junk_is_ignored(tmp_path: Path) -> None:
    names = ["00/1.jpg", "00\\2.jpg", "3.JPG", "4.jpeg", "a/b/c/5.png", "00/6.Jpg"]
    junk = ["__MACOSX/00/._1.jpg", "__MACOSX/00/7.jpg", ".DS_Store", "00/.DS_Store", "00/._8.jpg"]
    others = ["00/readme.txt", "00/9", "Thumbs.db", "00/a b.jpg", "00/.."]
    ids, ignored = members_of(tmp_path, *((name, b"x") for name in names + junk + others))
    assert ids == list("123456")
    assert ignored == {"junk_entry": 6, "not_a_photo_entry": 4}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_photo_that_is_in_a_zip_twice_counts_once(tmp_path: Path) -> None:
    names = ["00/1.jpg", "00/1.jpg", "01/1.JPG", "1.png", "00/2.jpg"]
    ids, ignored = members_of(tmp_path, *((name, b"x") for name in names))
    assert ids == ["1", "2"] and ignored == {"duplicate_entry": 3}


def test_the_first_zip_that_holds_an_id_wins(tmp_path: Path) -> None:
    paths = [tmp_path / "00.zip", tmp_path / "01.zip"]
    write_zip(paths[0], [("00/1.jpg", b"x")])
    write_zip(paths[1], [("01/1.jpg", b"y"), ("01/2.jpg", b"y")])
    members, ignored = data.list_members(paths)
    assert {key: member.archive for key, member in members.items()} == {
        "1": paths[0],
        "2": paths[1],
    }
    assert ignored == {"duplicate_entry": 1}


def test_folders_in_a_zip_are_no_entries(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "00.zip", "w") as file:
        file.mkdir("00")
        file.writestr("00/1.jpg", b"x")
    assert data.list_members([tmp_path / "00.zip"])[1] == {}


def broken_zips() -> dict[str, bytes]:
    """Downloads that went wrong."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for n in range(4):
            file.writestr(f"00/{n}é.jpg", make_jpeg(n))
    whole = out.getvalue()
    names = whole.rindex("é".encode())
    end = whole.rindex(b"PK\x05\x06")
    # The directory claims an entry count that it does not hold.
    directory = whole[: end + 10] + struct.pack("<H", 9) + whole[end + 12 :]
    return {
        "cut short": whole[: len(whole) * 2 // 3],
        "cut at the end": whole[:-1],
        "an HTML page": b"<!DOCTYPE html><title>Too many requests</title>",
        "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "empty": b"",
        "a piece missing in the middle": whole[:100] + whole[400:],
        "a name that is no UTF-8": whole[:names] + b"\xff\xff" + whole[names + 2 :],
        "a wrong directory": directory[: end - 60] + bytes(60) + directory[end:],
    }


@pytest.mark.parametrize("name", broken_zips())
def test_a_broken_zip_says_path_size_and_download_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "00.zip"
    path.write_bytes(content := broken_zips()[name])
    with pytest.raises(UserError) as refused:
        data.list_members([path])
    message = str(refused.value)
    assert str(path) in message
    assert f"{len(content)} bytes" in message and "download again" in message


def test_a_missing_source_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"source\.root is not set"):
        data.locate(Source(), "test")
    with pytest.raises(UserError, match=r"test\.csv does not exist"):
        data.locate(Source(root=tmp_path), "test")
    (tmp_path / "test.csv").write_text(HEADER)
    with pytest.raises(UserError, match=r"03\.zip does not exist"):
        data.locate(Source(root=tmp_path, test=[3]), "test")


def candidates(counts: dict[str, int]) -> pl.DataFrame:
    rows = [
        {"id": f"{code}{n}", "country_iso2": code}
        for code, count in counts.items()
        for n in range(count)
    ]
    random.Random(0).shuffle(rows)
    return pl.DataFrame(rows, schema={"id": pl.String, "country_iso2": pl.String})


def country_counts(ids: list[str]) -> Counter[str]:
    return Counter(identifier[:2] for identifier in ids)


def test_rounds_take_one_photo_of_every_country_a_round() -> None:
    rows = candidates({"FR": 50, "DE": 3, "NA": 1, "BR": 20})
    drawn, spares = data.draw_rounds(rows, size=14, rounds=10, seed=1)
    assert country_counts(drawn) == {"FR": 5, "BR": 5, "DE": 3, "NA": 1}
    assert len(set(drawn)) == 14
    assert {code: len(ids) for code, ids in spares.items()} == {
        "BR": 15,
        "DE": 0,
        "FR": 45,
        "NA": 0,
    }


def test_within_a_round_no_country_is_favoured() -> None:
    rows = candidates({"AA": 9, "BB": 9, "CC": 9})
    drawn, _ = data.draw_rounds(rows, size=7, rounds=10, seed=3)
    assert sorted(country_counts(drawn).values()) == [2, 2, 3]
    firsts = {
        next(iter(country_counts(data.draw_rounds(rows, size=1, rounds=1, seed=seed)[0])))
        for seed in range(20)
    }
    assert firsts == {"AA", "BB", "CC"}


def test_what_is_missing_after_the_last_round_is_drawn_at_random() -> None:
    rows = candidates({"FR": 500, "DE": 500, "NA": 1})
    drawn, _ = data.draw_rounds(rows, size=105, rounds=2, seed=1)
    counts = country_counts(drawn)
    assert len(set(drawn)) == 105 and counts["NA"] == 1
    assert counts["FR"] != counts["DE"]
    assert 30 < counts["FR"] < 75
    everything, spares = data.draw_rounds(rows, size=5000, rounds=2, seed=1)
    assert sorted(everything) == sorted(rows["id"]) and not any(spares.values())


def test_a_prefix_of_the_draw_is_a_fair_sample() -> None:
    """The rounds come first in the draw and not in the order, where a prefix would be of them."""
    rows = candidates({"FR": 900, "DE": 60})
    drawn, _ = data.draw_rounds(rows, size=600, rounds=10, seed=5)
    assert country_counts(drawn)["DE"] >= 10
    assert country_counts(drawn[:60])["DE"] < 10


@settings(max_examples=40, deadline=None)
@given(
    counts=st.dictionaries(
        st.sampled_from(["FR", "DE", "NA", "BR", "XK"]), st.integers(1, 8), min_size=1
    ),
    size=st.integers(1, 30),
    rounds=st.integers(1, 6),
    seed=st.integers(0, 5),
)
def test_draws_are_repeatable_disjoint_and_independent_of_the_row_order(
    counts: dict[str, int], size: int, rounds: int, seed: int
) -> None:
    rows = candidates(counts)
    drawn, spares = data.draw_rounds(rows, size=size, rounds=rounds, seed=seed)
    assert len(set(drawn)) == len(drawn) == min(size, rows.height)
    kept = [identifier for ids in spares.values() for identifier in ids]
    assert sorted([*drawn, *kept]) == sorted(rows["id"])
    assert data.draw_rounds(
        rows.sample(fraction=1, shuffle=True, seed=9), size=size, rounds=rounds, seed=seed
    ) == (drawn, spares)
    capped, rest = data.draw_capped(rows, cap=rounds, seed=seed)
    assert country_counts(capped) == {code: min(n, rounds) for code, n in counts.items()}
    assert sorted([*capped, *(one for ids in rest.values() for one in ids)]) == sorted(rows["id"])
    assert data.draw_capped(rows.reverse(), cap=rounds, seed=seed) == (capped, rest)


def test_another_seed_draws_other_photos() -> None:
    rows = candidates({"FR": 50, "DE": 50})
    draws = [data.draw_rounds(rows, size=20, rounds=10, seed=seed)[0] for seed in range(3)]
    assert len({frozenset(drawn) for drawn in draws}) == 3
    assert data.draw_capped(rows, cap=5, seed=1)[0] != data.draw_capped(rows, cap=5, seed=2)[0]


def test_one_more_country_leaves_the_others_order_alone() -> None:
    few, _ = data.draw_capped(candidates({"FR": 50, "DE": 50}), cap=5, seed=1)
    more, _ = data.draw_capped(candidates({"FR": 50, "DE": 50, "BR": 50}), cap=5, seed=1)
    assert set(few) < set(more)


def places(*rows: tuple[str, float, float, str | None]) -> pl.DataFrame:
    return pl.DataFrame(
        rows,
        schema={
            "id": pl.String,
            "latitude": pl.Float64,
            "longitude": pl.Float64,
            "sequence": pl.String,
        },
        orient="row",
    )


def test_train_rows_of_an_evaluation_photo_sequence_or_place_go_and_are_counted() -> None:
    evaluation = places(("e1", 48.0, 2.0, "walk"), ("e2", -10.0, 20.0, None), ("e3", 5, 5, ""))
    train = places(
        ("e1", 0.0, 50.0, None),  # the same photo
        ("t1", 1.0, 50.0, "walk"),  # the same sequence
        ("t2", 48.0027, 2.0, "other"),  # 300 m away
        ("t3", 2.0, 50.0, None),  # null and empty sequences match nothing
        ("t4", 3.0, 50.0, ""),
        ("t5", 4.0, 50.0, " "),
        ("t6", 48.0, 2.1, "other"),  # 7 km away
    )
    kept, counts = data.keep_apart(train, evaluation, min_km=1.0)
    assert kept["id"].to_list() == ["t3", "t4", "t5", "t6"]
    assert counts == {"same_photo": 1, "same_sequence": 1, "within_min_km": 1}
    assert kept.columns == train.columns


def test_without_evaluation_or_train_rows_nothing_goes() -> None:
    rows, none = places(("t1", 1.0, 2.0, "s")), places()
    assert data.keep_apart(rows, none, min_km=1)[0].height == 1
    assert data.keep_apart(none, rows, min_km=1)[0].height == 0


@pytest.mark.parametrize(
    ("evaluation", "near", "far"),
    [
        pytest.param((0, 179.997), (0, -179.997), (0, -179.98), id="antimeridian"),
        pytest.param((-17, 180), (-17, -180), (-17, -179.98), id="the antimeridian itself"),
        pytest.param((89.998, 0), (89.998, 180), (89.98, 180), id="north pole"),
        pytest.param((-90, 0), (-90, 77), (-89.98, 77), id="south pole"),
        pytest.param((70, 25), (70, 25.02), (70, 25.04), id="a short degree of longitude"),
        pytest.param((0, 0.5), (0.00899, 0.5), (0.00900, 0.5), id="just under and over 1 km"),
    ],
)
def test_one_kilometre_is_measured_on_the_globe(
    evaluation: tuple[float, float], near: tuple[float, float], far: tuple[float, float]
) -> None:
    assert haversine_km(*evaluation, *near) < 1 < haversine_km(*evaluation, *far)
    train = places(("near", *near, None), ("far", *far, None))
    kept, counts = data.keep_apart(train, places(("e", *evaluation, None)), min_km=1.0)
    assert kept["id"].to_list() == ["far"] and counts["within_min_km"] == 1


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-90, 90),
    st.floats(-180, 180),
    st.floats(-0.02, 0.02),
    st.floats(-0.02, 0.02),
    st.sampled_from([0.5, 1.0, 300.0]),
)
def test_the_tree_agrees_with_the_distance_of_the_reward(
    lat: float, lon: float, north: float, east: float, min_km: float
) -> None:
    other = (max(-90, min(90, lat + north * min_km)), max(-180, min(180, lon + east * min_km)))
    distance = haversine_km(lat, lon, *other)
    kept, _ = data.keep_apart(
        places(("t", *other, None)), places(("e", lat, lon, None)), min_km=min_km
    )
    if abs(distance - min_km) > 1e-6:
        assert (kept.height == 1) == (distance > min_km)


PHOTOS = [("1", 1.0, 2.0, "NA"), ("0002", 3.0, 4.0, "FR"), ("3", 5.0, 6.0, "DE")]


def test_a_split_comes_back_in_its_order_and_a_limit_is_a_prefix(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    folder = make_split(tmp_path / "my data", PHOTOS)
    split = data.load_split(folder, "eval_osv")
    assert [(p.id, p.latitude, p.longitude, p.country_iso2) for p in split.photos] == PHOTOS
    assert split.photos[1].path == folder / "images/0002.jpg"
    assert split.role == "evaluation" and len(split.fingerprint) == 16
    for limit in (1, 2, 3, 99):
        short = data.load_split(folder, "eval_osv", limit=limit)
        assert short.photos == split.photos[:limit]
        assert short.fingerprint == split.fingerprint


def test_an_unknown_split_names_the_splits_there_are(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=r"no split 'eval'; run scripts/prepare_data\.py"):
        data.load_split(tmp_path, "eval")
    make_split(tmp_path, PHOTOS)
    make_split(tmp_path, PHOTOS, name="eval_quick")
    with pytest.raises(UserError, match="no split 'eval'; it holds eval_osv, eval_quick"):
        data.load_split(tmp_path, "eval")


def test_a_split_that_does_not_fit_its_manifest_is_refused(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    path = make_split(tmp_path, PHOTOS) / "eval_osv.parquet"
    table = pl.read_parquet(path)
    for changed, says in (
        (table.head(2), "2 rows and its manifest 3"),
        (table.with_columns(pl.col("image_path").str.replace("/1", "/9")), "other photos"),
        (table.drop("country_iso2"), "no column 'country_iso2'"),
    ):
        artifacts.write_parquet(path, changed)
        with pytest.raises(UserError, match=says):
            data.load_split(tmp_path, "eval_osv")
    artifacts.write_parquet(path, table.drop("sub_region", "creator"))
    assert len(data.load_split(tmp_path, "eval_osv").photos) == 3
    data.manifest_path(tmp_path, "eval_osv").unlink()
    with pytest.raises(UserError, match=r"manifest\.json does not exist; run scripts/prepare"):
        data.load_split(tmp_path, "eval_osv")


def manifest(photos: list[tuple[str, float, float, str]], **hashes: str) -> dict[str, object]:
    keys = ("image_path", "latitude", "longitude", "country_iso2")
    rows = [dict(zip(keys, (f"i/{p[0]}.jpg", *p[1:]), strict=True)) for p in photos]
    table = pl.DataFrame(rows, schema=PHOTO_SCHEMA)
    sha256 = {**{photo[0]: "0" for photo in photos}, **hashes}
    return data.build_manifest("s", "train", table, sha256, image_policy={}, source="x")


def test_a_fingerprint_goes_by_photos_labels_bytes_and_order() -> None:
    # The order decides blocks, a limit's prefix and the order of training.
    one = manifest(PHOTOS)
    assert manifest(PHOTOS)["fingerprint"] == one["fingerprint"]
    assert one["photos"] == sorted(one["photos"], key=lambda row: row["id"])
    assert one["rows"] == 3 and one["role"] == "train"
    others = [
        manifest(PHOTOS[::-1]),
        manifest(PHOTOS[:2]),
        manifest([*PHOTOS[:2], ("3", 5.0, 6.1, "DE")]),
        manifest([*PHOTOS[:2], ("3", 5.0, 6.0, "AT")]),
        manifest(PHOTOS, **{"3": "1"}),
    ]
    assert len({item["fingerprint"] for item in [one, *others]}) == 6


def test_an_evaluation_split_may_not_be_trained_on(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    make_split(tmp_path, PHOTOS)
    split = data.load_split(tmp_path, "eval_osv")
    with pytest.raises(UserError, match=r"'eval_osv' .* is for evaluation; train on train_pool"):
        data.require_train_role(split, tmp_path)


def test_a_train_split_that_shares_a_photo_with_evaluation_is_refused(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    make_split(tmp_path, PHOTOS[:1])
    make_split(tmp_path, PHOTOS[1:], name="train_pool", role="train")
    make_split(tmp_path, PHOTOS[1:], name="train_learnable", role="train")
    data.require_train_role(data.load_split(tmp_path, "train_pool"), tmp_path)
    make_split(tmp_path, [PHOTOS[0], PHOTOS[2]], name="eval_mine")
    with pytest.raises(UserError, match="'train_pool' shares 1 photos with 'eval_mine', 3 among"):
        data.require_train_role(data.load_split(tmp_path, "train_pool"), tmp_path)


def test_a_run_s_order_is_a_permutation_each_epoch_and_a_longer_run_begins_alike(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    make_split(tmp_path, [(str(n), 1.0, 2.0, "FR") for n in range(10)])
    photos = data.load_split(tmp_path, "eval_osv").photos
    order = data.lay_out(photos, 35, seed=1)
    assert len(order) == 35
    for start in (0, 10, 20):
        assert sorted(p.id for p in order[start : start + 10]) == [str(n) for n in range(10)]
    assert order[:10] != order[10:20]
    assert data.lay_out(photos, 12, seed=1) == order[:12]
    assert data.lay_out(photos, 12, seed=2) != order[:12]


def test_the_columns_for_training_carry_the_labels_and_the_prompt(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    make_split(tmp_path, PHOTOS)
    photos = data.load_split(tmp_path, "eval_osv").photos
    for style in ("think", "direct"):
        columns = data.training_columns(photos, style)
        assert columns["country_iso2"] == ["NA", "FR", "DE"] and columns["id"][1] == "0002"
        assert {len(values) for values in columns.values()} == {3}
        assert [message["role"] for message in columns["prompt"][0]] == ["system", "user"]
    assert data.training_columns(photos, "think")["prompt"] != columns["prompt"]


@pytest.mark.parametrize("table", sorted(MINI.glob("t*.csv")), ids=lambda path: path.stem)
def test_the_real_rows_add_up(table: Path) -> None:
    archives = sorted((MINI / "images" / table.stem).glob("*.zip"))
    members, ignored = data.list_members(archives)
    labels = data.read_labels(table, members)
    assert not ignored
    assert labels.rows.height + sum(labels.dropped.values()) == labels.total == len(members)
    assert labels.rows.height > 0.9 * labels.total


def test_make_rows_keeps_its_promise_of_distance() -> None:
    rows = make_rows([f"{n:02d}" for n in range(60)])
    points = [(row["latitude"], row["longitude"]) for row in rows]
    assert len(set(points)) == 60
    near = min(haversine_km(*a, *b) for n, a in enumerate(points) for b in points[:n])
    assert near > 100


@pytest.mark.parametrize("text", ["[]", "{}", '{"rows": 3}', "{"])
def test_a_damaged_manifest_is_one_sentence(
    tmp_path: Path, make_split: Callable[..., Path], text: str
) -> None:
    make_split(tmp_path, PHOTOS)
    data.manifest_path(tmp_path, "eval_osv").write_text(text)
    with pytest.raises(UserError, match=r"prepare_data\.py first"):
        data.load_split(tmp_path, "eval_osv")


def test_a_cut_parquet_is_one_sentence(tmp_path: Path, make_split: Callable[..., Path]) -> None:
    make_split(tmp_path, PHOTOS)
    path = tmp_path / "eval_osv.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="is no whole parquet file"):
        data.load_split(tmp_path, "eval_osv")
