"""Reading and scoring one completion: GRPO does 64 of them between two steps."""

import json
import math

from benchmarks.inputs import CLUES
from benchmarks.measure import Figure, median_of, microseconds, ratios
from geoguessr_rl.parsing import parse_answer
from geoguessr_rl.prompt import ANSWER_CLOSE, ANSWER_OPEN, format_completion
from geoguessr_rl.reward import EARTH_RADIUS_KM, components

BOUND_US = 50.0
CALLS, REPEATS = 2000, 7


def _arithmetic(block: str) -> float:
    """Does the least that a score takes: JSON to numbers, and the distance of two points."""
    answer = json.loads(block)
    lat1, lon1, lat2, lon2 = map(math.radians, (answer["lat"], answer["lon"], 43.2, 76.9))
    half = (
        math.sin((lat2 - lat1) / 2) ** 2
        + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    )
    return 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(half))


def run(scale: float) -> list[Figure]:
    """Times a completion of usual length, and the arithmetic in it."""
    text = format_completion("Kazakhstan", 49.8, 73.1, clues=CLUES, style="think")
    block = text.partition(ANSWER_OPEN)[2].removesuffix(ANSWER_CLOSE)
    calls = max(1, int(scale * CALLS))
    ours, limit = [], []
    for _ in range(REPEATS):
        parsing = microseconds(lambda: parse_answer(text), calls)
        # `components` parses once more itself; the sum is the bound's own way to count.
        ours.append(parsing + microseconds(lambda: components(text, 43.2, 76.9, "KZ"), calls))
        limit.append(microseconds(lambda: _arithmetic(block), calls))
    against = "json.loads of the answer and one haversine"
    return [
        median_of("read and score a completion", ours, "us", at_most=BOUND_US),
        median_of("read and score a completion", ratios(ours, limit), "times", against),
    ]
