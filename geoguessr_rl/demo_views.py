"""What the demo's page shows, as HTML and as pins of its map, from plain data.

Whatever comes from a model, a file's name or a dataset is text here: the template escapes it.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from geoguessr_rl.eval_metrics import central, spread_km
from geoguessr_rl.game import ROUNDS, Game, Guess, result_line
from geoguessr_rl.parsing import ParsedAnswer, parse_answer
from geoguessr_rl.prompt import THINK_CLOSE
from geoguessr_rl.records import Completion
from geoguessr_rl.reward import GEOSCORE_MAX
from geoguessr_rl.tables import clues, country_name, number, place, printable, templates
from geoguessr_rl.world_map import Circle, Kind, Pin, map_value

BASE, TRAINED, ALONE, PERSON = "Base model", "Trained model", "Model", "You"
KINDS: dict[str, Kind] = {BASE: "base", TRAINED: "trained", ALONE: "trained", PERSON: "guess"}
"""How the map marks each of them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model has written about a photo so far.

    Attributes:
        completions: One, or several samples.
        done: Whether that is all.
    """

    completions: Sequence[Completion]
    done: bool

    @property
    def parsed(self) -> list[ParsedAnswer]:
        """The answers of the completions that hold one."""
        return [found for c in self.completions if (found := parse_answer(c.text))]

    @property
    def final(self) -> ParsedAnswer | None:
        """The answer, of several their consensus; None while there is none."""
        found = self.parsed
        return found[central(_places(found))] if found else None

    @property
    def spread_km(self) -> float | None:
        """The median distance between two answers, or None of fewer than two."""
        found = self.parsed
        return spread_km(_places(found)) if len(found) > 1 else None


def _places(answers: Sequence[ParsedAnswer]) -> list[tuple[float, float]]:
    return [(answer.lat, answer.lon) for answer in answers]


def flag(iso2: str | None) -> str:
    """Returns a country's flag: its two letters as regional indicator symbols."""
    return "".join(chr(0x1F1E6 + ord(letter) - ord("A")) for letter in iso2 or "")


@lru_cache
def _template() -> Any:
    environment = templates()
    environment.filters |= {"number": number, "flag": flag, "printable": printable}
    environment.globals |= {"country_name": country_name, "place": place, "KINDS": KINDS}
    return environment.get_template("demo_views.html.jinja").module


def data_uri(jpeg: bytes) -> str:
    """Returns a JPEG as an address that needs no server."""
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()


def answer_card(name: str, answer: Answer | None) -> str:
    """Shows a model's clues as they come, then its country, place and further samples."""
    text = ""
    if answer is not None:
        found = answer.final
        texts = [completion.text for completion in answer.completions]
        text = next((t for t in texts if found and parse_answer(t) == found), texts[0])
    running = text + THINK_CLOSE if THINK_CLOSE not in text else text
    return str(_template().answer_card(name, answer, clues(running), text))


def answer_map(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Pins every answer; around the last model's consensus, a circle shows its samples' spread."""
    pins: list[Pin] = []
    circle: Circle | None = None
    for name, answer in answers.items():
        if (final := answer.final) is None:
            continue
        for sample in answer.parsed if len(answer.completions) > 1 else ():
            pins.append(_pin(sample, "sample"))
        pins.append(_pin(final, KINDS[name]))
        if (spread := answer.spread_km) is not None:
            circle = {"lat": final.lat, "lon": final.lon, "km": spread}
    return map_value(pins, circle=circle)


def _pin(answer: ParsedAnswer, kind: Kind) -> Pin:
    label = country_name(answer.country_iso2 or answer.country)
    return {"lat": answer.lat, "lon": answer.lon, "label": label, "kind": kind}


def guess_table(guesses: Mapping[str, Guess], title: str) -> str:
    """Shows each player's distance and GeoScore."""
    return str(_template().guess_table(guesses, title))


def guess_map(
    guesses: Mapping[str, Guess], truth: tuple[float, float], label: str, kind: Kind
) -> dict[str, Any]:
    """Pins the truth and every guess, with a great circle between them."""
    pins: list[Pin] = [{"lat": truth[0], "lon": truth[1], "label": label, "kind": kind}]
    lines = []
    for name, guess in guesses.items():
        if guess.place is not None:
            lat, lon = guess.place
            away = f"{number(guess.d_km, 'km')} km away"
            pins.append({"lat": lat, "lon": lon, "label": away, "kind": KINDS[name]})
            lines.append((guess.place, truth))
    return map_value(pins, lines, locked=True)


def round_view(game: Game) -> str:
    """Shows the round that was just played, and the totals; at the end the line to share."""
    last = game.rounds[-1]
    over = result_line(game) if game.photo is None else None
    most = GEOSCORE_MAX * ROUNDS
    return str(_template().round_view(last, len(game.rounds), game.totals(), most, over))


def game_photo(game: Game, jpeg: bytes) -> str:
    """Shows the photo to guess; its name could tell where it was taken, and stays out."""
    return str(_template().game_photo(data_uri(jpeg), len(game.rounds) + 1, len(game.photos)))


def report_frame(page: str) -> str:
    """Shows a report in a frame of its own, which may run its scripts and nothing else."""
    return str(_template().report_frame(page))


def note(text: str) -> str:
    """Shows a sentence."""
    return str(_template().note(text))
