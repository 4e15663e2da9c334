"""Sources: CSVs, zips and parquet as they come; a row is usable or counted under one reason."""

import io
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import polars as pl
import pytest
from conftest import csv_text, make_jpeg, write_zip
from hypothesis import given, settings
from hypothesis import strategies as st

from geoguessr_rl import sources
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import Source
from geoguessr_rl.embedded import OSV5M_COLUMNS

MINI = Path(__file__).parents[1].parent / "shared" / "osv5m_mini"
HEADER = "id,latitude,longitude,country,city,sequence\n"


def members_for(ids: Iterable[str]) -> pl.DataFrame:
    """Photos of these ids, somewhere in one zip."""
    rows = [(one, "00.zip", f"00/{one}.jpg", 0, 1, "v") for one in sorted(set(ids))]
    return pl.DataFrame(rows, schema=sources.MEMBER_SCHEMA, orient="row")


def labels_of(tmp_path: Path, content: str | bytes, ids: str = "123456789") -> sources.Labels:
    path = tmp_path / "test.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    labels = sources.read_labels(path, members_for(ids.split() if " " in ids else ids))
    assert labels.rows.height + sum(labels.dropped.values()) == labels.total
    return labels


def refusal(tmp_path: Path, content: str | bytes) -> str:
    with pytest.raises(UserError) as refused:
        labels_of(tmp_path, content)
    message = str(refused.value)
    assert str(tmp_path / "test.csv") in message and "\n" not in message
    return message


def dropped(labels: sources.Labels) -> dict[str, int]:
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
    assert labels.rows.drop(list(sources.MEMBER_SCHEMA)[1:]).to_dicts() == [
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
    members, ignored = sources.list_members([tmp_path / "00.zip"])
    assert len(entries) == members.height + sum(ignored.values())
    return sorted(members["id"]), ignored


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
    members, ignored = sources.list_members(paths)
    assert dict(members.select("id", "archive").iter_rows()) == {
        "1": str(paths[0]),
        "2": str(paths[1]),
    }
    assert ignored == {"duplicate_entry": 1}


def test_folders_in_a_zip_are_no_entries(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "00.zip", "w") as file:
        file.mkdir("00")
        file.writestr("00/1.jpg", b"x")
    assert sources.list_members([tmp_path / "00.zip"])[1] == {}


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
        sources.list_members([path])
    message = str(refused.value)
    assert str(path) in message
    assert f"{len(content)} bytes" in message and "download again" in message


def test_a_missing_source_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"test\.csv does not exist"):
        sources.locate(Source(root=tmp_path), "test")
    (tmp_path / "test.csv").write_text(HEADER)
    with pytest.raises(UserError, match=r"03\.zip does not exist"):
        sources.locate(Source(root=tmp_path, test=[3]), "test")


@pytest.mark.parametrize("table", sorted(MINI.glob("t*.csv")), ids=lambda path: path.stem)
def test_the_real_rows_add_up(table: Path) -> None:
    archives = sorted((MINI / "images" / table.stem).glob("*.zip"))
    members, ignored = sources.list_members(archives)
    labels = sources.read_labels(table, members)
    assert not ignored
    assert labels.rows.height + sum(labels.dropped.values()) == labels.total == len(members)
    assert labels.rows.height > 0.9 * labels.total
