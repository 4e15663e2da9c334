"""Prepare: whatever the downloads hold, splits are whole, fair, apart, repeatable, and add up."""

import hashlib
import io
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import SMALL, csv_text, make_jpeg, make_rows, photo_entries, scene, write_zip
from PIL import Image

from geoguessr_rl import artifacts, data, photos, screen, sources
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends.predictions import generate
from geoguessr_rl.config import (
    Contamination,
    DataConfig,
    EvalDraw,
    Generation,
    ImagePolicy,
    Model,
    Pano,
    Prompt,
    Screen,
    Source,
    TrainPool,
)
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
    for kind, split in (("test", "eval_osv"), ("train", "train_pool"), ("pano", "eval_pano")):
        if counts := summary.get(kind):
            dropped = counts["dropped"]
            assert min(dropped.values()) >= 0
            assert counts["rows_selected"] + sum(dropped.values()) == counts["csv_rows"]
            assert counts["rows_selected"] == summary["splits"][split]["rows"]
            kinds = ("no_id", "no_photo", "duplicate_id", "bad_coordinates", "null_island")
            unusable = sum(dropped.get(name, 0) for name in (*kinds, "no_country"))
            assert sum(counts["countries_before"].values()) == counts["csv_rows"] - unusable
            reasons = Counter(why.partition(": ")[0] for why in counts["rejected"].values())
            assert reasons == {name: n for name, n in dropped.items() if n and name in reasons}


def contamination(summary: dict[str, Any]) -> dict[str, int]:
    names = ("same_photo", "same_sequence", "within_min_km", "near_duplicate")
    return {name: n for name in names if (n := summary["train"]["dropped"].get(name))}


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
    for some in (split.photos[:3], split.photos):  # the second call resumes
        rows_ = generate(path, some, scripted, Model(), Prompt(), Sampling())
        assert {row.id: row.country_iso2 for row in rows_} == {p.id: labels[p.id] for p in some}
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
    assert contamination(summary) == {"same_photo": 1, "same_sequence": 1, "within_min_km": 1}
    assert sorted(ids_of(config.output_dir, "train_pool")) == ["t3", "t4"]
    assert_counts_add_up(summary)


def test_the_pool_is_capped_by_country(world: Path, data_config: MakeConfig) -> None:
    config = data_config(world, size=5, train=TrainPool(cap=4))
    summary = prepare.run(config)
    table = pl.read_parquet(config.output_dir / "train_pool.parquet")
    assert dict(table["country_iso2"].value_counts().iter_rows()) == dict.fromkeys(COUNTRIES, 4)
    assert summary["train"]["dropped"]["not_drawn"] == 10
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
    shutil.rmtree(config.output_dir)

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
    assert list(summary[split]["rejected"]) == [whole[2]]
    assert summary[split]["rejected"][whole[2]]
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
    assert list(summary["test"]["rejected"]) == ["2"]


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
    assert list(summary["test"]["rejected"]) == ["link"]


