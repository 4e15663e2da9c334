"""The house: sizes, and what no file of it may do. The layers are in `test_imports.py`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "geoguessr_rl").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]

LINES = 400
FUNCTION_LINES = 60

# Functions that are longer, each with its reason.
LONG = {
    "backends/predictions.py generate": "one loop over blocks, and its progress bar",
    "phases/demo.py _guess_tab": "a page of Gradio: what stands where, and what moves what",
    "phases/demo.py _play_tab": "a page of Gradio: what stands where, and what moves what",
    "phases/preflight.py all_checks": "a table with a row a check",
    "scripts/benchmarks/data.py run": "seven figures of one data set, which takes minutes to draw",
    "phases/report.py run": "what the templates are given, one line a part",
}

# Where objects of our own are pickled, and read by whom.
PICKLES = {"geoguessr_rl/backends/ray_engine.py": "a cluster's own jobs and results, never a file"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def length(function: ast.FunctionDef) -> int:
    """A function's lines, without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
    return lines


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file: its dotted name, and the call."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_long_module_says_why(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    reason = "is long because" in " ".join((ast.get_docstring(tree(path)) or "").split())
    assert lines <= LINES or reason, f"{lines} lines: split it, or say why in its docstring"
    assert lines > LINES or not reason, "it is not long any more; take the reason out"


def test_a_long_function_has_a_reason() -> None:
    found = {
        f"{name.removeprefix('geoguessr_rl/')} {node.name}"
        for name, path in zip(NAMES, FILES, strict=True)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and length(node) > FUNCTION_LINES
    }
    assert found == LONG.keys()


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_nothing_runs_code_that_it_was_given(path: Path) -> None:
    """No model's own code, no pickle, no shell, no eval."""
    for name, call in calls(path):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert "trust_remote_code" not in given
        assert given.get("shell", "False") == "False"
        assert given.get("weights_only", "True") == "True"
        assert name not in ("eval", "exec", "os.system", "os.popen", "torch.load")
        if name.partition(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "marshal"):
            assert path.relative_to(ROOT).as_posix() in PICKLES, name


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_no_config_trusts_a_models_own_code(path: Path) -> None:
    assert "trust_remote_code" not in path.read_text(encoding="utf-8")


def test_every_shell_script_passes_shellcheck() -> None:
    scripts = [*(ROOT / "runbook").glob("*.sh"), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run"]
    command = [Path(sys.executable).with_name("shellcheck"), "-x", "-P", "SCRIPTDIR", *scripts]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert len(scripts) > 8 and ended.returncode == 0, ended.stdout + ended.stderr
