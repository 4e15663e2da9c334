"""The nouns that phases pass to each other, in memory and on disk.

Truth carries plain names (`latitude`, `country_iso2`) and predictions `pred_` names, so that
parquet, JSON Lines and TRL's keyword arguments read alike. There is no behaviour here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl

PHOTO_SCHEMA: dict[str, pl.DataType] = {
    "image_path": pl.String(),  # relative to the parquet's folder; its stem is the photo's id
    "latitude": pl.Float64(),
    "longitude": pl.Float64(),
    "country_iso2": pl.String(),
    "region": pl.String(),
    "city": pl.String(),
    "sequence": pl.String(),
    "sub_region": pl.String(),
    "creator": pl.String(),
}
OPTIONAL_COLUMNS = ("sub_region", "creator")

FinishReason = Literal["stop", "length", "refusal", "error"]
"""`stop`: the model ended its turn. `length`: cut at the token cap. `refusal`: a server's filter
or the model refused, which is an answer. `error`: the transport failed, so there is no answer to
score."""

Outcome = Literal["answered", "unparseable", "truncated", "error"]
"""What became of one completion. A truncated one that still holds an answer is `answered`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Administrative names, from the country down; None or empty where there is none."""

    country_iso2: str
    region: str | None = None
    sub_region: str | None = None
    city: str | None = None


@dataclass(frozen=True, slots=True)
class Photo:
    """One photo and where it was taken.

    Attributes:
        id: Text, the stem of `path`; OSV-5M's ids lose digits as floats.
        path: The image file.
        latitude: Decimal degrees.
        longitude: Decimal degrees.
        country_iso2: ISO 3166-1 alpha-2 code, `XK` for Kosovo.
        creator: Whom the photo's licence asks to name, where known.
        region: Administrative names, as the dataset has them.
        sub_region: The level below it.
        city: The nearest populated place.
    """

    id: str
    path: Path
    latitude: float
    longitude: float
    country_iso2: str
    creator: str | None = None
    region: str | None = None
    sub_region: str | None = None
    city: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. Temperature 0 is greedy.

    Attributes:
        n: Completions a photo.
        seed: Each photo's own seed is derived from this one and the photo's id, so that results
            depend neither on the order nor on the block.
    """

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote for one photo.

    Attributes:
        text: The raw text, without special tokens.
        tokens: Completion length in tokens, the end token included.
        finish_reason: See `FinishReason`.
        prompt_tokens: Prompt length in tokens, where a server bills it.
    """

    text: str
    tokens: int
    finish_reason: FinishReason
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row of `predictions.jsonl`: truth, raw completion, parsed fields and scores.

    Distances are in km, scores as `reward.components` gives them. The raw text and coordinates
    stand here so that every figure can be recomputed.
    """

    id: str
    sample: int
    latitude: float
    longitude: float
    country_iso2: str
    completion: str
    tokens: int
    finish_reason: FinishReason
    outcome: Outcome
    pred_country: str | None
    pred_country_iso2: str | None
    pred_latitude: float | None
    pred_longitude: float | None
    d_km: float | None
    geoscore: float
    format: float
    country: float
    dist: float
    total: float
    prompt_tokens: int | None = None
