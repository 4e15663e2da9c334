"""Score: anybody's predictions and a truth file -> the figures of this project, by the same code.

A prediction is a completion, which is parsed as any other, or coordinates and perhaps a country. A
photo of the truth without a prediction counts as one without an answer, as leaving out the hard
ones would flatter; nothing here needs a model.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import polars as pl

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import ray_engine
from geoguessr_rl.config import Engine, Ray
from geoguessr_rl.countries import CODES, name_of
from geoguessr_rl.eval_metrics import compute_metrics, make_prediction
from geoguessr_rl.places import look_up_hits
from geoguessr_rl.prompt import ANSWER_CLOSE, ANSWER_OPEN
from geoguessr_rl.records import Completion, FinishReason, Place, Prediction
from geoguessr_rl.tables import metric_lines, number

TRUTH_COLUMNS = ("image_path", "latitude", "longitude", "country_iso2")
NO_COUNTRY = "not given"
RAY_BLOCK = 4096  # predictions that a worker scores at a time

Row = Mapping[str, Any]
Job = tuple[str, int, float, float, str, Completion]  # what `make_prediction` takes


def read_truth(path: Path) -> dict[str, dict[str, Any]]:
    """Reads a parquet in the project's own schema, by photo id (the stem of `image_path`).

    Raises:
        UserError: It is none, or a photo stands in it twice.
    """
    try:
        frame = pl.read_parquet(path, glob=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is no parquet file ({reason}); check --truth") from None
    if missing := [name for name in TRUTH_COLUMNS if name not in frame.columns]:
        raise UserError(f"{path} has no column {missing[0]!r}; it holds {', '.join(frame.columns)}")
    truth = {Path(row["image_path"]).stem: row for row in frame.iter_rows(named=True)}
    if len(truth) != frame.height:
        raise UserError(f"{path} holds a photo twice; each id may stand there once")
    return truth


def read_predictions(path: Path) -> Iterator[tuple[str, Row]]:
    """Yields (where, row) of JSON Lines or, by its suffix, CSV.

    Raises:
        UserError: The file is missing, or a line is no object.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                csv.field_size_limit(1 << 24)
                for number, cells in enumerate(csv.DictReader(file), start=2):
                    yield f"{path}, row {number}", cells
                return
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    raise UserError(f"{path}, line {number} is no JSON object; give JSON Lines")
                if number > 1 or "header" not in row:
                    yield f"{path}, line {number}", row
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a file of predictions") from None
    except (IsADirectoryError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({error}); give JSON Lines or CSV") from None


def as_completion(row: Row, where: str) -> Completion:
    """Returns what a row says as the completion that would say it.

    Raises:
        UserError: It holds neither a completion nor coordinates, or an unknown finish reason.
    """
    reason: Any = row.get("finish_reason") or "stop"
    if reason not in get_args(FinishReason):
        raise UserError(f"{where}: finish_reason {reason!r} is none of {get_args(FinishReason)}")
    tokens = row.get("tokens") or 0
    if (text := row.get("completion")) is not None:
        return Completion(str(text), int(tokens), reason)
    if "latitude" not in row or "longitude" not in row:
        raise UserError(
            f"{where} has neither completion nor latitude and longitude; its keys are "
            f"{', '.join(map(str, row))}"
        )
    country = str(row.get("country") or NO_COUNTRY)
    answer = {
        "country": name_of(country) if country in CODES else country,
        "lat": _number(row["latitude"]),
        "lon": _number(row["longitude"]),
    }
    return Completion(f"{ANSWER_OPEN}{json.dumps(answer)}{ANSWER_CLOSE}", int(tokens), reason)


def _number(cell: Any) -> float | str | None:
    """Returns a coordinate; what is none stays as it is, and then scores as no answer."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None if cell is None else str(cell)


def score_here(jobs: Sequence[Job]) -> list[Prediction]:
    """Scores a block of completions."""
    return [make_prediction(*job) for job in jobs]


def predict(
    path: Path,
    truth: Mapping[str, Mapping[str, Any]],
    score: Callable[[Sequence[Job]], list[Prediction]] = score_here,
) -> tuple[list[Prediction], bool]:
    """Scores every row; returns the predictions, and whether any row names a country.

    Raises:
        UserError: A row is malformed or its id is not in the truth, or photos have unequally many.
    """
    jobs: list[Job] = []
    samples: Counter[str] = Counter()
    named = False
    for where, row in read_predictions(path):
        identifier = str(row.get("id"))
        photo = truth.get(identifier)
        if photo is None:
            raise UserError(f"{where}: photo {identifier!r} is not in the truth; check the ids")
        completion = as_completion(row, where)
        named = named or row.get("completion") is not None or bool(row.get("country"))
        place = (photo["latitude"], photo["longitude"], photo["country_iso2"])
        jobs.append((identifier, samples[identifier], *place, completion))
        samples[identifier] += 1
    if len(set(samples.values())) > 1:
        (most, k), (least, few) = samples.most_common()[0], samples.most_common()[-1]
        raise UserError(
            f"{path} has {k} predictions of photo {most!r} and {few} of {least!r}; give equally "
            "many of each"
        )
    return score(jobs), named


def score_on_ray(section: Ray, jobs: Sequence[Job]) -> list[Prediction]:
    """Scores completions on the workers of a Ray cluster, in order."""

    def lost(job: Job) -> list[Prediction]:
        raise UserError(f"the prediction of photo {job[0]!r} kills its worker; take it out")

    blocks = artifacts.blocks(jobs, RAY_BLOCK)
    done = dict(ray_engine.map_blocks(partial(ray_engine.ready, score_here), blocks, lost, section))
    return [row for number in range(len(blocks)) for row in done[number]]


def run(
    predictions: Path,
    truth_file: Path,
    output: Path | None = None,
    *,
    engine: Engine = "local",
    ray: Ray | None = None,
) -> tuple[list[str], bool]:
    """Scores a file of predictions; returns the table's lines, and whether it is complete.

    Args:
        predictions: JSON Lines or CSV with `id` and `completion`, or `latitude` and `longitude`
            and optionally `country`; optionally `finish_reason` and `tokens`.
        truth_file: A parquet in the project's schema.
        output: Where the metrics go as JSON.
        engine: `local`, or `ray`, where a cluster's workers parse and score; the statistics are
            computed here in either case.
        ray: Which cluster; a local one without it.

    Raises:
        UserError: A file is missing or malformed, or the ids do not fit.
    """
    truth = read_truth(truth_file)
    cluster = ray or Ray()
    score = partial(score_on_ray, cluster) if engine == "ray" else score_here
    with ray_engine.session(engine, cluster):
        rows, named = predict(predictions, truth, score)
    if not rows:
        raise UserError(f"{predictions} holds no prediction; check the file")
    answered = {row.id for row in rows}
    missing = [identifier for identifier in truth if identifier not in answered]
    samples = max(row.sample for row in rows) + 1
    nothing = Completion("", 0, "stop")
    for identifier in missing:
        photo = truth[identifier]
        place = (photo["latitude"], photo["longitude"], photo["country_iso2"])
        rows += [make_prediction(identifier, k, *place, nothing) for k in range(samples)]
    places = {
        identifier: Place(
            photo["country_iso2"], photo.get("region"), photo.get("sub_region"), photo.get("city")
        )
        for identifier, photo in truth.items()
    }
    metrics = compute_metrics(rows, None, look_up_hits(rows, places))
    if not named:  # nobody was asked for a name
        metrics |= {"country_acc": None, "country_acc_parent": None}
    metrics |= {
        "photos": len(truth),
        "photos_without_prediction": len(missing),
        "truth": artifacts.file_sha256(truth_file)[:16],
    }
    if output is not None:
        artifacts.write_json(output, metrics)
    low, high = metrics["intervals"]["mean_geoscore"]
    outcomes = ", ".join(f"{count} {name}" for name, count in metrics["outcomes"].items() if count)
    lines = [
        f"{metrics['n']} predictions of {len(truth)} photos: {outcomes}",
        f"GeoScore {metrics['mean_geoscore']:.0f}, 95 % interval {low:.0f} to {high:.0f}; mean "
        f"distance {number(metrics['mean_km'], 'km')} km, of the answers that name a place "
        f"{number(metrics['mean_km_answered'], 'km')} km",
        *metric_lines(metrics),
    ]
    if missing:
        lines.append(f"{len(missing)} photos have no prediction and count as no answer")
    if errors := metrics["outcomes"]["error"]:
        lines.append(f"incomplete: {errors} predictions are transport errors and are left out")
    return lines, metrics["complete"]
