"""What counts as an answer: the table of reported completions, the kinds behind it, and bait."""

import json
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from geoguessr_rl import parsing
from geoguessr_rl.parsing import MAX_BLOCK_CHARS, ParsedAnswer, parse_answer
from geoguessr_rl.prompt import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN

TABLE = Path(__file__).parent / "cases" / "answers.jsonl"
CASES = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]

CHILE_JSON = '{"country": "Chile", "lat": -33.4, "lon": -70.6}'
CHILE = ParsedAnswer("Chile", "CL", -33.4, -70.6)
ANSWER = f"<answer>{CHILE_JSON}</answer>"
DECOY = '<answer>{"country": "Peru", "lat": -12, "lon": -77}</answer>'


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"])
def test_the_table_of_reported_completions(case: dict) -> None:
    answer = parse_answer(case["text"])
    if case["answer"] is None:
        assert answer is None
    else:
        assert answer is not None
        assert {"country": answer.country, "lat": answer.lat, "lon": answer.lon} == case["answer"]


def test_an_unknown_country_keeps_its_coordinates_with_a_null_code() -> None:
    text = '<answer>{"country": "Atlantis", "lat": 1, "lon": 2}</answer>'
    assert parse_answer(text) == ParsedAnswer("Atlantis", None, 1.0, 2.0)


@pytest.mark.parametrize(
    "text",
    [
        f"<think>{DECOY}</think>{ANSWER}",
        f"{DECOY}</think>{ANSWER}",
        f"<think>a</think><think>{DECOY}</think>{ANSWER}",
        f"{ANSWER}<think>never closed {DECOY}",  # swallows only what follows
        f"{ANSWER}<think>{DECOY}</think>",
        f"{ANSWER}<answer>{{cut",  # the last complete block
        f"{DECOY} or <answer>{ANSWER}",  # opened twice: the inner one is complete
        f"{ANSWER}</answer>",
    ],
)
def test_the_last_complete_block_outside_thinking_counts(text: str) -> None:
    assert parse_answer(text) == CHILE


@pytest.mark.parametrize(
    "text",
    [
        f"<think>{ANSWER}",
        f"<think>{ANSWER}</think>",
        f"{ANSWER}</think>",
        f"<think>a</think>{ANSWER}</think>",
        f"<answer><think>{CHILE_JSON}</answer>",
        f"<answer>{CHILE_JSON}",
        f"{CHILE_JSON}</answer>",
        f"{ANSWER}<answer>not json</answer>",
    ],
)
def test_what_stands_in_thinking_or_is_cut_off_is_no_answer(text: str) -> None:
    assert parse_answer(text) is None


@pytest.mark.parametrize(
    "block",
    [
        f"```json\n{CHILE_JSON}\n```",
        f"```\n{CHILE_JSON}```",
        f"\n\t {CHILE_JSON} \n",
        '{"country": "Chile", "lat": -33.4, "lon": -70.6, }',
        "{'country': 'Chile', 'lat': '-33.4', 'lon': -70.6,}",
        '{"country": " Chile ", "lat": " -33.4 ", "lon": "-7.06e1"}',
        '{"country": "Chile", "lat": \u221233.4, "lon": \u201370.6}',
        '{"country": "Chile", "lat": "\u221233.4", "lon": "\uff0d70.6"}',
        '{"country": "Chile", "lat": -33.4, "lon": -70.6, "sure": true, "why": null,}',
        '{"country": "Peru", "country": "Chile", "lat": -33.4, "lon": -70.6}',
    ],
)
def test_the_block_is_read_leniently(block: str) -> None:
    assert parse_answer(f"<answer>{block}</answer>") == CHILE


@pytest.mark.parametrize(
    "value",
    [
        "true",
        '"true"',
        "null",
        "NaN",
        '"nan"',
        "-Infinity",
        '"inf"',
        "1e400",
        '"1e400"',
        "[1]",
        "{}",
        '""',
        '"33.4 S"',
        '"33,4"',
        '"3_3"',
        '"٣٣"',
        "-90.0001",
        "9" * 400,
        '"- 33"',
        "1+1j",
    ],
)
def test_a_coordinate_is_a_finite_number_in_range(value: str) -> None:
    assert (
        parse_answer(f'<answer>{{"country": "Chile", "lat": {value}, "lon": 1}}</answer>') is None
    )


