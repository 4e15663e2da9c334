"""Times what runs often, and fails when it has become too slow.

`python scripts/benchmark.py` runs every task, `python scripts/benchmark.py reward` one. The exit
code is 1 when a task breaks its bound. To add a task, write a function and name it in `TASKS`.
"""

import argparse
import sys
import timeit
from collections.abc import Callable

from geoguessr_rl.parsing import parse_answer
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.reward import components

REWARD_BOUND_US = 50.0

_CLUES = (
    "Cyrillic signs above a kiosk, a long straight road with a worn dashed centre line, dry steppe "
    "grass up to the horizon, low concrete poles with two insulators, a white plate with a blue "
    "band, and a pale dry sky. The people drive on the right. All of it fits Central Asia, and the "
    "letters on the second sign are Kazakh, not Russian."
)


def _microseconds(call: Callable[[], object], calls: int = 2000, repeats: int = 7) -> float:
    """Returns the least time of one call: what disturbs a measurement only ever adds to it."""
    return min(timeit.repeat(call, number=calls, repeat=repeats)) / calls * 1e6


def reward() -> bool:
    """Times the scoring of a usual completion: GRPO scores 64 of them between two steps."""
    text = format_completion("Kazakhstan", 49.8, 73.1, clues=_CLUES, style="think")
    parsing = _microseconds(lambda: parse_answer(text))
    # `components` parses once more itself; the sum is the bound's own way to count.
    scoring = _microseconds(lambda: components(text, 43.2, 76.9, "KZ"))
    total = parsing + scoring
    print(f"reward: a completion of {len(text)} characters")
    print(f"  parse_answer {parsing:.1f} us + components {scoring:.1f} us = {total:.1f} us")
    print(f"  bound {REWARD_BOUND_US:.0f} us: {'kept' if total < REWARD_BOUND_US else 'BROKEN'}")
    return total < REWARD_BOUND_US


TASKS: dict[str, Callable[[], bool]] = {"reward": reward}


def main() -> int:
    """Runs the chosen tasks, and returns 1 when one breaks its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"any of: {', '.join(TASKS)}")
    names = parser.parse_args().tasks or [*TASKS]
    if unknown := [name for name in names if name not in TASKS]:
        parser.error(f"no task {unknown[0]!r}; there are: {', '.join(TASKS)}")
    kept = [TASKS[name]() for name in names]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
