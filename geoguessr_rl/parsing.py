"""A model's text -> its answer, or nothing.

This is the only reader of completions: rollouts, filter, evaluation and demo all score what
`parse_answer` finds. It is lenient about how the answer is spelt and strict about what it says, so
that nothing is guessed on the model's behalf: no swapped coordinates, no default country.
"""

import ast
import json
import re
import warnings
from dataclasses import dataclass

from geoguessr_rl.countries import to_iso2
from geoguessr_rl.prompt import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN

# A real answer has about 60 characters. Python's parser may need unbounded memory for a long text.
MAX_BLOCK_CHARS = 2000

_TAG = re.compile("|".join(map(re.escape, (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE))))
_FENCE = re.compile(r"\A```\w*|```\Z")
_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")
# Minus, hyphens and dashes that models write before a number.
_MINUS = re.compile(r"[\u2212\u2010-\u2015\ufe63\uff0d](?=[\d.])")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """One place on Earth, as the model named it.

    Attributes:
        country: The country as written, never empty.
        country_iso2: Its alpha-2 code; None where `to_iso2` knows no such country.
        lat: Decimal degrees within [-90, 90].
        lon: Decimal degrees within [-180, 180].
    """

    country: str
    country_iso2: str | None
    lat: float
    lon: float


def parse_answer(text: str) -> ParsedAnswer | None:
    """Reads the last complete answer block outside the thinking.

    The block may stand in a code fence, carry trailing commas, single quotes, numbers as text, a
    Unicode minus, and more keys. Takes linear time and never raises, whatever the text.

    Args:
        text: A raw completion. Text before a lone closing think tag is thinking, because some chat
            templates open the thinking in the prompt.

    Returns:
        The answer, or None: no such block, one over `MAX_BLOCK_CHARS`, one that does not parse, no
        country, or a coordinate that is missing, no finite number, or out of range.
    """
    block = _last_block(text)
    if block is None or len(block) > MAX_BLOCK_CHARS:
        return None
    payload = _load(_FENCE.sub("", block.strip()).strip())
    if not isinstance(payload, dict):
        return None
    country = payload.get("country")
    lat = _coordinate(payload.get("lat"), 90.0)
    lon = _coordinate(payload.get("lon"), 180.0)
    if not isinstance(country, str) or not country.strip() or lat is None or lon is None:
        return None
    country = country.strip()
    return ParsedAnswer(country, to_iso2(country), lat, lon)


def _last_block(text: str) -> str | None:
    """Walks over the tags once and keeps the last complete block outside the thinking."""
    thinking = False
    block: str | None = None
    start: int | None = None
    for tag in _TAG.finditer(text):
        token = tag.group()
        if token == THINK_OPEN:
            thinking = True
        elif token == THINK_CLOSE:
            if not thinking:  # the template opened it: all that came before was thinking
                block = None
            thinking = False
        elif token == ANSWER_CLOSE and start is not None:
            block = text[start : tag.start()]
        start = tag.end() if token == ANSWER_OPEN and not thinking else None
    return block


def _load(block: str) -> object:
    """Parses JSON, or else a Python literal; None where it is neither."""
    block = _MINUS.sub("-", block)
    try:
        return json.loads(block)
    except (ValueError, RecursionError):
        block = _TRAILING_COMMA.sub("", block)
    try:
        return json.loads(block)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python comments on odd escapes in the model's text
            return ast.literal_eval(block)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _coordinate(value: object, limit: float) -> float | None:
    """Returns a number, or a text that is one, as finite degrees within the limit."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Compared before the conversion: a long enough int does not fit into a float. NaN fails too.
    return float(value) if abs(value) <= limit else None
