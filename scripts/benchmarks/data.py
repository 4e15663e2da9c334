"""Preparing a synthetic OSV-5M at full scale, against re-encoding every photo of it.

It needs Linux, 10 GB of disk and about ten minutes.
"""

import io
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from tqdm import tqdm

from benchmarks.inputs import csv_rows, photos
from benchmarks.measure import Figure, run_script, seconds
from geoguessr_rl.config import DataConfig, ImagePolicy

BOUND_SECONDS = 60.0
BOUND_GB = 1.5
BOUND_SPEEDUP = 4.0
BOUND_SLOPE = (0.6, 1.5)
BOUND_ZIPS = 1.3

CSV_ROWS = 4_900_000
ZIP_PHOTOS = 50_000
DRAWS = (4000, 8000, 16000)  # photos, for the slope
WORKERS = 2
SPLITS = ("eval_osv", "train_pool")  # eval_quick is a part of eval_osv

Place = tuple[str, str]  # a photo's zip, and its name there


def _draw_osv5m(root: Path, scale: float) -> None:
    """Writes a CSV of 2 GB and three zips, of which two are train."""
    rng = np.random.default_rng(0)
    rows, zipped = int(scale * CSV_ROWS), int(scale * ZIP_PHOTOS)
    total = rows + zipped // 10
    ids = rng.permutation(total).astype(np.int64) * 17 + 10**15
    zips = {
        "test/00": ids[rows:],
        "train/00": ids[:zipped],
        "train/01": ids[zipped : 2 * zipped],
    }
    for name, members in zips.items():
        path = root / "images" / f"{name}.zip"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = photos(max(20, int(scale * 1000)), rng)
        with zipfile.ZipFile(path, "w") as file:
            for n, member in enumerate(members):
                file.writestr(f"{path.stem}/{member}.jpg", drawn[n % len(drawn)])
    csv_rows(ids[rows:], rng).write_csv(root / "test.csv")
    shuffled = rng.permutation(ids[:rows])
    with (root / "train.csv").open("wb") as file:
        starts = range(0, rows, 700_000)
        for start in tqdm(starts, desc="  drawing train.csv", unit="part", leave=False):
            part = csv_rows(shuffled[start : start + 700_000], rng)
            part.write_csv(file, include_header=start == 0)


def _prepare(root: Path, *settings: str) -> tuple[float, int, set[str]]:
    """Prepares into a fresh folder; returns seconds, peak bytes, and the ids of the photos."""
    with tempfile.TemporaryDirectory(dir=root) as out:
        flags = [part for setting in settings for part in ("--set", setting)]
        places = ("--source", root, "--output_dir", out, "--workers", WORKERS)
        taken, peak = run_script("scripts/prepare_data.py", *places, *flags)
        splits = [pl.read_parquet(Path(out) / f"{name}.parquet") for name in SPLITS]
        return taken, peak, {Path(path).stem for one in splits for path in one["image_path"]}


def _encode_all(places: Sequence[Place]) -> int:
    """Reads, decodes and re-encodes photos as a pipeline without selection does."""
    from geoguessr_rl.images import fit, open_upright
    from geoguessr_rl.sources import read_photo

    policy = ImagePolicy()
    for place in places:
        image = fit(open_upright(read_photo(*place)), policy)
        image.save(io.BytesIO(), "JPEG", quality=policy.jpeg_quality)
    return len(places)


def _decode_all(places: Sequence[Place]) -> int:
    """Does the least that preparing takes: each photo's pixels, once, by Pillow alone."""
    from PIL import Image

    from geoguessr_rl.sources import read_photo

    for place in places:
        Image.open(io.BytesIO(read_photo(*place))).load()
    return len(places)


def _over_all(what: str, work: Callable[[Sequence[Place]], int], places: Sequence[Place]) -> float:
    """Returns how long the processes take for all photos."""
    from geoguessr_rl.photos import in_parallel

    with tqdm(total=len(places), desc=f"  {what}", unit="photo", mininterval=1, leave=False) as bar:
        return seconds(lambda: [bar.update(n) for n in in_parallel(work, places, WORKERS)])


def _read_bytes(path: Path) -> None:
    """Reads a file and looks at nothing in it."""
    buffer = bytearray(1 << 24)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def run(scale: float) -> list[Figure]:
    """Times `scripts/prepare_data.py`, and how its time grows with photos and with zips."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print("  drawing a synthetic OSV-5M", flush=True)
        _draw_osv5m(root, scale)
        table, archives = root / "train.csv", sorted(root.rglob("0?.zip"))
        csv_gb = table.stat().st_size / 1e9
        zips_gb = sum(path.stat().st_size for path in archives) / 1e9
        print(f"  train.csv {csv_gb:.1f} GB, zips {zips_gb:.1f} GB", flush=True)

        def prepare(what: str, *settings: str) -> tuple[float, int, set[str]]:
            print(f"  preparing {what}: ", end="", flush=True)
            measured = _prepare(root, *settings)
            print(f"{measured[0]:.1f} s", flush=True)
            return measured

        # At full scale these are the defaults; a trial keeps their share of the photos.
        usual = DataConfig()
        cap, size = (max(1, int(scale * n)) for n in (usual.train.cap, usual.eval.size))
        taken, peak, chosen = prepare("as usual", f"train.cap={cap}", f"eval.size={size}")
        places = [
            (str(archive), name)
            for archive in archives
            for name in zipfile.ZipFile(archive).namelist()
        ]
        needed = [place for place in places if Path(place[1]).stem in chosen]
        naive = _over_all("re-encoding all", _encode_all, places)
        decoding = _over_all("decoding the chosen", _decode_all, needed)
        reading = seconds(lambda: _read_bytes(table))

        draws = [max(20, int(scale * count)) for count in DRAWS]
        uniform = ("train.sampling=uniform", f"eval.size={size}")
        few, middle, many = (
            prepare(f"{count:,} photos", *uniform, f"train.size={count}")[0] for count in draws
        )
        one = prepare(
            f"{draws[1]:,} photos of one zip",
            *uniform, f"train.size={draws[1]}", "source.train=[0]",
        )[0]  # fmt: skip
    name = f"prepare {len(chosen):,} of {len(places):,} photos"
    low, high = BOUND_SLOPE
    return [
        Figure(name, taken, "s", at_most=BOUND_SECONDS),
        Figure(f"{name}, peak memory", peak / 1e9, "GB", at_most=BOUND_GB),
        Figure(
            "decode and re-encode every photo", naive / taken, "times", "prepare",
            at_least=BOUND_SPEEDUP,
        ),
        Figure(
            f"the step from {draws[1]:,} to {draws[2]:,} photos",
            (many - middle) / (2 * (middle - few)),
            "times", f"twice the step from {draws[0]:,} to {draws[1]:,}",
            at_least=low, at_most=high,
        ),
        Figure(
            f"prepare {draws[1]:,} photos of two zips", middle / one, "times", "as many of one zip",
            at_most=BOUND_ZIPS,
        ),
        Figure(
            "prepare", taken / decoding, "times",
            f"decoding the chosen photos once, {WORKERS} processes",
        ),
        Figure(
            "prepare", taken / reading, "times",
            f"reading the {csv_gb:.1f} GB of train.csv, which the page cache may hold",
        ),
    ]  # fmt: skip
