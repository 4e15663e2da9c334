"""Every constant, comparison and connective of the reward and of the parser is held by a test.

Each is changed in turn in a copy of the package, and the tests of both modules have to fail.
"""

import ast
import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = [str(ROOT / "tests" / name) for name in ("test_reward.py", "test_parsing.py")]

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}  # fmt: skip

# Changes that change nothing that anybody could see, each with its module and its reason.
SAME = {
    "@lru_cache(maxsize=1) -> 2": "reward.py: a second batch that is kept costs memory alone",
    "if d_km <= km2: -> d_km < km2": "reward.py: two lines agree on the knot between them",
    "progress = 0.0 -> 0.001": "reward.py: only a curriculum looks at it, and sets it",
    "return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(h))) -> 1.011": (
        "reward.py: the root of what rounding gives is 1 in all that was tried; the guard stays"
    ),
}


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where something can be changed: a node, its field, and the place in it of a list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from ((node, "ops", n) for n in range(len(node.ops)))
        elif isinstance(node, ast.BoolOp) or (
            isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE
        ):
            yield node, "op", None
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, int | float)
            and not isinstance(node.value, bool)
        ):
            yield node, "value", None


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Each changed source, and the statement or expression that was changed."""
    tree = ast.parse(source)
    for count in range(len([*places(tree)])):
        changed = copy.deepcopy(tree)
        node, field, n = [*places(changed)][count]
        if field == "value":
            value = getattr(node, field)
            setattr(node, field, value + 1 if isinstance(value, int) else value * 1.01 + 1e-3)
        elif n is None:
            setattr(node, field, OPPOSITE[type(getattr(node, field))]())
        else:
            ops = getattr(node, field)
            ops[n] = OPPOSITE[type(ops[n])]()
        line = getattr(node, "lineno", 0)
        text = source.splitlines()[line - 1].partition("  #")[0].strip()
        yield ast.unparse(changed), f"{text} -> {ast.unparse(node)}"


def survives(folder: Path, name: str, text: str) -> bool:
    """Whether the tests pass with a module's text changed."""
    shutil.copytree(ROOT / "geoguessr_rl", folder / "geoguessr_rl")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "geoguessr_rl" / name).write_text(text, encoding="utf-8")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TESTS],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    shutil.rmtree(folder)
    # 2 and 4: it cannot be imported.
    assert ended.returncode in (0, 1, 2, 4), ended.stdout + ended.stderr
    return ended.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reward.py", "parsing.py"])
def test_no_change_of_a_constant_or_a_comparison_survives(name: str, tmp_path: Path) -> None:
    source = (ROOT / "geoguessr_rl" / name).read_text(encoding="utf-8")
    assert survives(tmp_path / "unchanged", name, source)
    found = [*mutants(source)]
    assert len(found) > 15

    def judge(number: int) -> str | None:
        text, what = found[number]
        return what if survives(tmp_path / str(number), name, text) else None

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        left = {what for what in pool.map(judge, range(len(found))) if what is not None}
    assert left == {what for what in SAME if SAME[what].startswith(name)}
