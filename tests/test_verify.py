"""Verify: each rule that prepared files can break is seen broken, and named."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import make_rows, scene
from PIL import Image

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError, file_sha256
from geoguessr_rl.config import Contamination, DataConfig
from geoguessr_rl.phases import prepare, verify


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder: four evaluation photos and six train photos, each its own scene."""
    from conftest import SMALL, csv_text, write_zip

    root = tmp_path_factory.mktemp("osv5m")
    tables = {
        "test": make_rows(["FR", "DE"], each=2),
        "train": [{**row, "longitude": 150.5} for row in make_rows(["BR"] * 6, prefix="t")],
    }
    for n, (split, rows) in enumerate(tables.items()):
        (root / f"{split}.csv").write_text(csv_text(rows))
        entries = [(f"00/{row['id']}.jpg", scene(10 * n + m)) for m, row in enumerate(rows)]
        write_zip(root / f"images/{split}/00.zip", entries)
    config = DataConfig(
        source={"root": root, "train": [0]}, output_dir=root / "data", image=SMALL, workers=1
    )
    prepare.run(config)
    return root / "data"


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder that a test may spoil."""
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def verified(folder: Path, **rules: Any) -> str:
    return verify.run(
        DataConfig(output_dir=folder, workers=1, contamination=Contamination(**rules))
    )


def problems(folder: Path, capsys: pytest.CaptureFixture[str], **rules: Any) -> list[str]:
    capsys.readouterr()
    with pytest.raises(UserError, match=r"breaks \d+ rules"):
        verified(folder, **rules)
    return [line for line in capsys.readouterr().out.splitlines() if line]


def change_table(
    folder: Path, name: str, change: Callable[[pl.DataFrame], pl.DataFrame], **manifest: Any
) -> None:
    """Changes a split's rows, and its manifest with them, as a careless script would."""
    path = folder / f"{name}.parquet"
    table = change(pl.read_parquet(path))
    artifacts.write_parquet(path, table)
    sha256 = {Path(p).stem: file_sha256(folder / p) for p in table["image_path"]}
    old = data.read_manifest(data.manifest_path(folder, name))
    new = data.build_manifest(
        name,
        manifest.get("role", old["role"]),
        table,
        sha256,
        image_policy=old["image"],
        dataset=old["dataset"],
    )
    artifacts.write_json(data.manifest_path(folder, name), new)


def first(folder: Path, name: str) -> dict[str, Any]:
    return pl.read_parquet(folder / f"{name}.parquet").row(0, named=True)


def set_first(column: str, value: Any) -> Callable[[pl.DataFrame], pl.DataFrame]:
    def change(table: pl.DataFrame) -> pl.DataFrame:
        values = [value, *table[column].to_list()[1:]]
        return table.with_columns(pl.Series(column, values, dtype=table.schema[column]))

    return change


def test_what_prepare_wrote_passes(folder: Path, script: Callable[..., Any]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*") if path.is_file()}
    assert verified(folder).startswith("verified 3 splits with 14 photos: ")
    ended = script("prepare_data.py", "--output_dir", folder, "--verify")
    assert ended.code == 0 and "2 pairs of train and evaluation apart" in ended.out
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*") if path.is_file()}
    assert {p: t for p, t in after.items() if p.name != ".lock"} == {
        p: t for p, t in before.items() if p.name != ".lock"
    }


def test_a_broken_rule_is_exit_code_2(folder: Path, script: Callable[..., Any]) -> None:
    (folder / first(folder, "train_pool")["image_path"]).unlink()
    ended = script("prepare_data.py", "--output_dir", folder, "--verify")
    assert ended.code == 2 and "breaks 1 rules" in ended.err and "Traceback" not in ended.err
    assert "train_pool: missing or damaged: 1 photos: t" in ended.out


@pytest.mark.parametrize("damage", ["missing", "text", "other pixels", "other size"])
def test_photos_are_read_again(
    damage: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = first(folder, "train_pool")
    path, identifier = folder / row["image_path"], Path(row["image_path"]).stem
    says = {
        "missing": ["missing or damaged"],
        "text": ["missing or damaged"],
        "other pixels": ["bytes differ from the manifest"],
        "other size": ["bytes differ from the manifest", "size breaks the image policy"],
    }[damage]
    if damage == "missing":
        path.unlink()
    elif damage == "text":
        path.write_bytes(b"not found")
    else:
        size = (96, 64) if damage == "other pixels" else (96, 61)
        path.write_bytes(scene(99, size))
    found = problems(folder, capsys)
    assert found == [f"train_pool: {what}: 1 photos: {identifier}" for what in says]


def test_labels_and_order_are_the_manifest_s(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "eval_osv.parquet"
    table = pl.read_parquet(path)
    for changed in (
        set_first("latitude", 12.0)(table),
        set_first("country_iso2", "AT")(table),
        table.reverse(),
    ):
        artifacts.write_parquet(path, changed)
        assert problems(folder, capsys) == [
            "eval_osv: labels or order differ from the manifest's fingerprint"
        ]


def test_impossible_labels_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_table(folder, "train_pool", set_first("latitude", 91.0))
    change_table(folder, "eval_osv", set_first("country_iso2", "ZZ"))
    assert [line.partition(": 1 photos")[0] for line in problems(folder, capsys)] == [
        "eval_osv: no such country code",
        "train_pool: no place on Earth",
    ]


def test_a_role_that_the_name_denies_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_table(folder, "eval_quick", lambda table: table, role="train")
    assert "eval_quick: has the role train" in problems(folder, capsys)


def test_a_shared_sequence_and_a_near_place_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_table(folder, "eval_osv", set_first("sequence", "walk"))
    change_table(folder, "train_pool", set_first("sequence", "walk"))
    assert problems(folder, capsys) == ["train_pool and eval_osv: same_sequence: 1 photos"]
    change_table(folder, "train_pool", set_first("sequence", None))
    place = first(folder, "eval_osv")
    change_table(folder, "train_pool", set_first("latitude", place["latitude"] + 0.003))
    change_table(folder, "train_pool", set_first("longitude", place["longitude"]))
    found = problems(folder, capsys)
    assert "train_pool and eval_osv: within_min_km: 1 photos" in found
    assert verified(folder, min_km=0.1).startswith("verified")  # by the rules at hand


def test_a_photo_in_two_roles_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = first(folder, "eval_osv")
    change_table(folder, "train_pool", set_first("image_path", row["image_path"]))
    found = problems(folder, capsys)
    assert "train_pool and eval_osv: same_photo: 1 photos" in found


def test_a_likeness_is_named_with_its_distance(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder / first(folder, "eval_osv")["image_path"]
    target = folder / first(folder, "train_pool")["image_path"]
    with Image.open(source) as image:
        image.save(target, "JPEG", quality=40)
    change_table(folder, "train_pool", lambda table: table)
    found = problems(folder, capsys)
    pair = f"near_duplicate: {target.stem} and {source.stem}, "
    assert any(pair in line and line.endswith("of 256 bits differ") for line in found)
    assert verified(folder, max_hash_bits=None).startswith("verified")


def test_a_folder_without_splits_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no split; run scripts/prepare_data"):
        verified(tmp_path)


def test_many_photos_are_named_by_the_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (folder / "images/train").glob("*.jpg"):
        path.write_bytes(io.BytesIO().getvalue())
    assert problems(folder, capsys) == [
        "train_pool: missing or damaged: 6 photos: t1, t2, t3, t4, t5 …"
    ]
    assert json.loads((folder / "train_pool.manifest.json").read_text())["rows"] == 6
