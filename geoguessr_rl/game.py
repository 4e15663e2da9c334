"""A game of five photos against the models: its rounds, totals and result line.

Held in a visitor's session on the server, so that no page holds a truth before it is played.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from geoguessr_rl.records import Photo
from geoguessr_rl.reward import GEOSCORE_MAX, geoscore, haversine_km

ROUNDS = 5

# The least GeoScore for each square of the result line.
SQUARES = ((4500, "🟩"), (3000, "🟨"), (1000, "🟧"), (0, "⬛"))


@dataclass(frozen=True, slots=True)
class Guess:
    """Where one player puts a photo.

    Attributes:
        place: Latitude and longitude in decimal degrees; None where a model gave no answer.
        d_km: Great-circle distance to the truth; None without a place.
        geoscore: In [0, 5000].
    """

    place: tuple[float, float] | None
    d_km: float | None
    geoscore: float


@dataclass(frozen=True, slots=True)
class Round:
    """A photo that was played, and each player's guess by name; the person's comes first."""

    photo: Photo
    guesses: Mapping[str, Guess]


@dataclass(frozen=True, slots=True)
class Game:
    """The photos of a game, and the rounds that were played of it."""

    photos: Sequence[Photo]
    rounds: tuple[Round, ...] = ()

    @property
    def photo(self) -> Photo | None:
        """The photo to guess now, or None when the game is over."""
        return self.photos[len(self.rounds)] if len(self.rounds) < len(self.photos) else None

    def played(self, guesses: Mapping[str, Guess]) -> "Game":
        """Returns the game after one more round."""
        return replace(self, rounds=(*self.rounds, Round(self.photos[len(self.rounds)], guesses)))

    def totals(self) -> dict[str, float]:
        """Returns each player's summed GeoScore."""
        names = self.rounds[0].guesses if self.rounds else {}
        return {name: sum(turn.guesses[name].geoscore for turn in self.rounds) for name in names}


def new_game(photos: Sequence[Photo]) -> Game:
    """Draws the photos of a game; every call draws others."""
    return Game(random.sample(photos, min(ROUNDS, len(photos))))


def score(photo: Photo, place: tuple[float, float] | None) -> Guess:
    """Scores a place as `reward.components` scores a model's answer."""
    if place is None:
        return Guess(None, None, 0.0)
    d_km = haversine_km(*place, photo.latitude, photo.longitude)
    return Guess(place, d_km, geoscore(d_km))


def result_line(game: Game) -> str:
    """Returns a game's result in a line to share, which names no photo and no place."""
    person, *models = game.totals().items()
    squares = "".join(
        next(square for least, square in SQUARES if turn.guesses[person[0]].geoscore >= least)
        for turn in game.rounds
    )
    of = f"{GEOSCORE_MAX * len(game.rounds):,.0f}"
    others = "".join(f" · {name} {total:,.0f}" for name, total in models)
    return f"geoguessr-rl {person[1]:,.0f} / {of} {squares}{others}"