@pytest.mark.parametrize("country", ["null", '""', '" \\n"', "5", '["Chile"]', "true"])
def test_a_country_is_a_text_that_says_something(country: str) -> None:
    assert parse_answer(f'<answer>{{"country": {country}, "lat": 1, "lon": 1}}</answer>') is None


def test_the_edges_of_the_map_are_in_range() -> None:
    text = '<answer>{"country": "Fiji", "lat": -90, "lon": -180}</answer>'
    assert parse_answer(text) == ParsedAnswer("Fiji", "FJ", -90.0, -180.0)


@pytest.mark.parametrize("place", [(90.5, 0), (-90.001, 0), (0, 180.5), (0, -180.001)])
def test_a_place_a_little_off_the_earth_is_none(place: tuple[float, float]) -> None:
    text = f'<answer>{{"country": "Fiji", "lat": {place[0]}, "lon": {place[1]}}}</answer>'
    assert parse_answer(text) is None


def test_a_block_over_the_limit_is_refused_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BLOCK_CHARS == 2000
    padding = MAX_BLOCK_CHARS - len(CHILE_JSON)
    assert parse_answer(f"<answer>{CHILE_JSON}{' ' * padding}</answer>") == CHILE
    too_long = f"<answer>{CHILE_JSON}{' ' * (padding + 1)}</answer>"
    assert parse_answer(too_long) is None
    monkeypatch.setattr(parsing, "MAX_BLOCK_CHARS", 10**9)  # without the guard it gets through
    assert parse_answer(too_long) == CHILE


# Fragments that steer hypothesis into the parser: random text alone hardly ever holds a tag.
FRAGMENTS = st.sampled_from(
    [
        THINK_OPEN,
        THINK_CLOSE,
        ANSWER_OPEN,
        ANSWER_CLOSE,
        CHILE_JSON,
        '{"country": "Chile"',
        "```",
        "{",
        "}",
        "[" * 900,
        "(" * 900,
        "-" * 1900,
        "'",
        '"',
        "\\",
        "\\d",
        "\x00",
        "\ud800",
        "\u22121",
        "9" * 1900,
        "1+" * 900,
        "not " * 450,
        "lambda:" * 250,
        "{[]: 1}",
        "{{}}",
        "f'{",
        "1e999",
    ]
)
ANY_TEXT = st.lists(FRAGMENTS | st.text(st.characters()), max_size=12).map("".join)


@settings(max_examples=300)
@given(ANY_TEXT, st.booleans())
@example("'\\d'\x00", True)
def test_no_text_makes_it_raise(text: str, in_block: bool) -> None:
    answer = parse_answer(f"<answer>{text}</answer>" if in_block else text)
    if answer is not None:
        assert answer.country
        assert abs(answer.lat) <= 90 and abs(answer.lon) <= 180


@pytest.mark.parametrize(
    "block",
    [
        "{[]: 1}",  # TypeError
        "(1," * 660,  # MemoryError
        "[" * 1990,  # RecursionError, then SyntaxError
        "9" * 1990,
        "-" * 1990,
        "\x00",
        "\ud800",
    ],
    ids=lambda block: ascii(block[:8]),
)
def test_no_error_of_the_parsers_gets_out(block: str) -> None:
    assert parse_answer(f"<answer>{block}</answer>") is None


def test_python_does_not_comment_on_the_models_text() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parse_answer("<answer>{'country': 'Chile\\d', 'lat': 1, 'lon': 1}</answer>")
    assert not caught


@pytest.mark.parametrize(
    "unit",
    [
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "<",
        "</",
        "<answer>{",
        "[",
        "</think><answer>{",
        "<answer></answer>",
        "<answer>" + "[" * 1900 + "</answer>",
        "<answer>" + "9" * 1900,
        "<answer>" + ", " * 900 + "</answer>",
        "```",
        "<answer>```" + " " * 1900 + "</answer>",
        "7",
    ],
    ids=lambda unit: unit[:24],
)
@pytest.mark.parametrize("frame", ["{}", "<answer>{}</answer>", '<answer>{{"country": "{}'])
def test_a_megabyte_of_bait_takes_less_than_a_second(unit: str, frame: str) -> None:
    bait = frame.format(unit * (2**20 // len(unit)))
    started = time.perf_counter()
    parse_answer(bait)
    assert time.perf_counter() - started < 1.0
