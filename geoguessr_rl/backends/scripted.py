"""Completions without a model: given answers for tests, and the baselines that need no GPU.

`constant` always names one place, `random_land` one of a few places that spread over the inhabited
land, `train_prior` the place of a train photo drawn at random, which is what somebody knows who has
seen where photos are taken and not the photo; and a JSON file maps photo ids (or `*`) to
completions.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from geoguessr_rl.artifacts import UserError, read_json, seed_for
from geoguessr_rl.countries import name_of
from geoguessr_rl.data import load_split
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Completion, Photo, Sampling

BASELINES = ("constant", "random_land", "train_prior")
CONSTANT = ("France", 46.6, 2.4)

# Points that spread over the inhabited land, about one to each 5 million square kilometres.
LAND = (
    ("United States", 39.8, -98.6), ("Canada", 53.5, -113.5), ("Mexico", 23.6, -102.5),
    ("Brazil", -10.8, -52.9), ("Argentina", -34.9, -64.9), ("Peru", -9.2, -75.0),
    ("Spain", 40.2, -3.6), ("Germany", 51.1, 10.4), ("Russia", 55.8, 49.1),
    ("Russia", 61.0, 99.2), ("Kazakhstan", 48.2, 67.3), ("China", 35.0, 104.0),
    ("India", 22.9, 79.6), ("Indonesia", -2.2, 113.9), ("Japan", 36.6, 138.0),
    ("Australia", -25.7, 134.5), ("Algeria", 28.2, 2.6), ("Nigeria", 9.6, 8.1),
    ("DR Congo", -2.9, 23.6), ("Ethiopia", 8.6, 39.6), ("South Africa", -29.0, 25.1),
    ("Saudi Arabia", 24.1, 44.5), ("Iran", 32.6, 54.3), ("Thailand", 15.1, 101.0),
)  # fmt: skip


class ScriptedBackend:
    """Answers from a baseline's rule or from a file of completions."""

    def __init__(self, script: str | Path, data_dir: Path) -> None:
        """Takes a baseline's name, or a JSON file of id (or `*`) to completion(s)."""
        self._script = script
        self._answers: dict[str, str | list[str]] = {}
        self._train: list[Photo] = []
        if script == "train_prior":
            self._train = load_split(data_dir, "train_pool").photos
        elif script not in ("constant", "random_land"):
            path = Path(script)
            self._answers = read_json(path, remedy=f"name {', '.join(BASELINES)} or a JSON file")
            if not isinstance(self._answers, dict):
                raise UserError(f"{path} must map photo ids (or '*') to completions")
            for key, value in self._answers.items():
                texts = [value] if isinstance(value, str) else value
                if not (isinstance(texts, list) and texts and {*map(type, texts)} == {str}):
                    raise UserError(f"{path}: {key!r} must be a completion or a list of them")

    def _text(self, photo: Photo, sample: int, sampling: Sampling) -> str:
        """Returns one completion."""
        if self._script == "constant":
            return format_completion(*CONSTANT, style="direct")
        rng = random.Random(seed_for(sampling.seed, f"{photo.id}:{sample}"))
        if self._script == "random_land":
            return format_completion(*rng.choice(LAND), style="direct")
        if self._script == "train_prior":
            seen = rng.choice(self._train)
            country = name_of(seen.country_iso2)
            return format_completion(country, seen.latitude, seen.longitude, style="direct")
        answer = self._answers.get(photo.id, self._answers.get("*"))
        if answer is None:
            raise UserError(f"{self._script} has no completion for photo {photo.id} and no '*'")
        return answer if isinstance(answer, str) else answer[sample % len(answer)]

    def generate(self, photos: Sequence[Photo], sampling: Sampling) -> list[list[Completion]]:
        """Returns `sampling.n` completions a photo; tokens are counted as words."""
        return [
            [
                Completion(text, len(text.split()), "stop")
                for text in (self._text(photo, k, sampling) for k in range(sampling.n))
            ]
            for photo in photos
        ]

    def logprobs(
        self, photos: Sequence[Photo], texts: Sequence[str], *, adapter: bool = True
    ) -> list[list[float]]:
        """Raises UserError: answers without a model have no log-probabilities."""
        raise UserError("the scripted backend has no log-probabilities; choose another backend")
