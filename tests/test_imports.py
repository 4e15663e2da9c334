"""The layers: imports go down only, and heavy libraries load late."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "geoguessr_rl"
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
FILES = sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])

# The architecture: scripts -> phases -> backends -> ... ; a module imports its own layer or lower.
LAYERS = [
    {"prompt", "parsing", "countries", "reward"},
    {"records", "config", "artifacts"},
    {"images", "hub", "sources", "screen", "photos", "data", "budget", "embedded"}
    | {"bootstrap", "eval_metrics", "comparison", "uncertainty"}
    | {
        "charts",
        "report_figures",
        "report_tables",
        "reproduce",
        "outlines",
        "world_map",
        "data_card",
        "places",
        "runs",
        "tables",
    }
    | {"reward_figures", "model_card", "upload"}
    | {"alarms", "samples", "demo_views", "exif", "game", "photo_drop", "space"},
    {"backends"},
    {"phases"},
    {"scripts"},
]
HEAVY = {"torch", "transformers", "trl", "peft", "vllm", "gradio"}
# Whatever else is heavy or belongs to an extra that the core does without.
EXTRAS = HEAVY | {"datasets", "accelerate", "torchvision", "wandb", "tensorboard", "ray"}


def module_of(path: Path) -> str:
    """The dotted name of a file: `geoguessr_rl.data`, `scripts.run_eval`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def layer_of(module: str) -> int | None:
    """The layer of one of our modules; None for the package itself, which holds nothing."""
    parts = module.split(".")
    name = parts[0] if parts[0] == "scripts" else (parts[1] if len(parts) > 1 else None)
    if name is None:
        return None
    (layer,) = [n for n, names in enumerate(LAYERS) if name in names] or [-1]
    assert layer >= 0, f"{module} is in no layer; add it to LAYERS where it belongs"
    return layer


def imports(tree: ast.AST, module: str, *, nested: bool = True) -> Iterator[str]:
    """The dotted names that a file imports; with `nested=False` those of import time only."""
    todo = list(ast.iter_child_nodes(tree))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield from (resolve(node.module or "", alias.name) for alias in node.names)
        elif is_type_checking(node):
            todo.extend(node.orelse)  # type: ignore[attr-defined]
        elif nested or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo.extend(ast.iter_child_nodes(node))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def resolve(module: str, name: str) -> str:
    """`from a import b` imports the module `a.b` where there is one, else `a`."""
    return f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def imported(module: str, *, nested: bool = True) -> set[str]:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return set(imports(tree, module, nested=nested))


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in (PACKAGE, "scripts")}


def test_the_walk_sees_the_whole_package() -> None:
    assert {f"{PACKAGE}.{name}" for layer in LAYERS[:5] for name in layer} <= set(MODULES)
    assert "scripts.run_eval" in MODULES
    assert f"{PACKAGE}.phases.evaluate" in imported("scripts.run_eval")
    assert f"{PACKAGE}.phases.evaluate" not in imported("scripts.run_eval", nested=False)
    assert "torch" in {name.split(".")[0] for name in imported(f"{PACKAGE}.backends.models")}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    own = layer_of(module)
    for name in ours(imported(module)):
        other = layer_of(name)
        assert own is not None, f"{module} is the package and imports {name}"
        assert other is None or other <= own, f"{module} imports {name}, which is above it"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(f"{PACKAGE}.phases.")])
def test_phases_do_not_import_each_other(module: str) -> None:
    others = {n for n in imported(module) if n.startswith(f"{PACKAGE}.phases.")}
    allowed = {f"{PACKAGE}.phases.train"} if module.endswith(".preflight") else set()
    assert others <= allowed


def test_scripts_do_not_import_each_other() -> None:
    for module in MODULES:
        if module.startswith("scripts."):
            assert not [name for name in imported(module) if name.startswith("scripts")]


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    graph = {module: ours(imported(module)) & set(MODULES) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        # A package's __init__ and its members know each other: an import inside a function.
        for name in graph[module] - {module}:
            if module.startswith(f"{PACKAGE}.backends") and name.startswith(f"{PACKAGE}.backends"):
                continue
            assert name not in path, " -> ".join([*path, module, name])
            if name not in done:
                visit(name, (*path, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_are_imported_by_backends_and_phases_alone(module: str) -> None:
    roots = {name.split(".")[0] for name in imported(module)}
    if not module.startswith((f"{PACKAGE}.backends", f"{PACKAGE}.phases")):
        assert not roots & EXTRAS


@pytest.mark.parametrize("module", MODULES)
def test_only_the_inner_modules_of_backends_import_heavy_libraries_at_their_top(
    module: str,
) -> None:
    roots = {name.split(".")[0] for name in imported(module, nested=False)}
    if not module.startswith(f"{PACKAGE}.backends."):
        assert not roots & EXTRAS


def test_prompt_parsing_countries_and_reward_read_and_write_no_file() -> None:
    arithmetic = {"bootstrap", "eval_metrics", "comparison", "uncertainty", "budget"}
    for name in sorted(LAYERS[0] | arithmetic):
        roots = {one.split(".")[0] for one in imported(f"{PACKAGE}.{name}")}
        assert not roots & {"os", "pathlib", "shutil", "subprocess", "socket", "polars"}, name


ASK = """
import contextlib, io, json, runpy, sys
sys.argv = [sys.argv[1], "--help"]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps([out.getvalue(), sorted(sys.modules)]))
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_answers_without_a_heavy_library(name: str) -> None:
    command = [sys.executable, "-c", ASK, str(ROOT / "scripts" / name)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    usage, modules = json.loads(ended.stdout)
    assert usage.startswith("usage:")
    loaded = {module.split(".")[0] for module in modules}
    assert "argparse" in loaded
    assert not loaded & (EXTRAS | {"matplotlib", "scipy", "pillow_heif", "PIL"})


def test_every_phase_can_be_imported_without_a_heavy_library() -> None:
    phases = [module for module in MODULES if module.startswith(f"{PACKAGE}.phases.")]
    lines = [f"import {module}" for module in phases]
    code = "\n".join([*lines, "import sys, json", "print(json.dumps(sorted(sys.modules)))"])
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {module.split(".")[0] for module in json.loads(ended.stdout)}
    assert not loaded & HEAVY
