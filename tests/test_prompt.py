"""What the model is told, and that `parse_answer` reads what the prompt asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geoguessr_rl import prompt
from geoguessr_rl.parsing import parse_answer
from geoguessr_rl.prompt import PROMPT_STYLES, PromptStyle, build_messages, format_completion


@pytest.mark.parametrize("style", PROMPT_STYLES)
def test_the_messages_are_plain_strings_from_system_and_user(style: PromptStyle) -> None:
    messages = build_messages(style)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert all(isinstance(message["content"], str) for message in messages)
    assert messages[0]["content"] == prompt.SYSTEM


@pytest.mark.parametrize("style", PROMPT_STYLES)
def test_the_prompt_names_the_tags_and_keys_that_are_parsed(style: PromptStyle) -> None:
    text = build_messages(style)[1]["content"]
    for word in ("<answer>", "</answer>", '"country"', '"lat"', '"lon"'):
        assert word in text
    assert ("<think>" in text) == ("</think>" in text) == (style == "think")


@pytest.mark.parametrize("style", PROMPT_STYLES)
def test_the_worked_example_is_an_answer_that_parses(style: PromptStyle) -> None:
    example = build_messages(style)[1]["content"].partition("For example:\n")[2]
    answer = parse_answer(example)
    assert answer is not None
    assert (answer.country_iso2, answer.lat, answer.lon) == ("KZ", 49.8, 73.1)


@given(st.sampled_from(PROMPT_STYLES), st.floats(-90, 90), st.floats(-180, 180))
def test_a_written_completion_reads_back(style: PromptStyle, lat: float, lon: float) -> None:
    text = format_completion("Côte d'Ivoire", lat, lon, clues="red <soil>", style=style)
    answer = parse_answer(text)
    assert answer is not None
    assert (answer.country_iso2, answer.lat, answer.lon) == ("CI", lat, lon)
    assert text.startswith("<think>red <soil></think>") == (style == "think")
