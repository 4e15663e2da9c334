"""Evaluated runs as they lie on disk: read, scored afresh, and refused where they mislead.

A run's rows are scored again from the raw completions, so that its stored figures can only agree
or be refused, and two runs are put side by side only where both did the same task. What the
comparison says is the work of `comparison.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.eval_metrics import Hits, compute_metrics, make_prediction
from geoguessr_rl.places import look_up_hits
from geoguessr_rl.records import Completion, Prediction
from geoguessr_rl.reward import SCORE_VERSION

COMPARABLE = ("split", "split_fingerprint", "sampling", "image", "score_version")


@dataclass(frozen=True)
class Run:
    """One evaluated run, its rows scored afresh.

    Attributes:
        name: The run's name.
        folder: Where it lies.
        identity: What `run.json` says.
        config: What `config.json` says.
        stored: What `metrics.json` says.
        rows: Scored from the raw completions.
        hits: Which administrative names the points of the rows meet; empty until `with_places`.
    """

    name: str
    folder: Path
    identity: dict[str, Any]
    config: dict[str, Any]
    stored: dict[str, Any]
    rows: list[Prediction]
    hits: Hits = field(default_factory=dict)

    @property
    def data_dir(self) -> Path:
        """Where its photos lie."""
        return Path(self.config["data_dir"])


def load_run(folder: Path) -> Run:
    """Reads a run; raises UserError when the folder holds none, or an incomplete one."""
    remedy = "give a folder that scripts/run_eval.py has finished, like outputs/eval/base/eval_osv"
    identity, config, stored = (
        artifacts.read_json(folder / name, remedy=remedy)
        for name in (artifacts.IDENTITY, artifacts.RESOLVED_CONFIG, artifacts.METRICS)
    )
    rows = artifacts.read_rows(folder / artifacts.PREDICTIONS, Prediction)
    header = artifacts.read_header(folder / artifacts.PREDICTIONS) or {}
    if {key: value for key, value in header.items() if key != "versions"} != identity:
        raise UserError(
            f"{folder / artifacts.IDENTITY} is not the header of {artifacts.PREDICTIONS}; evaluate "
            "that run again"
        )
    errors = sum(row.outcome == "error" for row in rows)
    if errors or not rows:
        what = f"{errors} of its {len(rows)} rows are transport errors" if rows else "it has no row"
        raise UserError(f"{folder} is incomplete: {what}; evaluate it again")
    return Run(config["run_name"], folder, identity, config, stored, [*map(rescore, rows)])


def rescore(row: Prediction) -> Prediction:
    """Scores a row again from its raw completion."""
    completion = Completion(row.completion, row.tokens, row.finish_reason, row.prompt_tokens)
    place = (row.latitude, row.longitude, row.country_iso2)
    return make_prediction(row.id, row.sample, *place, completion)


def require_comparable(base: Run, tuned: Run) -> None:
    """Raises UserError that names what two runs differ in, where they may not."""
    for key in COMPARABLE:
        old, new = base.identity.get(key), tuned.identity.get(key)
        if old != new:
            raise UserError(
                f"the runs are not comparable: {key} is {old!r} in {base.folder} and {new!r} in "
                f"{tuned.folder}; evaluate both alike"
            )
    if (version := base.identity["score_version"]) != SCORE_VERSION:
        raise UserError(
            f"both runs have score_version {version!r} and this code has {SCORE_VERSION!r}; "
            "evaluate both again"
        )
    photos = [{row.id for row in run.rows} for run in (base, tuned)]
    if photos[0] != photos[1]:
        raise UserError(
            f"{base.folder} covers {len(photos[0])} photos and {tuned.folder} {len(photos[1])}, "
            "not the same ones; evaluate both with the same --limit, or without"
        )


def agrees(stored: Any, fresh: Any) -> bool:
    """Compares JSON values; floats may differ by rounding, as between two processors."""
    if isinstance(stored, float) and isinstance(fresh, float):
        return math.isclose(stored, fresh, rel_tol=1e-9)
    if isinstance(stored, list) and isinstance(fresh, list):
        return len(stored) == len(fresh) and all(map(agrees, stored, fresh))
    if isinstance(stored, dict) and isinstance(fresh, dict):
        return stored.keys() == fresh.keys() and all(agrees(stored[k], fresh[k]) for k in fresh)
    return bool(stored == fresh)


def with_places(run: Run, split: data.Split) -> Run:
    """Returns the run with the administrative names that its points meet."""
    return replace(run, hits=look_up_hits(run.rows, split.places()))


def metric_differences(run: Run, share: Mapping[str, float]) -> list[str]:
    """Returns how a run's stored metrics differ from what its completions give."""
    fresh = compute_metrics(run.rows, share, run.hits)
    return [
        f"{run.folder / artifacts.METRICS} says {key} = {run.stored.get(key)!r}, and the rows "
        f"beside it give {value!r}"
        for key, value in fresh.items()
        if not agrees(run.stored.get(key), value)
    ]


def verify(folder: Path) -> str:
    """Recomputes every figure of a run from its raw rows, and returns what was checked.

    Raises:
        UserError: Something differs; all of it is printed before.
    """
    run = load_run(folder)
    split = load_split_of(run)
    stored = artifacts.read_rows(folder / artifacts.PREDICTIONS, Prediction)
    truth = {photo.id: photo for photo in split.photos}
    problems = []
    for row, fresh in zip(stored, run.rows, strict=True):
        where = f"photo {row.id}, sample {row.sample}"
        for name in (item.name for item in fields(Prediction)):
            old, new = getattr(row, name), getattr(fresh, name)
            if not agrees(old, new):
                problems.append(f"{where}: {name} is {old!r}, and its completion gives {new!r}")
        labels = ("latitude", "longitude", "country_iso2")
        if row.id not in truth:
            problems.append(f"{where} is not in {split.name}")
        elif any(getattr(row, name) != getattr(truth[row.id], name) for name in labels):
            problems.append(f"{where}: its truth is not that of {split.name}")
    if not problems:
        problems += metric_differences(with_places(run, split), split.country_share)
    if problems:
        print("\n".join(problems), flush=True)
        raise UserError(f"{folder}: {len(problems)} figures differ; evaluate that run again")
    return f"verified {len(stored)} rows and every figure of {folder / artifacts.METRICS}"


def load_split_of(run: Run) -> data.Split:
    """Reads the split that a run was measured on; raises UserError when it is another one now."""
    split = data.load_split(run.data_dir, run.identity["split"])
    if split.fingerprint != run.identity["split_fingerprint"]:
        raise UserError(
            f"{run.data_dir} holds another {split.name} than {run.folder} was measured on; give it "
            "the data of that time, or evaluate again"
        )
    return split


def load_runs(folders: Sequence[Path]) -> tuple[list[Run], data.Split]:
    """Reads runs over the same photos, the first of them the base, and the split of these.

    Raises:
        UserError: A run is missing, incomplete or damaged, two are not comparable, or the
            split is not the one that they were measured on.
    """
    runs = [load_run(folder) for folder in folders]
    for run in runs[1:]:
        require_comparable(runs[0], run)
    split = load_split_of(runs[0])
    runs = [with_places(run, split) for run in runs]
    for run in runs:
        if differences := metric_differences(run, split.country_share):
            raise UserError(f"{differences[0]}; evaluate that run again")
    return runs, split
