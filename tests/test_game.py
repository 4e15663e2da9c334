"""The game's arithmetic, and its result line."""

from pathlib import Path

from geoguessr_rl import game
from geoguessr_rl.records import Photo
from geoguessr_rl.reward import components

PHOTOS = [Photo(str(n), Path(f"{n}.jpg"), 10.0 * n, 20.0 * n, "KE") for n in range(8)]


def test_a_game_draws_five_photos_without_repeats_and_another_each_time() -> None:
    games = [game.new_game(PHOTOS) for _ in range(50)]
    assert all(len({photo.id for photo in one.photos}) == 5 for one in games)
    assert len({tuple(photo.id for photo in one.photos) for one in games}) > 10
    assert len(game.new_game(PHOTOS[:3]).photos) == 3


def test_a_place_scores_as_the_same_answer_of_a_model() -> None:
    found = game.score(PHOTOS[3], (12.5, -33.0))
    said = components(
        '<answer>{"country": "Kenya", "lat": 12.5, "lon": -33.0}</answer>', 30, 60, "KE"
    )
    assert (found.d_km, found.geoscore) == (said.d_km, said.geoscore)
    assert game.score(PHOTOS[3], None) == game.Guess(None, None, 0.0)


def test_totals_add_up_and_the_line_names_no_place() -> None:
    one = game.Game(PHOTOS[:5])
    for photo in PHOTOS[:5]:
        assert one.photo is photo
        right = game.score(photo, (photo.latitude, photo.longitude))
        one = one.played({"You": right, "Model": game.score(photo, None)})
    assert one.photo is None
    assert one.totals() == {"You": 25_000.0, "Model": 0.0}
    assert game.result_line(one) == "geoguessr-rl 25,000 / 25,000 🟩🟩🟩🟩🟩 · Model 0"


def test_each_square_has_its_least_score() -> None:
    def square(points: float) -> str:
        one = game.Game(PHOTOS[:1]).played({"You": game.Guess(None, None, points)})
        return game.result_line(one).split()[-1]

    assert [square(p) for p in (5000, 4500, 4499, 3000, 2999, 1000, 999, 0)] == list(
        "🟩🟩🟨🟨🟧🟧⬛⬛"
    )
