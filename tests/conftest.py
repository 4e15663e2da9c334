"""Fixtures that several test modules share: small OSV-5M folders, prepared splits, the scripts."""

import csv
import io
import os
import random
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from PIL import Image

from geoguessr_rl import artifacts, data
from geoguessr_rl.config import Contamination, DataConfig, EvalDraw, ImagePolicy, Source
from geoguessr_rl.embedded import OSV5M_COLUMNS
from geoguessr_rl.records import PHOTO_SCHEMA

ROOT = Path(__file__).parents[1]
SMALL = ImagePolicy(long_edge=160, min_pixels=1024)

Row = dict[str, Any]
Entry = tuple[str | zipfile.ZipInfo, bytes]


def make_jpeg(seed: int, size: tuple[int, int] = (96, 64)) -> bytes:
    """A bare JPEG of blocks, different for each seed."""
    rng = random.Random(seed)
    blocks = Image.frombytes("RGB", (6, 4), rng.randbytes(72))
    out = io.BytesIO()
    blocks.resize(size, Image.Resampling.NEAREST).save(out, "JPEG", quality=90)
    return out.getvalue()


def scene(seed: int, size: tuple[int, int] = (96, 64), quality: int = 90) -> bytes:
    """A picture that no other seed's looks like: blobs of grey, as far as a hash can see."""
    blobs = random.Random(seed).randbytes(12 * 8)
    picture = Image.frombytes("L", (12, 8), blobs).resize(size, Image.Resampling.BICUBIC)
    out = io.BytesIO()
    picture.convert("RGB").save(out, "JPEG", quality=quality)
    return out.getvalue()


def make_rows(countries: Sequence[str], *, prefix: str = "", each: int = 1) -> list[Row]:
    """`each` rows a country, every row at least 10 degrees of latitude or longitude from others."""
    rows = []
    for n, country in enumerate([code for code in countries for _ in range(each)]):
        place = {"latitude": -80 + n % 17 * 10 + 0.5, "longitude": -170 + n // 17 * 10 + 0.5}
        rows.append({"id": f"{prefix}{n + 1}", **place, "country": country})
    return rows


def csv_text(rows: Sequence[Row], columns: Sequence[str] = tuple(OSV5M_COLUMNS)) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def write_zip(path: Path, entries: Sequence[Entry]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries:
            file.writestr(name, content)


def photo_entries(rows: Sequence[Row]) -> list[Entry]:
    return [(f"00/{row['id']}.jpg", make_jpeg(n)) for n, row in enumerate(rows)]


@pytest.fixture
def osv_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder in the OSV-5M layout and returns it.

    Rows are dicts of CSV cells; a table may also be given as bytes, and a zip as bytes or as
    entries of (name, content). Without entries there is one good photo a row.
    """

    def make(
        test: Sequence[Row] | bytes = (),
        *,
        train: Sequence[Row] | bytes = (),
        test_zip: Sequence[Entry] | bytes | None = None,
        train_zip: Sequence[Entry] | bytes | None = None,
        root: Path = tmp_path / "osv5m",
    ) -> Path:
        for split, rows, archive in (("test", test, test_zip), ("train", train, train_zip)):
            table = rows if isinstance(rows, bytes) else csv_text(rows).encode()
            target = root / "images" / split / "00.zip"
            target.parent.mkdir(parents=True, exist_ok=True)
            (root / f"{split}.csv").write_bytes(table)
            if isinstance(archive, bytes):
                target.write_bytes(archive)
            else:
                entries = photo_entries([] if isinstance(rows, bytes) else rows)
                write_zip(target, entries if archive is None else archive)
        return root

    return make


@pytest.fixture
def data_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """Makes the config that prepares a small folder into `tmp_path / "data"`."""

    def make(root: Path, *, size: int = 1000, **keys: Any) -> DataConfig:
        settings: dict[str, Any] = {
            "source": Source(root=root, train=[0], test=[0]),
            "output_dir": tmp_path / "data",
            "image": SMALL,
            "eval": EvalDraw(size=size, quick=3),
            # The plain photos of these tests look alike.
            "contamination": Contamination(max_hash_bits=None),
        }
        return DataConfig(**{**settings, **keys})

    return make


@pytest.fixture
def make_split() -> Callable[..., Path]:
    """Writes a prepared split of (id, latitude, longitude, country) without its photo files."""

    def make(
        data_dir: Path,
        photos: Sequence[tuple[str, float, float, str]],
        *,
        name: str = "eval_osv",
        role: data.Role = "evaluation",
    ) -> Path:
        keys = ("image_path", "latitude", "longitude", "country_iso2")
        rows = [dict(zip(keys, (f"images/{p[0]}.jpg", *p[1:]), strict=True)) for p in photos]
        table = pl.DataFrame(rows, schema=PHOTO_SCHEMA)
        sha256 = {photo[0]: f"hash of {photo[0]}" for photo in photos}
        policy = SMALL.model_dump()
        manifest = data.build_manifest(name, role, table, sha256, image_policy=policy, dataset={})
        artifacts.write_parquet(data_dir / f"{name}.parquet", table)
        artifacts.write_json(data.manifest_path(data_dir, name), manifest)
        return data_dir

    return make


def make_checkpoint(folder: Path, step: int, state: str = "{}") -> Path:
    """Writes the smallest files that stand for a trainer's whole checkpoint."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        write_zip(path / name, [("data", b"0")])
    (path / "trainer_state.json").write_text(state)
    return path


ENGINE_WRITES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD")
BEFORE_ENGINES = {name: os.environ[name] for name in ENGINE_WRITES if name in os.environ}


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Keeps what an engine in this process writes into the environment from child processes.

    They would join the process group of the test run and find its port taken, and preload
    libraries from a path that a space cuts in two.
    """
    yield
    for name in ENGINE_WRITES:
        os.environ.pop(name, None)
    os.environ.update(BEFORE_ENGINES)


class Ended(NamedTuple):
    """How a script ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Runs a script of `scripts/` in this process, as its command line would."""

    def run(name: str, *args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def start_script() -> Callable[..., "subprocess.Popen[str]"]:
    """Starts a script of `scripts/` in a process of its own, which ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *args: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / name), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
        )
        started.append(process)
        return process

    yield start  # type: ignore[misc]
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small embedded world, prepared, and an untrained tiny model beside it."""
    from small_runs import build_world  # late: it builds a model

    return build_world(tmp_path_factory.mktemp("training"))
