"""Score: anybody's predictions get this project's figures, and OSV-5M's own protocol."""

import csv
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import reverse_geocoder

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.eval_metrics import compute_metrics
from geoguessr_rl.phases import score
from geoguessr_rl.places import look_up_hits, nearest_places
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import PHOTO_SCHEMA, Place

CITIES = {
    "10": (46.34, 10.04, "CH"),
    "20": (48.8566, 2.3522, "FR"),
    "30": (-22.56, 17.08, "NA"),
    "0040": (18.22, -66.43, "PR"),
}


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    """Four photos with the names of the nearest populated places."""
    path = tmp_path / "truth.parquet"
    places = nearest_places([place[:2] for place in CITIES.values()])
    rows = [
        {
            "image_path": f"images/test/{one}.jpg",
            "latitude": latitude,
            "longitude": longitude,
            "country_iso2": country,
            "region": place.region or None,
            "sub_region": place.sub_region or None,
            "city": place.city,
        }
        for (one, (latitude, longitude, country)), place in zip(CITIES.items(), places, strict=True)
    ]
    pl.DataFrame(rows, schema=PHOTO_SCHEMA).write_parquet(path)
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scored(predictions: Path, truth: Path) -> dict[str, Any]:
    output = predictions.with_suffix(".metrics.json")
    score.run(predictions, truth, output)
    return json.loads(output.read_text())


