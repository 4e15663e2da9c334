"""Scoring predictions for the whole OSV-5M test set, completions of a usual length."""

import json
import tempfile
from pathlib import Path

import numpy as np
from tqdm import trange

from benchmarks.inputs import CLUES, truth
from benchmarks.measure import Figure, median_of, ratios, run_script, seconds
from geoguessr_rl.prompt import format_completion

ROWS = 210_122
BOUND_SECONDS = 20.0
REPEATS = 3


def _draw(root: Path, rows: int) -> None:
    """Writes a truth file, and a completion a photo some hundred kilometres off."""
    rng = np.random.default_rng(0)
    table = truth(rows, rng)
    table.write_parquet(root / "truth.parquet")
    with (root / "predictions.jsonl").open("w") as file:
        for row in table.iter_rows(named=True):
            latitude = min(90.0, row["latitude"] + rng.normal(0, 5))
            text = format_completion(
                "France", latitude, row["longitude"], clues=CLUES, style="think"
            )
            identifier = Path(row["image_path"]).stem
            file.write(json.dumps({"id": identifier, "completion": text}) + "\n")


def _parse_lines(path: Path) -> None:
    """Does the least that scoring takes: each line of the file as JSON."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            json.loads(line)


def run(scale: float) -> list[Figure]:
    """Times `scripts/score_predictions.py` against reading its file."""
    rows = max(100, int(scale * ROWS))
    taken, peaks, limit = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print(f"  drawing {rows:,} predictions", flush=True)
        _draw(root, rows)
        files = (root / "predictions.jsonl", "--truth", root / "truth.parquet")
        for _ in trange(REPEATS, desc="  scoring", leave=False):
            once, peak = run_script("scripts/score_predictions.py", *files)
            taken.append(once)
            peaks.append(peak / 1e9)
            limit.append(seconds(lambda: _parse_lines(files[0])))
    name = f"score {rows:,} predictions"
    return [
        median_of(name, taken, "s", at_most=BOUND_SECONDS),
        median_of(name, ratios(taken, limit), "times", "json.loads of the file's lines"),
        median_of(f"{name}, peak memory", peaks, "GB"),
    ]
