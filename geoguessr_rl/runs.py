"""Evaluated runs as they lie on disk: read, scored afresh, and refused where they mislead.

A run's rows are scored again from the raw completions, so that its stored figures can only agree
or be refused, and two runs are put side by side only where both did the same task. What the
comparison says is `eval_metrics`' work.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.eval_metrics import compute_metrics, make_prediction
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
    """

    name: str
    folder: Path
    identity: dict[str, Any]
    config: dict[str, Any]
    stored: dict[str, Any]
    rows: list[Prediction]

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
    errors = sum(row.outcome == "error" for row in rows)
    if errors or not rows:
        what = f"{errors} of its {len(rows)} rows are transport errors" if rows else "it has no row"
        raise UserError(f"{folder} is incomplete: {what}; evaluate it again")
    rescored = [
        make_prediction(
            row.id,
            row.sample,
            row.latitude,
            row.longitude,
            row.country_iso2,
            Completion(row.completion, row.tokens, row.finish_reason),
        )
        for row in rows
    ]
    return Run(config["run_name"], folder, identity, config, stored, rescored)


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
    if isinstance(stored, dict) and isinstance(fresh, dict):
        return stored.keys() == fresh.keys() and all(agrees(stored[k], fresh[k]) for k in fresh)
    return bool(stored == fresh)


def require_stored_metrics(run: Run, share: Mapping[str, float]) -> None:
    """Raises UserError when a run's stored metrics are not what its completions give."""
    for key, value in compute_metrics(run.rows, share).items():
        if not agrees(run.stored.get(key), value):
            raise UserError(
                f"{run.folder / artifacts.METRICS} says {key} = {run.stored.get(key)!r}, and the "
                f"rows beside it give {value!r}; evaluate that run again"
            )


def load_pair(base_folder: Path, tuned_folder: Path) -> tuple[Run, Run, data.Split]:
    """Reads two runs over the same photos, and the split that holds these.

    Raises:
        UserError: A run is missing, incomplete or damaged, the two are not comparable, or the
            split is not the one that they were measured on.
    """
    base, tuned = load_run(base_folder), load_run(tuned_folder)
    require_comparable(base, tuned)
    split = data.load_split(base.data_dir, base.identity["split"])
    if split.fingerprint != base.identity["split_fingerprint"]:
        raise UserError(
            f"{base.data_dir} holds another {split.name} than the runs were measured on; give them "
            "the data of that time, or evaluate both again"
        )
    for run in (base, tuned):
        require_stored_metrics(run, split.country_share)
    return base, tuned, split
