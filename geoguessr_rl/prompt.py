"""What the model is told, and the tags it answers in.

Every phase (warm-up, filter, GRPO, evaluation, demo) builds its prompt here, so that a model is
never measured on other words than the ones that it was trained on. The tags are defined here and
nowhere else; `parsing.py` reads them back. Rendering to tokens is the chat template's work.
"""

import json
from typing import Literal, TypedDict, get_args

PromptStyle = Literal["think", "direct"]
PROMPT_STYLES: tuple[PromptStyle, ...] = get_args(PromptStyle)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"

MAX_COMPLETION_TOKENS = 512

TEMPLATE_KWARGS = {"enable_thinking": False}
"""For a template that can think by itself, which would swallow the block that we ask for."""

SYSTEM = (
    "You are an expert GeoGuessr player. You go by what you see in the photo, "
    "and you always commit to one place."
)

_EXAMPLE_CLUES = (
    "Cyrillic shop signs, steppe grass, a dry continental sky and Soviet-era concrete poles."
)
_EXAMPLE = ("Kazakhstan", 49.8, 73.1)


class Message(TypedDict):
    """One chat message with plain-string content (TRL inserts the image block itself)."""

    role: str
    content: str


def format_completion(
    country: str, latitude: float, longitude: float, *, clues: str = "", style: PromptStyle
) -> str:
    """Writes the completion that a perfect student would give.

    Args:
        country: English country name.
        latitude: Decimal degrees.
        longitude: Decimal degrees.
        clues: The text between the think tags; ignored by the direct style.
        style: The prompt style that the completion answers.

    Returns:
        The thinking block (think style only) and the answer block, as `parse_answer` reads them.
    """
    payload = json.dumps({"country": country, "lat": latitude, "lon": longitude})
    answer = f"{ANSWER_OPEN}{payload}{ANSWER_CLOSE}"
    return answer if style == "direct" else f"{THINK_OPEN}{clues}{THINK_CLOSE}\n{answer}"


def user_text(style: PromptStyle) -> str:
    """Returns the text that stands beside the photo in the user message."""
    think = (
        f"First, within {THINK_OPEN} and {THINK_CLOSE}, name the strongest clues in at most 150 "
        "words: for example scripts and languages, licence plates, poles, road markings and "
        "bollards, the side of the road that people drive on, soil, plants, climate, buildings, "
        "and names. Then, within"
    )
    opening = think if style == "think" else "Within"
    example = format_completion(*_EXAMPLE, clues=_EXAMPLE_CLUES, style=style)
    return (
        "Where on Earth was this photo taken?\n\n"
        f"{opening} {ANSWER_OPEN} and {ANSWER_CLOSE}, give JSON with exactly the keys "
        '"country" (its English name), "lat" and "lon" (decimal degrees).\n\n'
        f"For example:\n{example}"
    )


def build_messages(style: PromptStyle) -> list[Message]:
    """Returns the prompt as two plain-string messages.

    Plain strings on purpose: Arrow cannot mix strings and lists in one column, and block-form
    messages read from a dataset gain a null `image` key that Qwen3-VL's template counts as one
    more image. TRL and `backends` put the image block before the user's text.
    """
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": user_text(style)},
    ]
