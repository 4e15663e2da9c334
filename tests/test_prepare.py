"""Prepare: whatever the downloads hold, splits are whole, fair, apart, repeatable, and add up."""

import hashlib
import io
import json
import os
import random
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import SMALL, csv_text, make_jpeg, make_rows, photo_entries
from PIL import Image

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends.predictions import generate
from geoguessr_rl.config import DataConfig, EvalDraw, Generation, Model, Prompt, Source, TrainPool
from geoguessr_rl.phases import prepare
from geoguessr_rl.records import PHOTO_SCHEMA, Prediction, Sampling
from geoguessr_rl.reward import haversine_km

SHARED_MINI = Path(__file__).parents[1].parent / "shared" / "osv5m_mini"
COUNTRIES = ["NA", "FR", "DE", "BR", "JP"]

OsvFolder = Callable[..., Path]
MakeConfig = Callable[..., DataConfig]


def ids_of(out: Path, split: str) -> list[str]:
    table = pl.read_parquet(out / f"{split}.parquet")
    return [Path(path).stem for path in table["image_path"]]


def tree(folder: Path) -> dict[str, str]:
    """Every file under a folder with the hash of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock",)
    }


def assert_counts_add_up(summary: dict[str, Any]) -> None:
    for split in ("test", "train"):
        if counts := summary.get(split):
            assert (
                counts["rows_usable"] + sum(counts["rows_dropped"].values()) == counts["csv_rows"]
            )
    if train := summary.get("train"):
        pool = summary["splits"]["train_pool"]["rows"]
        replaced = len(train["photos_damaged"])
        left = train["rows_usable"] - sum(train["contamination_dropped"].values())
        assert left - train["over_cap"] - replaced <= pool <= left - train["over_cap"]


def damage(entries: list[Any], which: str, content: bytes) -> list[Any]:
    return [(name, content if which == name else good) for name, good in entries]


@pytest.fixture
def world(osv_folder: OsvFolder) -> Path:
    """Four test photos and six train photos of each of five countries, far from each other."""
    rows = make_rows(COUNTRIES * 2, each=5)
    train = [{**row, "id": f"t{row['id']}"} for row in rows if int(row["id"]) % 5 > 1]
    test = [row for row in rows if int(row["id"]) % 5 <= 1]
    return osv_folder(test, train=train)


def test_every_split_is_written_with_manifest_photos_and_summary(
    world: Path, data_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = data_config(world, size=10)
    summary = prepare.run(config)
    printed = capsys.readouterr().out
    out = config.output_dir
    assert_counts_add_up(summary)
    assert json.loads((out / "summary.json").read_text()) == summary
    assert {name: split["rows"] for name, split in summary["splits"].items()} == {
        "eval_osv": 10,
        "eval_quick": 3,
        "train_pool": 30,
    }
    assert ids_of(out, "eval_quick") == ids_of(out, "eval_osv")[:3]
    for name in summary["splits"]:
        table = pl.read_parquet(out / f"{name}.parquet")
        assert dict(table.schema) == PHOTO_SCHEMA
        manifest = json.loads((out / f"{name}.manifest.json").read_text())
        assert manifest["role"] == ("train" if name == "train_pool" else "evaluation")
        assert manifest["image"] == SMALL.model_dump()
        assert manifest["fingerprint"] == summary["splits"][name]["fingerprint"]
        for photo in data.load_split(out, name).photos:
            stored = photo.path.read_bytes()
            (sha256,) = (row["sha256"] for row in manifest["photos"] if row["id"] == photo.id)
            assert hashlib.sha256(stored).hexdigest() == sha256
            assert Image.open(io.BytesIO(stored)).size == (96, 64)
        countries = table["country_iso2"].n_unique()
        assert f"{name}: {table.height} rows, {countries} countries; largest: " in printed
    assert DataConfig(**json.loads((out / artifacts.RESOLVED_CONFIG).read_text())) == config


def test_the_first_rounds_hold_every_country_equally(world: Path, data_config: MakeConfig) -> None:
    config = data_config(world, size=10)
    prepare.run(config)
    table = pl.read_parquet(config.output_dir / "eval_osv.parquet")
    assert dict(table["country_iso2"].value_counts().iter_rows()) == dict.fromkeys(COUNTRIES, 2)
    share = data.load_split(config.output_dir, "eval_osv").country_share
    assert share == pytest.approx(dict.fromkeys(COUNTRIES, 0.2))


def test_the_country_share_is_the_csv_s_and_not_the_draw_s(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR"] * 8 + ["DE", "DE"])
    config = data_config(osv_folder(rows), size=4, limit=4)
    prepare.run(config)
    split = data.load_split(config.output_dir, "eval_osv")
    assert split.country_share == pytest.approx({"DE": 0.2, "FR": 0.8})
    assert sorted(photo.country_iso2 for photo in split.photos) == ["DE", "DE", "FR", "FR"]


def test_the_same_command_gives_the_same_files(
    world: Path, data_config: MakeConfig, tmp_path: Path
) -> None:
    config = data_config(world, size=6)
    prepare.run(config)
    first = tree(config.output_dir)
    prepare.run(config)
    assert tree(config.output_dir) == first
    elsewhere = data_config(world, size=6, output_dir=tmp_path / "other folder")
    prepare.run(elsewhere)
    second = tree(elsewhere.output_dir)
    assert second.pop(artifacts.RESOLVED_CONFIG) != first.pop(
        artifacts.RESOLVED_CONFIG
    )  # it names its own folder
    assert second == first


def test_namibia_survives_parquet_json_lines_and_resume(
    osv_folder: OsvFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
    rows = make_rows(["NA", "NMB", "", "FR"])
    rows[2]["city"] = "Windhoek"
    config = data_config(osv_folder(rows), limit=9)
    summary = prepare.run(config)
    assert summary["test"]["labels_repaired"] == {"namibia": 2}
    split = data.load_split(config.output_dir, "eval_osv")
    labels = {photo.id: photo.country_iso2 for photo in split.photos}
    assert labels == {"1": "NA", "2": "NA", "3": "NA", "4": "FR"}
    columns = data.training_columns(split.photos, "think")
    assert sorted(columns["country_iso2"]) == ["FR", "NA", "NA", "NA"]
    scripted = Generation(backend="scripted", block_size=2)
    path = tmp_path / "run" / "predictions.jsonl"
    for photos in (split.photos[:3], split.photos):  # the second call resumes
        rows_ = generate(path, photos, scripted, Model(), Prompt(), Sampling())
        assert {row.id: row.country_iso2 for row in rows_} == {p.id: labels[p.id] for p in photos}
    again = artifacts.read_rows(path, Prediction)
    assert {row.id: row.country_iso2 for row in again} == labels


def test_train_rows_near_evaluation_go_and_are_counted(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    test = make_rows(["FR", "DE"])
    test[0]["sequence"], test[1]["sequence"] = "walk", ""
    far = make_rows(["BR"] * 5, prefix="t")
    for n, row in enumerate(far):
        row.update(latitude=10 + n, longitude=100.0)
    far[0]["sequence"] = "walk"
    far[1].update(latitude=test[1]["latitude"] + 0.0027, longitude=test[1]["longitude"])
    far[2]["sequence"] = ""
    far[4]["id"] = "1"  # an evaluation photo's id
    config = data_config(osv_folder(test, train=far))
    summary = prepare.run(config)
    assert summary["train"]["contamination_dropped"] == {
        "same_photo": 1,
        "same_sequence": 1,
        "within_min_km": 1,
    }
    assert sorted(ids_of(config.output_dir, "train_pool")) == ["t3", "t4"]
    assert_counts_add_up(summary)


def test_the_pool_is_capped_by_country(world: Path, data_config: MakeConfig) -> None:
    config = data_config(world, size=5, train=TrainPool(cap=4))
    summary = prepare.run(config)
    table = pl.read_parquet(config.output_dir / "train_pool.parquet")
    assert dict(table["country_iso2"].value_counts().iter_rows()) == dict.fromkeys(COUNTRIES, 4)
    assert summary["train"]["over_cap"] == 10
    assert_counts_add_up(summary)


def bad_checksum(path: Path, name: str) -> None:
    """Flips one byte of an entry, whose checksum then differs."""
    with zipfile.ZipFile(path) as file:
        info = file.getinfo(name)
    content = bytearray(path.read_bytes())
    start = info.header_offset + 30 + len(info.filename.encode())
    content[start + info.compress_size // 2] ^= 0xFF
    path.write_bytes(content)


BAD_ENTRIES = {
    "a bad checksum": None,
    "a truncated JPEG": make_jpeg(0)[:-200],
    "0 bytes": b"",
    "text": b"not found\n" * 20,
    "a picture that is too thin": make_jpeg(0, (900, 8)),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
@pytest.mark.parametrize("split", ["test", "train"])
def test_a_damaged_photo_is_named_counted_and_replaced_by_the_next_of_its_country(
    name: str, split: str, osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(COUNTRIES, each=3)
    other = make_rows(["MN"], prefix="o")
    other[0].update(latitude=45.0, longitude=110.0)
    tables = {"test": rows, "train": other} if split == "test" else {"test": other, "train": rows}
    drawn_split = "eval_osv" if split == "test" else "train_pool"
    root = osv_folder(tables["test"], train=tables["train"])
    config = data_config(root, size=5, train=TrainPool(cap=1))
    prepare.run(config)
    whole = ids_of(config.output_dir, drawn_split)
    assert len(whole) == 5

    archive = root / "images" / split / "00.zip"
    entry = f"00/{whole[2]}.jpg"
    if BAD_ENTRIES[name] is None:
        bad_checksum(archive, entry)
    else:
        osv_folder(
            tables["test"],
            train=tables["train"],
            **{f"{split}_zip": damage(photo_entries(rows), entry, BAD_ENTRIES[name])},
        )
    summary = prepare.run(config)
    now = ids_of(config.output_dir, drawn_split)
    assert list(summary[split]["photos_damaged"]) == [whole[2]]
    assert summary[split]["photos_damaged"][whole[2]]
    assert [now[n] == whole[n] for n in range(5)] == [True, True, False, True, True]
    country = {row["id"]: row["country"] for row in rows}
    assert country[now[2]] == country[whole[2]] and len(set(now)) == 5
    assert summary["splits"][drawn_split]["rows"] == 5


def test_a_country_without_a_spare_loses_the_photo_and_the_run_goes_on(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR", "DE", "BR"])
    root = osv_folder(rows, test_zip=damage(photo_entries(rows), "00/2.jpg", b"text"))
    config = data_config(root, limit=10)
    summary = prepare.run(config)
    assert sorted(ids_of(config.output_dir, "eval_osv")) == ["1", "3"]
    assert list(summary["test"]["photos_damaged"]) == ["2"]


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 99])
def test_a_limit_is_a_prefix_of_the_longer_run_even_past_damaged_photos(
    limit: int, osv_folder: OsvFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
    rows = make_rows(COUNTRIES, each=4)
    entries = photo_entries(rows)
    for n in (2, 3, 7, 11, 19):
        entries = damage(entries, f"00/{n}.jpg", b"text")
    root = osv_folder(rows, train=make_rows(["MN"], prefix="t"), test_zip=entries)
    config = data_config(root, size=10)
    prepare.run(config)
    short = data_config(root, size=10, limit=limit, output_dir=tmp_path / "short")
    prepare.run(short)
    longer = pl.read_parquet(config.output_dir / "eval_osv.parquet")
    prefix = pl.read_parquet(short.output_dir / "eval_osv.parquet")
    assert prefix.equals(longer.head(limit))
    assert not (short.output_dir / "train_pool.parquet").exists()


def test_a_limit_needs_the_test_files_only(osv_folder: OsvFolder, data_config: MakeConfig) -> None:
    root = osv_folder(make_rows(COUNTRIES))
    (root / "train.csv").unlink()
    (root / "images/train/00.zip").unlink()
    assert prepare.run(data_config(root, limit=2))["splits"]["eval_osv"]["rows"] == 2
    with pytest.raises(UserError, match=r"train\.csv does not exist"):
        prepare.run(data_config(root))


BROKEN_DOWNLOADS = {
    "cut short": lambda whole: whole[: len(whole) // 2],
    "an HTML page": lambda _: b"<!DOCTYPE html><title>429</title>",
    "a Git LFS pointer": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}


@pytest.mark.parametrize("name", BROKEN_DOWNLOADS)
@pytest.mark.parametrize("split", ["test", "train"])
def test_a_broken_zip_ends_the_run_before_anything_is_written(
    name: str, split: str, world: Path, data_config: MakeConfig, script: Callable[..., Any]
) -> None:
    archive = world / "images" / split / "00.zip"
    archive.write_bytes(content := BROKEN_DOWNLOADS[name](archive.read_bytes()))
    config = data_config(world)
    flags = ["--source", world, "--output_dir", config.output_dir, "--set", "source.train=[0]"]
    ended = script("prepare_data.py", *flags)
    assert ended.code == 2
    assert str(archive) in ended.err and f"{len(content)} bytes" in ended.err
    assert "download again" in ended.err and "Traceback" not in ended.err
    assert not list(config.output_dir.glob("*.parquet*"))
    assert not (config.output_dir / "images").exists()


def link(name: str, target: str) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info, target.encode()


def test_a_zip_cannot_write_outside_the_output_folder(
    osv_folder: OsvFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
    rows = make_rows(["FR", "DE", "BR", "JP", "NA", "MN"])
    for row, identifier in zip(rows, ["evil", "abs", "link", "good", "dots", "win"], strict=True):
        row["id"] = identifier
    entries = [
        ("../evil.jpg", make_jpeg(1)),
        (f"{tmp_path}/abs.jpg", make_jpeg(2)),
        link("00/link.jpg", f"{tmp_path}/secret.jpg"),
        ("00/good.jpg", make_jpeg(3)),
        ("00/../../../dots.jpg", make_jpeg(4)),
        ("C:\\..\\..\\win.jpg", make_jpeg(5)),
        ("00/..jpg", make_jpeg(6)),
    ]
    root = osv_folder(rows, test_zip=entries)
    (tmp_path / "secret.jpg").write_bytes(make_jpeg(9))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    config = data_config(root, limit=20)
    summary = prepare.run(config)
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert new and all(config.output_dir in path.parents for path in new)
    assert not any(path.is_symlink() for path in config.output_dir.rglob("*"))
    assert sorted(ids_of(config.output_dir, "eval_osv")) == ["abs", "dots", "evil", "good", "win"]
    assert list(summary["test"]["photos_damaged"]) == ["link"]


def test_an_entry_that_unpacks_to_any_size_is_not_unpacked(
    osv_folder: OsvFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(["FR", "DE"])
    monkeypatch.setattr(prepare, "MAX_PHOTO_BYTES", 50_000)
    bomb = make_jpeg(0) + bytes(50_000)  # a valid JPEG with a tail
    root = osv_folder(rows, test_zip=damage(photo_entries(rows), "00/1.jpg", bomb))
    summary = prepare.run(data_config(root, limit=9))
    assert summary["test"]["photos_damaged"] == {"1": "too large a zip entry"}


def test_a_csv_that_belongs_to_other_zips_matches_nothing(
    osv_folder: OsvFolder, data_config: MakeConfig, script: Callable[..., Any]
) -> None:
    entries = photo_entries(make_rows(["FR"] * 7, prefix="other"))
    config = data_config(osv_folder(make_rows(["FR", "DE"]), test_zip=entries))
    flags = ["--source", config.source.root, "--output_dir", config.output_dir, "--limit", 5]
    ended = script("prepare_data.py", *flags)
    assert ended.code == 2 and "0 of 7 photos matched" in ended.err
    assert not list(config.output_dir.glob("*.parquet"))


def test_a_header_only_says_zero_rows(osv_folder: OsvFolder, data_config: MakeConfig) -> None:
    root = osv_folder([], test_zip=photo_entries(make_rows(["FR"])))
    with pytest.raises(UserError, match=r"test\.csv has 0 rows; download again"):
        prepare.run(data_config(root, limit=1))


def test_photos_that_all_fail_to_decode_end_the_run(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR", "DE"])
    root = osv_folder(rows, test_zip=[(f"00/{row['id']}.jpg", b"text") for row in rows])
    config = data_config(root, limit=2)
    with pytest.raises(UserError, match=r"0 of 2 photos in .*00\.zip can be decoded; download"):
        prepare.run(config)
    assert not list(config.output_dir.glob("*.parquet"))


def test_every_kind_of_bad_row_is_counted_in_the_summary(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR"] * 8)
    rows[0]["latitude"], rows[1]["longitude"] = 91, ""
    rows[2].update(latitude=0, longitude=0)
    rows[3]["country"] = ""
    rows[4]["id"] = rows[5]["id"]
    rows += [{**rows[7], "id": "no photo"}, {**rows[7], "id": ""}]
    entries = [(f"00/{n}.jpg", make_jpeg(n)) for n in range(1, 9)]
    entries += [("__MACOSX/00/._1.jpg", b"x"), ("00\\unlisted.jpg", make_jpeg(50))]
    summary = prepare.run(data_config(osv_folder(rows, test_zip=entries), limit=50))
    assert_counts_add_up(summary)
    assert summary["test"] == {
        "csv_rows": 10,
        "zip_photos": 9,
        "zip_entries_ignored": {"junk_entry": 1},
        "photos_without_usable_row": 6,
        "rows_dropped": {
            "no_id": 1,
            "no_photo": 1,
            "duplicate_id": 1,
            "bad_coordinates": 2,
            "null_island": 1,
            "no_country": 1,
        },
        "labels_repaired": {"namibia": 0},
        "rows_usable": 3,
        "photos_damaged": {},
    }


def test_a_killed_run_leaves_no_split_without_its_photos_and_can_be_repeated(
    world: Path, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = data_config(world, size=8)
    prepare.run(config)
    whole = tree(config.output_dir)
    for path in config.output_dir.rglob("*"):
        if path.is_file():
            path.unlink()
    written = 0
    replace = Path.replace

    def die_sometime(self: Path, target: Path) -> Path:
        nonlocal written
        written += 1
        if written == 5:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", die_sometime)
    with pytest.raises(KeyboardInterrupt):
        prepare.run(config)
    assert not list(config.output_dir.glob("*.parquet"))
    prepare.run(config)
    for path in config.output_dir.rglob(".*.partial"):
        path.unlink()
    assert tree(config.output_dir) == whole


def test_a_photo_s_metadata_does_not_reach_the_stored_file(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    exif = Image.Exif()
    exif[0x010E] = "lat 52.5 lon 13.4"
    out = io.BytesIO()
    Image.open(io.BytesIO(make_jpeg(1))).save(out, "JPEG", exif=exif, comment=b"Berlin 52.5")
    config = data_config(
        osv_folder(make_rows(["DE"]), test_zip=[("00/1.jpg", out.getvalue())]), limit=1
    )
    prepare.run(config)
    stored = (config.output_dir / "images/test/1.jpg").read_bytes()
    assert b"52.5" not in stored and b"Exif" not in stored


def test_two_processes_cannot_prepare_one_folder(world: Path, data_config: MakeConfig) -> None:
    config = data_config(world)
    with artifacts.run_lock(config.output_dir), pytest.raises(UserError) as refused:
        prepare.run(config)
    assert f"process {os.getpid()}" in str(refused.value)


@pytest.mark.parametrize("root", [path for path in [SHARED_MINI] if path.is_dir()])
def test_the_real_photos_prepare_and_their_known_leak_is_cut(root: Path, tmp_path: Path) -> None:
    """Frames of one walk stand in both CSVs (sequence opensfm-lund)."""
    config = DataConfig(
        source=Source(root=root),
        output_dir=tmp_path / "data",
        image=SMALL,
        eval=EvalDraw(size=60, quick=20),
        train=TrainPool(cap=2),
    )
    summary = prepare.run(config)
    assert_counts_add_up(summary)
    assert summary["splits"]["eval_osv"]["rows"] == 60
    evaluation = pl.read_parquet(config.output_dir / "eval_osv.parquet")
    pool = pl.read_parquet(config.output_dir / "train_pool.parquet")
    walks = set(evaluation["sequence"].drop_nulls())
    assert not walks & set(pool["sequence"].drop_nulls())
    for lat, lon in pool.select("latitude", "longitude").iter_rows():
        for row in evaluation.select("latitude", "longitude").iter_rows():
            assert haversine_km(lat, lon, *row) > 1


def test_a_csv_in_any_order_prepares_the_same_split(
    world: Path, data_config: MakeConfig, tmp_path: Path
) -> None:
    config = data_config(world, size=6, limit=6)
    prepare.run(config)
    rows = pl.read_csv(world / "test.csv", infer_schema=False).to_dicts()
    random.Random(1).shuffle(rows)
    (world / "test.csv").write_text(csv_text(rows))
    again = data_config(world, size=6, limit=6, output_dir=tmp_path / "again")
    prepare.run(again)
    assert (again.output_dir / "eval_osv.manifest.json").read_bytes() == (
        config.output_dir / "eval_osv.manifest.json"
    ).read_bytes()


def test_splits_made_under_other_rules_are_not_mixed(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    root = osv_folder(make_rows(COUNTRIES), train=make_rows(COUNTRIES, prefix="t"))
    config = data_config(root)
    prepare.run(config)
    first = tree(config.output_dir)
    prepare.run(config)
    assert tree(config.output_dir) == first
    with pytest.raises(UserError, match=r"holds another run: eval\.size was 1000 and is now 2"):
        prepare.run(data_config(root, size=2))
    assert tree(config.output_dir) == first
    # A limit is the same run, cut short.
    prepare.run(config.model_copy(update={"limit": 2}))