def test_an_entry_that_unpacks_to_any_size_is_not_unpacked(
    osv_folder: OsvFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(["FR", "DE"])
    monkeypatch.setattr(sources, "MAX_PHOTO_BYTES", 50_000)
    bomb = make_jpeg(0) + bytes(50_000)  # a valid JPEG with a tail
    root = osv_folder(rows, test_zip=damage(photo_entries(rows), "00/1.jpg", bomb))
    summary = prepare.run(data_config(root, limit=9))
    assert summary["test"]["rejected"] == {"1": "damaged: too large a zip entry"}


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
    with pytest.raises(UserError, match=r"0 of 2 photos in .*00\.zip can be used .*; download"):
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
        "labels_repaired": {"namibia": 0},
        "countries_before": {"FR": 3},
        "dropped": {
            "no_id": 1,
            "no_photo": 1,
            "duplicate_id": 1,
            "bad_coordinates": 2,
            "null_island": 1,
            "no_country": 1,
            "not_drawn": 0,
            "damaged": 0,
        },
        "rows_selected": 3,
        "rejected": {},
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


@pytest.mark.parametrize("max_bits", [40, None])
def test_a_train_photo_that_looks_like_an_evaluation_photo_is_replaced_and_counted(
    max_bits: int | None, osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    test = make_rows(["FR", "DE"])
    train = make_rows(["BR"] * 6, prefix="t")
    for n, row in enumerate(train):
        row.update(latitude=10 + n, longitude=100.0)
    entries = [(f"00/t{n}.jpg", scene(100 + n)) for n in range(1, 7)]
    root = osv_folder(
        test,
        train=train,
        test_zip=[("00/1.jpg", scene(1)), ("00/2.jpg", scene(2))],
        train_zip=entries,
    )
    config = data_config(
        root,
        train=TrainPool(cap=4),
        contamination=Contamination(max_hash_bits=max_bits),
    )
    summary = prepare.run(config)
    drawn = ids_of(config.output_dir, "train_pool")
    assert not contamination(summary) and len(drawn) == 4
    shutil.rmtree(config.output_dir)

    # The second of the draw becomes an evaluation photo at another size and quality.
    likeness = scene(2, (192, 128), quality=50)
    entries = [(name, likeness if drawn[1] in name else one) for name, one in entries]
    write_zip(root / "images/train/00.zip", entries)
    summary = prepare.run(config)
    now = ids_of(config.output_dir, "train_pool")
    if max_bits is None:  # without the guard the leak goes through
        assert now == drawn
        return
    assert contamination(summary) == {"near_duplicate": 1}
    assert summary["train"]["rejected"][drawn[1]].startswith("near_duplicate: like 2, ")
    assert len(now) == 4 and drawn[1] not in now
    assert [now[n] for n in (0, 2, 3)] == [drawn[n] for n in (0, 2, 3)]
    assert not (config.output_dir / f"images/train/{drawn[1]}.jpg").exists()
    assert_counts_add_up(summary)
    first = tree(config.output_dir)
    prepare.run(config)
    assert tree(config.output_dir) == first


def test_more_processes_give_the_same_bytes(
    osv_folder: OsvFolder, data_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(COUNTRIES, each=20)
    entries = photo_entries(rows)
    for n in (3, 4, 40, 77):
        entries = damage(entries, f"00/{n}.jpg", b"text")
    root = osv_folder(rows, train=make_rows(["MN"], prefix="t"), test_zip=entries)
    monkeypatch.setattr(photos, "FEW", 0)
    monkeypatch.setattr(photos, "BLOCK", 3)
    trees = []
    for workers in (1, 2, 5):
        config = data_config(
            root, size=60, limit=60, workers=workers, output_dir=tmp_path / str(workers)
        )
        summary = prepare.run(config)
        assert summary["test"]["dropped"]["damaged"] > 0
        trees.append(tree(config.output_dir))
        trees[-1].pop(artifacts.RESOLVED_CONFIG)
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.parametrize("sampling", ["uniform", "inverse_density"])
def test_the_other_draws_take_as_many_as_asked_and_add_up(
    sampling: str, world: Path, data_config: MakeConfig
) -> None:
    config = data_config(world, size=10, train=TrainPool(sampling=sampling, size=13))
    summary = prepare.run(config)
    assert summary["splits"]["train_pool"]["rows"] == 13
    assert_counts_add_up(summary)


def test_reading_text_without_its_package_is_refused_before_any_work(
    world: Path, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "find_spec", lambda name: None)
    config = data_config(world, screen=Screen(text=True))
    with pytest.raises(UserError, match="needs rapidocr-onnxruntime"):
        prepare.run(config)
    assert not (config.output_dir / "images").exists()


def test_a_rule_of_the_screen_rejects_and_counts(
    osv_folder: OsvFolder, data_config: MakeConfig
) -> None:
    rows = make_rows(["FR", "FR", "DE"])
    black = make_jpeg(0, (96, 64))
    out = io.BytesIO()
    Image.new("RGB", (96, 64)).save(out, "JPEG")
    entries = [("00/1.jpg", scene(1)), ("00/2.jpg", out.getvalue()), ("00/3.jpg", black)]
    root = osv_folder(rows, test_zip=[entries[0], entries[1], ("00/3.jpg", scene(3))])
    config = data_config(root, limit=3, screen=Screen(blank=True, max_aspect=2.0))
    summary = prepare.run(config)
    assert summary["test"]["dropped"]["extreme_aspect"] == 0  # a rule has its count, hit or not
    assert summary["test"]["dropped"]["blank_frame"] == 1
    assert sorted(ids_of(config.output_dir, "eval_osv")) == ["1", "3"]
    assert_counts_add_up(summary)


def children(pid: int) -> list[str]:
    """The processes that a process has started; none where there is no Linux /proc."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return path.read_text().split() if path.exists() else []


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    osv_folder: OsvFolder,
    data_config: MakeConfig,
    tmp_path: Path,
    start_script: Callable[..., Any],
) -> None:
    rows = make_rows([f"{a}{b}" for a in "DFGIN" for b in "EO"] * 40)
    rows = [{**row, "country": "NO"} for row in rows]
    train = [{**row, "id": f"t{row['id']}", "latitude": -float(row["latitude"])} for row in rows]
    root = osv_folder(
        rows,
        train=train,
        test_zip=[(f"00/{row['id']}.jpg", scene(n)) for n, row in enumerate(rows)],
        train_zip=[(f"00/{row['id']}.jpg", scene(-n - 1)) for n, row in enumerate(train)],
    )

    def flags(name: str) -> list[object]:
        policy = json.dumps(SMALL.model_dump())
        rules = ["--set", f"image={policy}", "--set", "source.train=[0]", "--set", "seed=7"]
        return ["--source", root, "--output_dir", tmp_path / name, "--workers", 2, *rules]

    undisturbed = start_script("prepare_data.py", *flags("whole"))
    assert undisturbed.wait(timeout=120) == 0, undisturbed.stderr.read()
    whole = tree(tmp_path / "whole")
    out = tmp_path / "killed"
    delays, kills = iter([0.9, 1.2, 1.5, 1.8, 2.1]), 0
    while True:
        process = start_script("prepare_data.py", *flags("killed"))
        try:
            code = process.wait(timeout=next(delays, 120))
        except subprocess.TimeoutExpired:
            workers = children(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            deadline = time.monotonic() + 20
            while any(Path(f"/proc/{one}").exists() for one in workers):  # none waits for ever
                assert time.monotonic() < deadline, "a worker outlived its parent"
                time.sleep(0.05)
            for path in out.rglob("*"):  # whatever has its final name is whole
                if path.suffix == ".jpg":
                    assert hashlib.sha256(path.read_bytes()).hexdigest() in whole.values()
                elif path.suffix in (".json", ".parquet") and not path.name.startswith("."):
                    assert path.stat().st_size > 0
            continue
        assert code == 0, process.stderr.read()
        break
    assert kills >= 1  # how many depends on the machine
    killed = tree(out)
    for files in (killed, whole):
        files.pop(artifacts.RESOLVED_CONFIG)
    assert killed == whole


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


def test_a_limit_does_not_cut_what_was_prepared(world: Path, data_config: MakeConfig) -> None:
    config = data_config(world, size=8)
    for limit in (4, 6):  # a longer run extends a shorter one
        summary = prepare.run(config.model_copy(update={"limit": limit}))
        assert summary["splits"]["eval_osv"]["rows"] == limit
    with pytest.raises(UserError, match="holds 6 evaluation photos already, and --limit 5 would"):
        prepare.run(config.model_copy(update={"limit": 5}))
    prepare.run(config)
    whole = tree(config.output_dir)
    with pytest.raises(UserError, match="holds 8 evaluation photos already"):
        prepare.run(config.model_copy(update={"limit": 8}))  # it would lose train from the summary
    assert tree(config.output_dir) == whole


def rebuilt(config: DataConfig, out: Path, name: str, tmp: Path) -> Path:
    """Rebuilds one split elsewhere from its manifest alone, and returns the folder."""
    manifest = out / f"{name}.manifest.json"
    target = tmp / "elsewhere"
    # Another machine's rules: the manifest's own count.
    other = config.model_copy(
        update={"output_dir": target, "seed": 99, "eval": EvalDraw(size=1), "image": ImagePolicy()}
    )
    prepare.rebuild(other, manifest)
    return target


@pytest.mark.parametrize("name", ["eval_osv", "eval_quick", "train_pool"])
def test_a_manifest_rebuilds_its_split_to_the_byte(
    name: str, world: Path, data_config: MakeConfig, tmp_path: Path
) -> None:
    config = data_config(world, size=9)
    prepare.run(config)
    out = config.output_dir
    target = rebuilt(config, out, name, tmp_path)
    files = tree(target)
    for extra in (artifacts.IDENTITY, photos.LEDGER):
        files.pop(extra)
    whole = tree(out)
    assert {key: whole[key] for key in files} == files
    assert len(files) == 2 + len(ids_of(out, name))
    assert rebuilt(config, out, name, tmp_path) == target  # again changes nothing
    assert {key: value for key, value in tree(target).items() if key in files} == files


def test_a_rebuild_names_the_photos_that_it_cannot_find_or_read(
    world: Path, osv_folder: OsvFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
    config = data_config(world, size=9)
    prepare.run(config)
    lost, broken, other = ids_of(config.output_dir, "eval_osv")[:3]
    archive = world / "images/test/00.zip"
    with zipfile.ZipFile(archive) as file:
        entries = [(info.filename, file.read(info)) for info in file.infolist()]
    changed = {
        f"00/{broken}.jpg": (b"text", f"1 photos cannot be decoded from {world}: {broken}"),
        f"00/{other}.jpg": (scene(5), f"1 photos differ from .*: {other}"),
        f"00/{lost}.jpg": (None, f"1 photos cannot be found in {world}: {lost}"),
    }
    for name, (content, says) in changed.items():
        write_zip(
            archive,
            [(n, content if n == name else c) for n, c in entries if n != name or content],
        )
        with pytest.raises(UserError, match=says):
            rebuilt(config, config.output_dir, "eval_osv", tmp_path)
        assert not list((tmp_path / "elsewhere").glob("*.parquet"))


def test_a_rebuild_does_not_replace_another_set(
    world: Path, data_config: MakeConfig, tmp_path: Path, script: Callable[..., Any]
) -> None:
    config = data_config(world, size=9)
    prepare.run(config)
    with pytest.raises(UserError, match="holds another run"):
        prepare.rebuild(config, config.output_dir / "eval_osv.manifest.json")
    target = rebuilt(config, config.output_dir, "eval_osv", tmp_path)
    second = data_config(world, size=4, output_dir=tmp_path / "second")
    prepare.run(second)
    flags = ["--source", world, "--output_dir", target, "--manifest"]
    ended = script("prepare_data.py", *flags, second.output_dir / "eval_osv.manifest.json")
    assert ended.code == 2 and "holds another eval_osv" in ended.err
    ended = script("prepare_data.py", *flags, config.output_dir / "eval_osv.manifest.json")
    assert ended.code == 0 and "rebuilt 9 rows" in ended.out
    flags = ["--source", world, "--output_dir", target, "--set", "source.train=[0]"]
    ended = script("prepare_data.py", *flags)
    assert ended.code == 2 and "holds another run" in ended.err


def test_a_manifest_of_a_folder_asks_for_the_folder(world: Path, data_config: MakeConfig) -> None:
    config = data_config(world, size=9)
    prepare.run(config)
    here = config.model_copy(update={"source": Source()})
    with pytest.raises(UserError, match="was made from a folder; name yours with --source"):
        prepare.rebuild(here, config.output_dir / "eval_osv.manifest.json")


def pano_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes the pano set's columns as its parquet has them, over two files."""
    folder.mkdir(parents=True, exist_ok=True)
    half = (len(rows) + 1) // 2
    for n, part in enumerate((rows[:half], rows[half:])):
        pl.DataFrame(part).write_parquet(folder / f"train-{n:05d}-of-00002.parquet")
    return folder


def strip(seed: int) -> bytes:
    """A panorama of four quarters with a brightness of their own, 2033 by 561 at a quarter."""
    whole = Image.new("RGB", (508, 140))
    for n in range(4):
        quarter = Image.open(io.BytesIO(scene(4 * seed + n, (127, 140))))
        whole.paste(quarter, (127 * n, 0))
    out = io.BytesIO()
    whole.save(out, "PNG")
    return out.getvalue()


def pano_rows(countries: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "image": {"bytes": strip(n), "path": f"20221001_{code} {n}.jpg"},
            "country_iso_alpha2": code,
            "latitude": str(30.5 + n),  # text, as in the real set
            "longitude": str(-60.25),
            "address": f"Secret street {n}, {code}",
        }
        for n, code in enumerate(countries)
    ]


@pytest.mark.parametrize(
    ("view", "size"), [("crop", (256, 128)), ("strip", (512, 128)), ("quad", (256, 256))]
)
def test_the_pano_set_is_a_second_evaluation_set_that_train_stays_away_from(
    view: str, size: tuple[int, int], osv_folder: OsvFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
    rows = pano_rows(["FR", "DE", "NA", "FR", "JP"])
    rows[1]["longitude"] = "east"
    rows[3]["image"]["bytes"] = b"text"
    train = make_rows(["BR"] * 3, prefix="t")
    train[0].update(latitude=32.5, longitude=-60.251)  # beside the third panorama
    root = osv_folder(make_rows(["FR"]), train=train)
    config = data_config(
        root,
        image=ImagePolicy(long_edge=512, min_pixels=1024, max_pixels=65536),
        pano=Pano(root=pano_parquet(tmp_path / "pano", rows), size=5, view=view),
        contamination=Contamination(max_hash_bits=40),
    )
    summary = prepare.run(config)
    assert_counts_add_up(summary)
    assert contamination(summary) == {"within_min_km": 1}
    assert summary["pano"]["dropped"] == {
        "duplicate_id": 0,
        "bad_coordinates": 1,
        "null_island": 0,
        "no_country": 0,
        "not_drawn": 0,
        "damaged": 1,
    }
    split = data.load_split(config.output_dir, "eval_pano")
    assert split.role == "evaluation" and not split.publishable
    labels = {photo.id: (photo.latitude, photo.country_iso2) for photo in split.photos}
    assert labels == {
        "pano000000": (30.5, "FR"),
        "pano000002": (32.5, "NA"),
        "pano000004": (34.5, "JP"),
    }
    for photo in split.photos:
        with Image.open(photo.path) as image:
            assert abs(image.width - size[0]) <= 32 and abs(image.height - size[1]) <= 32
    for path in config.output_dir.rglob("*"):  # the address never leaves the reader
        if path.is_file():
            assert b"Secret" not in path.read_bytes() and b"20221001" not in path.read_bytes()
    target = rebuilt(config, config.output_dir, "eval_pano", tmp_path)
    assert (target / "eval_pano.parquet").read_bytes() == (
        config.output_dir / "eval_pano.parquet"
    ).read_bytes()


def test_a_pano_set_is_left_out_in_words_beside_a_folder_and_on_request(
    world: Path, data_config: MakeConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prepare.run(data_config(world))
    assert "eval_pano: left out" in capsys.readouterr().out
    config = data_config(world, pano=Pano(size=0), output_dir=tmp_path / "other")
    assert "eval_pano" not in prepare.run(config)["splits"]
    assert "eval_pano" not in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    config = data_config(world, pano=Pano(root=tmp_path / "empty"), output_dir=tmp_path / "third")
    with pytest.raises(UserError, match="holds no parquet files"):
        prepare.run(config)
    (tmp_path / "empty/a.parquet").write_bytes(b"<html>")
    with pytest.raises(UserError, match=r"a\.parquet is no whole parquet file"):
        prepare.run(config)
    part = tmp_path / "part"
    (pano_parquet(part, pano_rows(["FR", "DE"])) / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match="holds 1 of 2 parquet files; download again"):
        prepare.run(config.model_copy(update={"pano": Pano(root=part)}))
    pl.DataFrame({"image": [b""], "latitude": [1.0]}).write_parquet(tmp_path / "empty/a.parquet")
    with pytest.raises(UserError, match="has no column 'longitude'; it holds"):
        prepare.run(config)
