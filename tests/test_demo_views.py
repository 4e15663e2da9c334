"""What the page shows: hostile text stays text, and several samples are summed up honestly."""

from pathlib import Path

from geoguessr_rl import demo_views, game
from geoguessr_rl.demo_views import Answer
from geoguessr_rl.eval_metrics import central, spread_km
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Completion, Photo
from geoguessr_rl.reward import haversine_km

EVIL = "<img src=x onerror=alert(1)>"


def says(*texts: str, done: bool = True) -> Answer:
    return Answer([Completion(text, 9, "stop") for text in texts], done)


def kenya(lat: float, lon: float) -> str:
    return format_completion("Kenya", lat, lon, clues="Red soil.", style="think")


def test_html_of_a_model_is_text_everywhere() -> None:
    text = format_completion(EVIL, 1.0, 2.0, clues=EVIL, style="think")
    card = demo_views.answer_card("Model", says(text, text))
    assert "<img" not in card and card.count("&lt;img") >= 4
    assert "/etc/passwd" in demo_views.answer_card("Model", says("/etc/passwd"))
    (pin,) = [p for p in demo_views.answer_map({"Model": says(text)})["pins"]]
    assert pin["label"] == EVIL  # the map sets labels as text


def test_html_of_a_dataset_and_of_a_report_is_text_too() -> None:
    photo = Photo("1", Path("1.jpg"), 1.0, 2.0, "KE", creator=EVIL, city=EVIL)
    played = game.Game([photo]).played({"You": game.score(photo, (1.0, 2.0))})
    assert "<img" not in demo_views.round_view(played)
    frame = demo_views.report_frame(f'"{EVIL}')
    assert "<img" not in frame and 'sandbox="allow-scripts allow-popups"' in frame
    assert "<img" not in demo_views.note(EVIL)


def test_the_clues_stream_before_their_block_is_closed() -> None:
    card = demo_views.answer_card("Model", says("<think>Red soil, pal", done=False))
    assert "Red soil, pal" in card and "No answer" not in card
    assert "looks at the photo" in demo_views.answer_card("Model", says("", done=False))


def test_an_answer_that_cannot_be_read_says_what_it_would_score() -> None:
    assert "it would score 0" in demo_views.answer_card("Model", says("Kenya, I think"))


def test_samples_are_summed_up_by_the_one_nearest_to_all_others() -> None:
    answer = says(kenya(0, 0), kenya(0, 10), kenya(0, 11), "no answer")
    assert answer.final is not None and (answer.final.lat, answer.final.lon) == (0, 10)
    assert answer.spread_km == haversine_km(0, 0, 0, 10)  # of 1, 10 and 11 degrees the middle one
    shown = demo_views.answer_map({"Base model": says(kenya(5, 5)), "Trained model": answer})
    assert shown["circle"] == {"lat": 0.0, "lon": 10.0, "km": answer.spread_km}
    assert [pin["kind"] for pin in shown["pins"]] == ["base", *["sample"] * 3, "trained"]
    card = demo_views.answer_card("Trained model", answer)
    assert "1 of 4 samples hold no answer" in card and "no margin of error" in card


def test_central_takes_the_first_of_equals_and_spread_is_a_median() -> None:
    assert central([(0.0, 0.0), (0.0, 1.0)]) == 0
    assert central([(0.0, 0.0), (50.0, 1.0), (51.0, 1.0)]) == 1
    assert spread_km([(0.0, 0.0), (0.0, 1.0)]) == haversine_km(0, 0, 0, 1)


def test_flags_are_two_regional_letters_and_nothing_for_no_country() -> None:
    assert demo_views.flag("KE") == "🇰🇪" and demo_views.flag(None) == ""
