"""What the tasks are measured on: completions, OSV-5M's labels and photos, the embedded world."""

import io
from pathlib import Path

import numpy as np
import polars as pl
from tqdm import tqdm

from benchmarks.measure import run_script
from geoguessr_rl.config import CONFIGS
from geoguessr_rl.countries import CODES

CLUES = (
    "Cyrillic signs above a kiosk, a long straight road with a worn dashed centre line, dry steppe "
    "grass up to the horizon, low concrete poles with two insulators, a white plate with a blue "
    "band, and a pale dry sky. The people drive on the right. All of it fits Central Asia, and the "
    "letters on the second sign are Kazakh, not Russian."
)
"""As long as a model's thinking usually is."""


def csv_rows(ids: np.ndarray, rng: np.random.Generator) -> pl.DataFrame:
    """Returns rows about as wide as OSV-5M's, with countries as unevenly spread."""
    from geoguessr_rl.embedded import OSV5M_COLUMNS

    n = len(ids)
    codes = np.array(sorted(CODES))[:222]
    share = np.random.default_rng(1).pareto(1.0, len(codes)) + 0.1
    country = pl.Series(rng.choice(codes, n, p=share / share.sum()))
    frame = pl.DataFrame({name: rng.integers(0, 9999, n) for name in OSV5M_COLUMNS})
    place = pl.col("city").cast(pl.String)
    return frame.with_columns(
        pl.Series("id", ids).cast(pl.String),
        country.alias("country"),
        pl.Series("latitude", np.degrees(np.arcsin(rng.uniform(-0.9, 0.95, n)))),
        pl.Series("longitude", rng.uniform(-180, 180, n)),
        pl.lit("thumbnail" * 20).alias("thumb_original_url"),
        pl.lit("(0, 8)").alias("cell"),
        (pl.lit("sequence-") + pl.Series(rng.integers(0, 3_000_000, n)).cast(pl.String)).alias(
            "sequence"
        ),
        *((pl.lit(f"{name} ") + place).alias(name) for name in ("region", "sub-region", "city")),
        *((pl.lit(f"{name} ") + place).alias(name) for name in OSV5M_COLUMNS if "unique" in name),
        (pl.lit("mapper ") + pl.col("creator_id").cast(pl.String)).alias("creator_username"),
    ).select(OSV5M_COLUMNS)


def photos(count: int, rng: np.random.Generator) -> list[bytes]:
    """Returns JPEGs of about 50 kB; every third has a size that the image policy changes."""
    from PIL import Image

    drawn = []
    for n in tqdm(range(count), desc="  drawing photos", unit="photo", mininterval=1, leave=False):
        size = (800, 600) if n % 3 == 0 else (640, 480)
        blobs = Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
        photo = np.asarray(blobs.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.integers(-5, 6, (size[1], size[0], 1))
        out = io.BytesIO()
        Image.fromarray((photo + grain).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=75)
        drawn.append(out.getvalue())
    return drawn


def truth(rows: int, rng: np.random.Generator) -> pl.DataFrame:
    """Returns the table of a split with labels as OSV-5M has them."""
    from geoguessr_rl.places import nearest_places
    from geoguessr_rl.records import PHOTO_SCHEMA

    points = list(zip(rng.uniform(-60, 75, rows), rng.uniform(-180, 180, rows), strict=True))
    return pl.DataFrame(
        [
            {
                "image_path": f"images/{n + 10**15}.jpg",
                "latitude": latitude,
                "longitude": longitude,
                "country_iso2": place.country_iso2,
                "region": place.region or None,
                "sub_region": place.sub_region or None,
                "city": place.city,
            }
            for n, ((latitude, longitude), place) in enumerate(
                zip(points, nearest_places(points), strict=True)
            )
        ],
        schema=PHOTO_SCHEMA,
    )


def draw_embedded_world(root: Path) -> None:
    """Draws the embedded world, builds the tiny model, and prepares the data."""
    print("  drawing and preparing the embedded world", flush=True)
    run_script("scripts/draw_embedded.py", root / "embedded")
    run_script(
        "scripts/prepare_data.py", "--config", CONFIGS / "embedded/data.yaml",
        "--source", root / "embedded/world", "--output_dir", root / "data",
    )  # fmt: skip
