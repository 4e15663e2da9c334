"""Checkpoints: the plateau rule and its sentence; test_agreement.py measures real ones."""

from pathlib import Path

import numpy as np
import pytest

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import EvalConfig, Generation
from geoguessr_rl.phases import checkpoints


@pytest.mark.parametrize(
    ("means", "position"),
    [
        ([100, 900, 1800], 2),  # still rising
        ([100, 1800, 1800, 1790], 1),
        ([1800, 1700, 1600], 0),
        ([100], 0),
    ],
)
def test_the_plateau_is_the_first_that_none_later_beats(means: list[float], position: int) -> None:
    noise = np.random.default_rng(0).normal(0, 300, 200)
    own = [np.random.default_rng(n).normal(0, 60, 200) for n in range(len(means))]
    scores = [mean + noise + wave for mean, wave in zip(means, own, strict=True)]
    assert checkpoints.plateau([list(values) for values in scores]) == position
    # A rise within the noise is no reason to go on; without the interval it would be one.
    wobble = [scores[0], scores[0] + np.random.default_rng(9).normal(1, 300, 200)]
    assert checkpoints.plateau([list(values) for values in wobble]) == 0


def point(step: int, score: float) -> checkpoints.Point:
    return checkpoints.Point(step, score, score - 9, score + 9, 0.5, 1.0, 0.0, 25)


def test_the_advice_says_what_stopping_would_have_saved() -> None:
    points = [point(0, 100), point(200, 900), point(400, 890)]
    text = checkpoints.advice(points, 1)
    assert "plateau at step 200" in text and "saved 200 of 400 steps (50%)" in text
    assert checkpoints.advice(points, 2).startswith("no plateau: step 400")


def test_a_folder_without_checkpoints_and_a_backend_without_adapters_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        checkpoints.run(EvalConfig(), tmp_path)
    scripted = EvalConfig(generation=Generation(backend="scripted"))
    with pytest.raises(UserError, match="the scripted backend has no adapters"):
        checkpoints.run(scripted, tmp_path)