def perfect(**more: Any) -> list[dict[str, Any]]:
    return [
        {"id": one, "latitude": place[0], "longitude": place[1], **more}
        for one, place in CITIES.items()
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_coordinates_alone_are_scored_and_no_country_is_claimed(
    suffix: str, truth: Path, tmp_path: Path
) -> None:
    metrics = scored(write(tmp_path / f"p{suffix}", perfect()), truth)
    assert metrics["mean_geoscore"] == 5000 and metrics["acc_at_km"]["1"] == 1
    assert metrics["country_acc"] is metrics["country_acc_parent"] is None
    names = ("country_acc_coords", "region_acc", "sub_region_acc", "city_acc")
    assert [metrics[name] for name in names] == [1, 1, 1, 1]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_country_is_a_name_or_a_code_and_territories_count_by_both_policies(
    suffix: str, truth: Path, tmp_path: Path
) -> None:
    rows = perfect()
    countries = ["Switzerland", "FR", "NA", "United States"]
    for row, country in zip(rows, countries, strict=True):
        row["country"] = country
    metrics = scored(write(tmp_path / f"p{suffix}", rows), truth)
    assert (metrics["country_acc"], metrics["country_acc_parent"]) == (0.75, 1)
    assert metrics["country_acc_coords"] == 1


def test_completions_are_parsed_as_any_other_and_failures_are_told_apart(
    truth: Path, tmp_path: Path, script: Callable[..., Any]
) -> None:
    rows = [
        {"id": "10", "completion": format_completion("Switzerland", 46.34, 10.04, style="think")},
        {"id": "20", "completion": "I'm sorry, I cannot say.", "tokens": 9},
        {"id": "30", "completion": "<think> endless", "finish_reason": "length", "tokens": 512},
        {"id": "0040", "completion": "", "finish_reason": "error"},
    ]
    path = write(tmp_path / "p.jsonl", rows)
    metrics = scored(path, truth)
    ended = script("score_predictions.py", path, "--truth", truth)
    assert ended.code == 1 and "incomplete: 1 predictions are transport errors" in ended.out
    outcomes = {"answered": 1, "unparseable": 1, "truncated": 1, "error": 1}
    assert metrics["outcomes"] == outcomes and metrics["complete"] is False
    assert metrics["n"] == 3 and metrics["mean_geoscore"] == pytest.approx(5000 / 3)
    assert metrics["refusal_rate"] == metrics["truncated_share"] == pytest.approx(1 / 3)
    assert metrics["completion_tokens"]["max"] == 512


@pytest.mark.parametrize("place", [(91, 0), ("", ""), ("north", 5), (math.nan, 0), (None, None)])
def test_impossible_coordinates_are_a_miss_and_stay_in_the_mean(
    place: tuple[Any, Any], truth: Path, tmp_path: Path
) -> None:
    rows = perfect()
    rows[0].update(latitude=place[0], longitude=place[1])
    metrics = scored(write(tmp_path / "p.jsonl", rows), truth)
    assert metrics["n"] == 4 and metrics["mean_geoscore"] == 3750


def test_photos_without_a_prediction_count_as_no_answer(
    truth: Path, tmp_path: Path, script: Callable[..., Any]
) -> None:
    path = write(tmp_path / "p.jsonl", perfect()[:3])
    metrics = scored(path, truth)
    assert (metrics["n"], metrics["photos_without_prediction"]) == (4, 1)
    assert metrics["mean_geoscore"] == 3750
    ended = script("score_predictions.py", path, "--truth", truth)
    assert ended.code == 0
    assert "1 photos have no prediction and count as no answer" in ended.out
    assert "GeoScore 3750, 95 % interval" in ended.out


def test_k_predictions_a_photo_are_k_samples(truth: Path, tmp_path: Path) -> None:
    rows = perfect() + [{**row, "latitude": -row["latitude"]} for row in perfect()] + perfect()
    metrics = scored(write(tmp_path / "p.jsonl", rows), truth)
    assert metrics["samples"] == 3
    assert metrics["of_k"]["best"]["mean_geoscore"]["value"] == 5000
    assert metrics["of_k"]["consensus"]["mean_geoscore"]["value"] == 5000
    assert 3333 < metrics["of_k"]["mean"]["mean_geoscore"]["value"] < 4000


def test_a_run_s_own_file_gives_the_run_s_own_figures(
    tmp_path: Path, make_split: Callable[..., Path], script: Callable[..., Any]
) -> None:
    folder = make_split(tmp_path / "data", [(one, *place) for one, place in CITIES.items()])
    flags = ["--backend", "scripted", "--set", "generation.script=random_land"]
    ended = script("run_eval.py", "--data_dir", folder, "--output_dir", tmp_path / "eval", *flags)
    assert ended.code == 0, ended.err
    run = tmp_path / "eval/base/eval_osv"
    metrics = scored(run / "predictions.jsonl", folder / "eval_osv.parquet")
    own = json.loads((run / "metrics.json").read_text())
    for key in ("n", "mean_geoscore", "country_acc", "country_acc_coords", "acc_at_km", "outcomes"):
        assert metrics[key] == own[key], key


MISTAKES = {
    "no such file": (None, "does not exist; give a file of predictions"),
    "an unknown id": ([{"id": "7", "completion": "x"}], "photo '7' is not in the truth"),
    "a number as id": ([{"id": 40, "completion": "x"}], "photo '40' is not in the truth"),
    "no answer at all": ([{"id": "10", "lat": 3}], "has neither completion nor latitude"),
    "one more sample": ([{"id": "10", "completion": "x"}] * 2 + [{"id": "20", "completion": "x"}],
                        "has 2 predictions of photo '10' and 1 of '20'"),
    "a strange reason": ([{"id": "10", "completion": "x", "finish_reason": "eos"}], "is none of"),
    "an empty file": ([], "holds no prediction"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(
    name: str, truth: Path, tmp_path: Path, script: Callable[..., Any]
) -> None:
    rows, says = MISTAKES[name]
    path = tmp_path / "p.jsonl"
    if rows is not None:
        write(path, rows)
    ended = script("score_predictions.py", path, "--truth", truth)
    assert ended.code == 2 and says in ended.err and ended.err.count("\n") == 1


def test_a_malformed_file_names_its_line_and_a_truth_its_column(
    truth: Path, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "10", "completion": "x"}\n<html>\n')
    with pytest.raises(UserError, match=r"line 2 is no JSON object"):
        score.run(path, truth)
    for content, says in ((b"<html>", "is no parquet file"), (None, "no column 'latitude'")):
        bad = tmp_path / "bad.parquet"
        if content is None:
            pl.DataFrame({"image_path": ["a.jpg"]}).write_parquet(bad)
        else:
            bad.write_bytes(content)
        with pytest.raises(UserError, match=says):
            score.run(write(tmp_path / "q.jsonl", perfect()), bad)


def cities_of_the_protocol() -> tuple[list[dict[str, str]], np.ndarray]:
    """Every populated place, and its point."""
    cities = reverse_geocoder.RGeocoder(mode=1, verbose=False).locations
    table = np.array([[float(city["lat"]), float(city["lon"])] for city in cities])
    return cities, table


def plain_protocol(points: list[Any], labels: list[Place]) -> dict[str, float]:
    """OSV-5M's protocol again, written plainly: unique names joined, nearest by brute force."""
    cities, table = cities_of_the_protocol()
    hits: dict[str, list[bool]] = {level: [] for level in ("country", "region", "sub", "city")}
    for point, label in zip(points, labels, strict=True):
        distance = ((table - point) ** 2).sum(axis=1)
        (nearest,) = np.flatnonzero(distance == distance.min())
        found = cities[nearest]
        cc, region, sub, city = (found[key] for key in ("cc", "admin1", "admin2", "name"))
        hits["country"].append(cc == label.country_iso2)
        if label.region:
            want = f"{label.region}_{label.country_iso2}"
            hits["region"].append(f"{region}_{cc}" == want)
        if label.sub_region:
            want = f"{label.sub_region}_{label.region or ''}_{label.country_iso2}"
            hits["sub"].append(f"{sub}_{region}_{cc}" == want)
        if label.city:
            parts = (label.city, label.sub_region, label.region, label.country_iso2)
            want = "_".join(part or "" for part in parts)
            hits["city"].append(f"{city}_{sub}_{region}_{cc}" == want)
    return {level: sum(values) / len(values) for level, values in hits.items()}


def test_a_thousand_random_predictions_agree_with_a_plain_implementation(tmp_path: Path) -> None:
    rng = random.Random(3)
    cities, table = cities_of_the_protocol()
    points, labels, photos, predictions = [], [], [], []
    while len(points) < 1000:
        n, city = len(points), rng.choice(cities)
        latitude, longitude = float(city["lat"]), float(city["lon"])
        spread = rng.choice([0.0, 0.02, 0.5, 5.0])
        point = (
            max(-90, min(90, latitude + rng.gauss(0, spread))),
            max(-180, min(180, longitude + rng.gauss(0, spread))),
        )
        distance = ((table - point) ** 2).sum(axis=1)
        if (distance == distance.min()).sum() > 1:
            continue  # some places share a point, and which of them is nearest is undefined
        labels.append(
            Place(city["cc"], city["admin1"] or None, city["admin2"] or None, city["name"])
        )
        photos.append(
            {
                "image_path": f"{n}.jpg",
                "latitude": latitude,
                "longitude": longitude,
                "country_iso2": city["cc"],
                "region": labels[-1].region,
                "sub_region": labels[-1].sub_region,
                "city": labels[-1].city,
            }
        )
        points.append(point)
        predictions.append({"id": str(n), "latitude": point[0], "longitude": point[1]})
    truth = tmp_path / "truth.parquet"
    pl.DataFrame(photos, schema=PHOTO_SCHEMA).write_parquet(truth)
    metrics = scored(write(tmp_path / "p.jsonl", predictions), truth)
    plain = plain_protocol(points, labels)
    names = ("country_acc_coords", "region_acc", "sub_region_acc", "city_acc")
    for name, value in zip(names, plain.values(), strict=True):
        assert metrics[name] == pytest.approx(value, abs=1e-9), name
        assert 0.2 < value < 0.95
    # GeoScore and the radii, from the haversine formula on a sphere of 6371.0088 km.
    lat, lon, plat, plon = np.radians(
        [[p["latitude"], p["longitude"], *q] for p, q in zip(photos, points, strict=True)]
    ).T
    a = np.sin((plat - lat) / 2) ** 2 + np.cos(lat) * np.cos(plat) * np.sin((plon - lon) / 2) ** 2
    km = 2 * 6371.0088 * np.arcsin(np.sqrt(a))
    assert metrics["mean_geoscore"] == pytest.approx(np.mean(5000 * np.exp(-km / 1492.7)), abs=1e-9)
    assert metrics["mean_km"] == pytest.approx(km.mean(), abs=1e-9)
    for radius, share in metrics["acc_at_km"].items():
        assert share == pytest.approx(np.mean(km < float(radius)), abs=1e-9)


def test_the_real_labels_are_those_of_the_protocol() -> None:
    mini = Path(__file__).parents[1].parent / "shared" / "osv5m_mini"
    for table in sorted(mini.glob("t*.csv")):
        rows = pl.read_csv(table, infer_schema=False).to_dicts()
        points = [(float(row["latitude"]), float(row["longitude"])) for row in rows]
        for row, place in zip(rows, nearest_places(points), strict=True):
            assert place.country_iso2 == row["country"]
            assert (place.region or None, place.city) == (row["region"], row["city"])


def test_look_ups_go_by_photo_and_sample(truth: Path) -> None:
    rows, _ = score.predict(
        write(truth.with_name("p.jsonl"), perfect() + perfect()), score.read_truth(truth)
    )
    places = {one: Place(place[2]) for one, place in CITIES.items()}
    hits = look_up_hits(rows, places)
    assert set(hits) == {(one, k) for one in CITIES for k in (0, 1)}
    assert compute_metrics(rows, None, hits)["country_acc_coords"] == 1


def test_scoring_needs_no_torch(truth: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", perfect())
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'trl', 'peft', 'vllm', 'datasets', 'gradio'):\n"
        "    sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from geoguessr_rl.phases import score\n"
        "print(*score.run(Path(sys.argv[1]), Path(sys.argv[2]))[0])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, path, truth], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and "GeoScore 5000" in ended.stdout, ended.stderr
