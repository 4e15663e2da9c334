"""README.md: what it names exists, and the commands of its blocks are taken from it and run.

A block runs in a copy of the checkout whose configs are the embedded world's, under the names of
the real ones, so that a command for the real model runs as it stands in the page. A block that
another module runs is in `RUN_ELSEWHERE`; one that needs what no test has says so in the page.
"""

import argparse
import csv
import dataclasses
import inspect
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, chat
from conftest import make_rows, scene
from guide import PAGE, ROOT, Block, all_commands, blocks, braces, commands, prose, sections, spans
from ruamel.yaml import YAML

from geoguessr_rl import config as configs
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import Backend
from geoguessr_rl.config import CONFIGS, Section, load
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Photo, Sampling
from geoguessr_rl.reward import RewardShape

TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [block for block in blocks(TEXT) if block.language in ("bash", "python")]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))

WHY_NOT_RUN = {
    "it needs a rented machine",
    "it needs several GPUs",
    "it needs two machines",
    "it needs a GPU",
    "it needs a network that reaches an advisory database",
}
# The first line of a block -> who takes it from the page, or tries the same commands.
RUN_ELSEWHERE = {
    "bash runbook/quickstart.sh": [
        "tests/test_quickstart.py::test_the_quickstart_learns_what_it_promises",
        ".ci/run::runbook/run_tests.sh",
    ],
    ".venv/bin/python scripts/prepare_data.py --engine ray": [
        "tests/test_ray.py::test_prepare_writes_the_files_of_the_local_engine",
        "tests/test_ray.py::test_evaluation_writes_the_files_of_the_local_engine",
    ],
    ".venv/bin/python scripts/merge_and_export.py --lora outputs/grpo-qwen3vl4b --push both \\": [
        "tests/test_model_card.py::test_the_commands_of_the_readme_push_whole_repositories",
    ],
    ".venv/bin/hf upload YOU/tiny-base outputs/quickstart/seed-0-transformers/base --private \\": [
        "tests/test_model_card.py::test_the_commands_of_the_readme_push_whole_repositories",
    ],
    ".venv/bin/python scripts/merge_and_export.py --lora outputs/grpo-qwen3vl4b": [
        "tests/test_serving.py::test_the_served_merged_model_gives_the_answers_that_the_export_verified",
    ],
    "import base64": [
        "tests/test_serving.py::test_the_served_merged_model_gives_the_answers_that_the_export_verified",
    ],
}
DEMO = ".venv/bin/python scripts/demo_gradio.py"
TRAINING = ".venv/bin/python scripts/plan_run.py"
AFTER = "bash scripts/eval_checkpoints.sh outputs/grpo-qwen3vl4b"
REWARD = ".venv/bin/python scripts/reward_lab.py outputs/filter --set reward.shape=piecewise"
DATA = ".venv/bin/python scripts/prepare_data.py --limit 200"
OWN = "mkdir -p outputs/own/images/train outputs/own/images/test"
MEASURING = ".venv/bin/python scripts/run_eval.py --run_name base"
API = (
    "export OPENAI_BASE_URL=https://api.example.com/v1 OPENAI_API_KEY=YOUR_KEY "
    "OPENAI_MODEL=their-model"
)
BACKEND = "from geoguessr_rl.artifacts import UserError"
# What stands in the page for something that only the reader can name.
PLACEHOLDERS = {
    DATA: {
        "FILE": "data/eval_osv.manifest.json",
        "DIR": "outputs/rebuilt",
    },
    MEASURING: {"FILE": "outputs/eval/base/eval_osv/predictions.jsonl"},
    AFTER: {"checkpoint-N": "checkpoint-4"},
}


# --- Every block is run, here or elsewhere, or says why not


def test_every_block_is_run_or_says_to_the_reader_why_not() -> None:
    for block in BLOCKS:
        if block.not_run is None:
            known = block.first in RUN_HERE or block.first in RUN_ELSEWHERE
            assert known, (
                f"{block.section}: no test runs the block that begins with {block.first!r}; run it "
                "in tests/test_guide.py, or mark it with <!-- not run: why --> and tell the reader"
            )
            continue
        assert block.not_run in WHY_NOT_RUN, f"{block.first}: no known reason {block.not_run!r}"
        seen = f"not run: {block.not_run}"
        assert seen in block.around, f"{block.first}: no paragraph beside it says {seen!r}"
        for name in block.stand_ins:
            assert (ROOT / name).is_file(), f"{block.first}: there is no {name}"


def test_a_comment_that_marks_a_block_stands_directly_before_it() -> None:
    marked = sum(block.not_run is not None for block in BLOCKS)
    assert TEXT.count("<!-- not run") == marked, "a comment <!-- not run … --> marks no block"
    assert {block.language for block in blocks(TEXT)} <= {"bash", "python", ""}


def test_what_other_modules_run_is_in_the_page_and_they_are_there() -> None:
    firsts = [block.first for block in BLOCKS]
    for first, tests in RUN_ELSEWHERE.items():
        assert firsts.count(first) == 1, f"RUN_ELSEWHERE: the page has no block {first!r}"
        for test in tests:
            path, _, name = test.partition("::")
            wanted = f"def {name}(" if path.endswith(".py") else name
            assert wanted in (ROOT / path).read_text(encoding="utf-8"), f"there is no {test}"
    for first in (*RUN_HERE, *PLACEHOLDERS):
        assert firsts.count(first) == 1, f"the page has no block {first!r}"


# --- What commands name


@cache
def parser_of(name: str) -> argparse.ArgumentParser:
    """The command line of a script, which is not run."""

    class ParsedError(Exception):
        pass

    def stop(self: argparse.ArgumentParser, *args: object) -> None:
        raise ParsedError(self)

    patch = pytest.MonkeyPatch()
    with patch.context() as inside:
        inside.setattr(argparse.ArgumentParser, "parse_args", stop)
        try:
            runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
        except ParsedError as parsed:
            return parsed.args[0]  # type: ignore[no-any-return]
    raise AssertionError(f"{name} parses no command line")


FORWARDS = {"eval_checkpoints.sh": ["eval_checkpoints.py"], "run_ablation.sh": ["train_grpo.py"]}


@cache
def flags_of(name: str) -> set[str]:
    """The flags that a script of ours takes."""
    if name.endswith(".py"):
        return set(parser_of(name)._option_string_actions)
    (path,) = [p for folder in ("scripts", "runbook") for p in (ROOT / folder).glob(name)]
    text = path.read_text(encoding="utf-8")
    own = {flag for line in re.findall(r"^ +(--[^)\n]*)\)", text, re.M)
           for flag in re.findall(r"--\w+", line)}  # fmt: skip
    own |= set(re.findall(r'= "?(--\w+)"? \]', text))
    return own.union(*(flags_of(other) for other in FORWARDS.get(name, [])))


SHELL = sorted(
    path.name for folder in ("scripts", "runbook") for path in (ROOT / folder).glob("*.sh")
)
ALL_FLAGS = {flag for name in (*SCRIPTS, *SHELL) for flag in flags_of(name)}
# Other programs: where their flags are written down.
PROGRAMS = {
    "accelerate": ["accelerate/commands/launch.py"],
    "ray": ["ray/scripts/scripts.py"],
    "hf": ["huggingface_hub/cli/upload.py"],
    "trl": ["trl/scripts/vllm_serve.py"],
    "vllm": ["vllm/engine/arg_utils.py", "vllm/entrypoints/**/cli_args.py"],
    "torchrun": ["torch/distributed/run.py"],
    "pytest": ["_pytest/*.py", "xdist/plugin.py", "pytest_cov/plugin.py"],
    "coverage": ["coverage/cmdline.py"],
    "uv": [],
}


@cache
def source_of(program: str) -> str | None:
    """The text in which a program's flags stand; None where it is not installed."""
    parts = []
    for name in PROGRAMS[program]:
        package, _, inner = name.partition("/")
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        files = [*Path(spec.submodule_search_locations[0]).glob(inner)]
        assert files, f"{program}: its flags are no longer in {name}"
        parts += [path.read_text(encoding="utf-8") for path in files]
    return "\n".join(parts) or None


def knows(program: str, flag: str) -> bool:
    text = source_of(program)
    names = (flag, flag.replace("-", "_"), f"--{flag[2:].replace('_', '-')}")
    field = rf"^\s+{flag[2:].replace('-', '_')}:"
    return text is None or any(n in text for n in names) or bool(re.search(field, text, re.M))


def script_in(command: list[str]) -> tuple[int, str] | None:
    """Where a command names a script of ours, and which."""
    for n, word in enumerate(command):
        if (name := Path(word).name) in (*SCRIPTS, *SHELL) and not word.startswith("--"):
            return n, name
    return None


def wrong_flags(command: list[str]) -> list[str]:
    """What a command passes that its program does not take."""
    said = " ".join(command)
    found = script_in(command)
    end = found[0] if found else len(command)
    words = [Path(word).name for word in command if not re.match(r"[A-Z_]+=", word)]
    begin = words[2] if words[:2] == ["python", "-m"] else words[0]
    program = begin if begin in PROGRAMS else None
    wrong = []
    for n, word in enumerate(command):
        if not re.match(r"--[a-z]", word):
            continue
        flag = word.split("=")[0]
        if found and n > end:
            ok = flag in flags_of(found[1])
        elif program:
            ok = knows(program, flag)
        else:
            ok = flag in ALL_FLAGS or any(knows(p, flag) for p in PROGRAMS if source_of(p))
        if not ok:
            by = found[1] if found and n > end else program or "any program of the page"
            wrong.append(f"{flag} is no flag of {by}: {said}")
    return wrong


def test_every_flag_exists() -> None:
    found = all_commands(TEXT)
    assert len(found) > 60
    wrong = [line for command in found for line in wrong_flags(command)]
    assert not wrong, "\n".join(wrong)


def test_every_script_that_a_command_runs_exists() -> None:
    """A folder-less `x.py` in a command would be found by no other check."""
    for command in all_commands(TEXT):
        for word in command:
            if re.fullmatch(r"(scripts|runbook|tests)/[\w/]+\.(py|sh)", word):
                assert (ROOT / word).is_file(), f"there is no {word}: {' '.join(command)}"


def test_every_task_of_the_benchmark_exists() -> None:
    tasks = runpy.run_path(str(ROOT / "scripts/benchmark.py"))["TASKS"]
    for command in all_commands(TEXT):
        if (found := script_in(command)) and found[1] == "benchmark.py":
            for word in command[found[0] + 1 :]:
                assert word in tasks, f"the benchmark has no task {word}; it has {', '.join(tasks)}"


# --- Config keys


@cache
def trainer_keys() -> set[str]:
    """TRL's own, out of its source: importing it takes seconds."""
    files = ("trl/trainer/grpo_config.py", "trl/trainer/base_config.py")
    files = (*files, "transformers/training_args.py")
    keys: set[str] = set()
    for name in files:
        package, _, inner = name.partition("/")
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            path = Path(spec.submodule_search_locations[0]) / inner
            if path.is_file():
                keys |= set(re.findall(r"^    (\w+): ", path.read_text(encoding="utf-8"), re.M))
    return keys


CLASSES = [
    value for name, value in vars(configs).items()
    if name.endswith("Config") and isinstance(value, type) and issubclass(value, Section)
]  # fmt: skip


def parts_of(cls: type[Section], field: str) -> list[type]:
    """The classes in a field's annotation."""
    annotation = cls.model_fields[field].annotation
    options = [annotation, getattr(annotation, "__origin__", None)]
    options += getattr(annotation, "__args__", ())
    return [option for option in options if isinstance(option, type)]


def has_key(cls: type[Section], parts: list[str]) -> bool:
    """Whether a config has a dotted key; TRL's and a shape's own keys included."""
    field = cls.model_fields.get(parts[0])
    if field is None or len(parts) == 1:
        return field is not None
    if parts[0] == "trainer":
        return len(parts) == 2 and parts[1] in trainer_keys()
    if parts[0] == "parameters":
        return parts[1] in {field.name for field in dataclasses.fields(RewardShape)} - {"name"}
    inner = [part for part in parts_of(cls, parts[0]) if issubclass(part, Section)]
    return bool(inner) and has_key(inner[0], parts[1:])


def config_of(script: str) -> tuple[type[Section], Path] | None:
    """The config class and the default file of a script."""
    script = {"smoke_test.sh": "train_grpo.py"}.get(script, script)
    script = script.replace("eval_checkpoints.sh", "eval_checkpoints.py")
    if not script.endswith(".py"):
        return None
    text = (ROOT / "scripts" / script).read_text(encoding="utf-8")
    phase = re.search(r'add_config_flags\(parser, "(\w+)"', text)
    cls = re.search(r"= load\((\w+),", text)
    return (getattr(configs, cls[1]), CONFIGS / f"{phase[1]}.yaml") if phase and cls else None


def test_every_key_that_is_set_exists_and_takes_its_value() -> None:
    checked = 0
    for command in all_commands(TEXT):
        if "--set" not in command:
            continue
        said, found = " ".join(command), script_in(command)
        settings = [command[n + 1] for n, word in enumerate(command[:-1]) if word == "--set"]
        settings = [setting for setting in settings if setting != "a.b=value"]
        for setting in settings:
            key = setting.split("=")[0]
            classes = [config_of(found[1])[0]] if found else CLASSES  # type: ignore[index]
            ok = any(has_key(cls, key.split(".")) for cls in classes)
            assert ok, f"{key} is no key of {found[1] if found else 'any config'}: {said}"
            checked += 1
        if found and settings:
            cls, path = config_of(found[1])  # type: ignore[misc]
            try:
                load(cls, path, overrides=settings)
            except UserError as error:
                raise AssertionError(f"{said}: {error}") from None
    assert checked > 12


SECTIONS = {
    name
    for cls in CLASSES
    for name in cls.model_fields
    if any(issubclass(part, Section | dict) for part in parts_of(cls, name))
}


OUR_FOLDERS = ("geoguessr_rl", "scripts", "runbook", "configs")


@cache
def our_source() -> str:
    """All code of the project, as one text."""
    files = [path for folder in OUR_FOLDERS for path in (ROOT / folder).rglob("*")]
    kinds = (".py", ".sh", ".jinja")
    return "\n".join(p.read_text(encoding="utf-8") for p in files if p.suffix in kinds)


SUFFIXES = {
    "csv", "env", "html", "json", "jsonl", "lock", "parquet", "pt", "pth", "py", "sh", "txt",
    "yaml",
}  # fmt: skip
LEFT_TO_OTHERS = {"photos.csv", "rng_state.pth"}  # the reader's, and the trainer's


def test_every_dotted_word_is_a_key_a_file_or_a_name_of_the_code() -> None:
    wrong = []
    for span in spans(TEXT):
        if not (word := re.fullmatch(r"([a-z_]\w*(?:\.[a-z_]\w*)+)(?:[=:] ?.+)?", span)):
            continue
        dotted = word[1]
        first, last = dotted.split(".")[0], dotted.rsplit(".", 1)[1]
        if first in SECTIONS and last not in SUFFIXES:
            if not any(has_key(cls, dotted.split(".")) for cls in CLASSES):
                wrong.append(f"`{dotted}` is no config key")
        elif first == "geoguessr_rl":
            path = ROOT / f"{dotted.replace('.', '/')}.py"
            module, _, name = dotted.rpartition(".")
            holder = ROOT / f"{module.replace('.', '/')}.py"
            if not path.is_file() and not (holder.is_file() and name in holder.read_text()):
                wrong.append(f"`{dotted}` is no module and no name in one")
        elif dotted in LEFT_TO_OTHERS:
            continue
        elif last not in SUFFIXES:
            wrong.append(f"`{dotted}` is no config key, and no name of the code")
        elif dotted not in our_source() and not (
            [
                *ROOT.glob(dotted),
                *(p for folder in OUR_FOLDERS for p in (ROOT / folder).rglob(dotted)),
            ]
        ):
            wrong.append(f"there is no file `{dotted}`, and nothing of ours writes one")
    assert not wrong, "\n".join(wrong)


def test_every_key_with_a_value_in_the_prose_is_a_key() -> None:
    """`engine: ray`, `trainer.x: y`."""
    fields = {name for cls in vars(configs).values() if isinstance(cls, type)
              and issubclass(cls, Section) for name in cls.model_fields}  # fmt: skip
    for span in spans(TEXT):
        if word := re.fullmatch(r"([a-z_]+): \S.*", span):
            assert word[1] in fields | trainer_keys(), f"`{span}`: {word[1]} is no config key"


def remedies() -> dict[str, list[str]]:
    """What the table of failures sets, by what one sees."""
    table = sections(TEXT)["When something fails"]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {row[0].strip(): re.findall(r"`([\w.]+=[\w.]+)`", row[1]) for row in rows[1:]}


def test_trl_takes_every_remedy_and_refuses_what_the_guide_warns_of() -> None:
    from geoguessr_rl.backends.planning import trainer_args

    def accept(*settings: str) -> None:
        config = load(configs.GrpoConfig, CONFIGS / "grpo.yaml", overrides=settings)
        trainer_args(config.trainer)

    rows = remedies()
    assert len(rows) == 10 and sum(map(len, rows.values())) > 6
    for seen, settings in rows.items():
        if "memory at start" in seen:  # one after the other
            for setting in settings:
                accept(setting)
        else:
            accept(*settings)
    with pytest.raises(UserError, match="divisible"):
        accept("trainer.num_generations=6")


# --- Files, links and tests

FOLDERS = r"(?:scripts|configs|runbook|tests|geoguessr_rl|\.github|\.ci)"


def test_every_path_exists() -> None:
    found = set(re.findall(rf"(?<![\w/.~-]){FOLDERS}/[\w./{{}},-]*[\w}}/]", TEXT))
    assert len(found) > 40
    missing = [
        path for name in sorted(found) for path in braces(name.rstrip("."))
        if not (ROOT / path).exists()
    ]  # fmt: skip
    assert not missing, f"README.md names what does not exist: {', '.join(missing)}"


def slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_every_link_leads_to_a_heading_or_a_file() -> None:
    anchors = {slug(title) for title in sections(TEXT)}
    for target in re.findall(r"\]\(([^)]+)\)", prose(TEXT)):
        if target.startswith("#"):
            assert target[1:] in anchors, f"no heading has the anchor {target}"
        elif "://" not in target:
            assert (ROOT / target).is_file(), f"there is no {target}"


def test_every_pytest_command_finds_a_test() -> None:
    checked = 0
    for command in all_commands(TEXT):
        said = " ".join(command)
        files = [word for word in command if re.fullmatch(r"tests/\w+\.py", word)]
        if "pytest" not in " ".join(command[:3]):
            continue
        assert files, f"names no test file: {said}"
        names = []
        for name in files:
            assert (ROOT / name).is_file(), f"there is no {name}: {said}"
            names += re.findall(r"^def (test_\w+)", (ROOT / name).read_text(), re.M)
        if "-k" in command:
            word = command[command.index("-k") + 1]
            assert any(word in name for name in names), f"no test matches -k {word}: {said}"
        checked += 1
    assert checked > 5


def test_the_files_section_names_every_module() -> None:
    (tree,) = re.findall(r"```\n(.*?)```", sections(TEXT)["Files"], re.DOTALL)
    package, _, rest = tree.partition("\nscripts/")
    parts = re.split(r"^  (backends|phases)/", package, flags=re.M)
    named = {"": parts[0], "backends": parts[2], "phases": parts[4]}
    missing = []
    for path in sorted((ROOT / "geoguessr_rl").rglob("*.py")):
        folder = "" if path.parent.name == "geoguessr_rl" else path.parent.name
        shown = path.stem if folder == "phases" else path.name
        if path.stem != "__init__" and not re.search(rf"(?<!\w){shown}(?!\w)", named[folder]):
            missing.append(path.relative_to(ROOT).as_posix())
    assert not missing, f"the section Files of README.md does not name {', '.join(missing)}"
    for line in tree.splitlines():
        if name := re.match(r"( *)([\w.]+\.\w+) ", line):
            found = [*(ROOT / "geoguessr_rl").rglob(name[2]), *ROOT.glob(name[2])]
            assert found, f"the section Files names {name[2]}, which does not exist"
    for name in ("scripts", "configs", "tests", "runbook"):
        assert f"\n{name}/" in tree
    assert rest


# --- The front


def test_the_front_fits_two_screens() -> None:
    front = TEXT.split("\n## Guide\n")[0]
    assert len(front.splitlines()) <= 110
    for wanted in ("runbook/quickstart.sh", "runbook/run_tests.sh", "pictures/report.webp",
                   "pictures/demo_guess.webp", "not measured yet", "estimates"):  # fmt: skip
        assert wanted in front, f"the front of README.md lacks {wanted}"


def test_the_weekends_hours_and_dollars_add_up() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in sections(TEXT)["The weekend"].splitlines() if line.startswith("|")
    ]  # fmt: skip
    price = load(configs.GrpoConfig, CONFIGS / "grpo.yaml").dollars_per_hour
    phases = [row for row in rows if row[0] in ("Friday", "Saturday", "Sunday")]
    days = [("Friday", "Saturday", "Sunday").index(row[0]) for row in phases]
    assert days == sorted(days) and set(days) == {0, 1, 2}
    spent = [(float(row[5]), float(row[6])) for row in phases if row[6]]
    for hours, dollars in spent:
        assert dollars == pytest.approx(hours * price, abs=0.006), (hours, dollars)
    hours, dollars = (float(cell) for cell in rows[-1][5:7])
    assert hours == sum(row[0] for row in spent)
    assert dollars == pytest.approx(hours * price, abs=0.05)


# --- The release


def test_version_citation_and_changelog_name_one_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\d+\.\d+\.\d+) — (\d{4}-\d{2}-\d{2})$", log, re.M)
    assert releases, "CHANGELOG.md has no heading like ## 0.1.0 — 2026-11-30"
    version, date = releases[0]
    assert project["version"] == version == str(citation["version"])
    assert str(citation["date-released"]) == date
    assert log.index("## Unreleased") < log.index(f"## {version}")
    assert citation["license"] == project["license"]


def test_the_workflow_runs_the_projects_own_command_with_least_rights() -> None:
    path = ROOT / ".github/workflows/ci.yml"
    workflow = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    assert {"push", "pull_request"} <= set(workflow["on"])
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] == 60 and job["runs-on"].startswith("ubuntu")
    assert [step.get("run") for step in job["steps"]][-1] == "bash .ci/run"
    assert (ROOT / ".ci/run").is_file()
    for step in job["steps"]:
        assert "uses" not in step or re.fullmatch(r"[\w/-]+@v\d+", step["uses"])


@pytest.mark.parametrize("name", ["bug", "photo_case", "config"])
def test_an_issue_form_is_well_formed(name: str) -> None:
    path = ROOT / f".github/ISSUE_TEMPLATE/{name}.yml"
    form = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    if name == "config":
        assert form == {"blank_issues_enabled": False}
        return
    assert form["name"] and form["description"]
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert ids and len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_what_the_other_pages_name_exists(name: str) -> None:
    text = (ROOT / ".github" / name).read_text(encoding="utf-8")
    for path in re.findall(rf"(?<![\w/.~-]){FOLDERS}/[\w./-]*\w", text):
        assert (ROOT / path).exists(), f".github/{name} names {path}, which does not exist"
    for block in blocks(text):
        for command in commands(block.code):
            assert not wrong_flags(command)


def test_nothing_runs_code_that_comes_with_a_model() -> None:
    assert "trust_remote_code" not in our_source()


# --- The blocks, run


def change_configs(checkout: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Changes keys in a checkout's configs; a section's other keys stay."""
    yaml = YAML()
    for name, change in changes.items():
        path = checkout / f"configs/{name}.yaml"
        config = yaml.load(path.read_text(encoding="utf-8"))
        for key, value in change.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(config, file)


def make_checkout(folder: Path, data: Path | None = None) -> Path:
    """Copies what a command needs into a folder with a space in its name.

    The embedded world's configs stand in the real ones' places.
    """
    checkout = folder / "a checkout"
    skip = shutil.ignore_patterns("__pycache__", "ablations")
    for name in ("geoguessr_rl", "scripts", "runbook"):
        shutil.copytree(ROOT / name, checkout / name, ignore=skip)
    shutil.copytree(ROOT / "configs/embedded", checkout / "configs", ignore=skip)
    shutil.copy(ROOT / "configs/demo.yaml", checkout / "configs")
    (checkout / ".venv").symlink_to(sys.prefix)
    if data is not None:
        shutil.copytree(data, checkout / "data")
    source = {"root": str(checkout / "world"), "train": [0]}
    change_configs(checkout, {
        "data": {"source": source, "eval": {"size": 24, "quick": 12, "rounds": 25}},
        "grpo": {"trainer": {"output_dir": "outputs/grpo-qwen3vl4b"}},
    })  # fmt: skip
    return checkout


def answer_by_script(checkout: Path) -> None:
    """Lets evaluation and filter take given answers, which needs no model."""
    answers = [
        format_completion(name, *place, clues="red soil", style="think")
        for name, place in {"Brazil": (-12.2, -55.6), "Kenya": (-0.3, 36.9)}.items()
    ]
    (checkout / "answers.json").write_text(json.dumps({"*": answers}))
    generation = {"backend": "scripted", "script": str(checkout / "answers.json")}
    change_configs(checkout, {
        "eval": {"generation": generation},
        "filter": {"generation": generation, "rows": 40, "min_rows": 1},
    })  # fmt: skip


def execute(checkout: Path, code: str, **environment: str) -> str:
    """Runs shell code as a reader would who stands in the checkout; returns what it prints."""
    env = {
        **os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "POLARS_MAX_THREADS": "2", "TRANSFORMERS_VERBOSITY": "error", **environment,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], capture_output=True, text=True, cwd=checkout,
        env=env, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"{code}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stdout


def filled(block: Block) -> str:
    """A block's code with the placeholders of `PLACEHOLDERS` filled in."""
    code = block.code
    for word, value in PLACEHOLDERS.get(block.first, {}).items():
        assert word in code, f"{block.first}: the page no longer says {word}"
        code = re.sub(rf"(?<![\w/]){word}\b" if word.isupper() else word, value, code)
    return code


def block_of(first: str) -> Block:
    (block,) = [block for block in BLOCKS if block.first == first]
    return block


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small embedded world in the OSV-5M layout."""
    from geoguessr_rl.embedded import draw_world

    root = tmp_path_factory.mktemp("drawn") / "world"
    draw_world(root, train=48, test=24, seed=0)
    return root


@pytest.fixture(scope="module")
def checkout(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout on whose embedded world the Data block has been run."""
    made = make_checkout(tmp_path_factory.mktemp("guide"))
    answer_by_script(made)
    shutil.copytree(drawn, made / "world")
    out = execute(made, filled(block_of(DATA)))
    assert "rebuilt 24 rows in outputs/rebuilt" in out
    return made


def test_the_data_block_runs(checkout: Path) -> None:
    names = {path.name for path in (checkout / "data").glob("*.parquet")}
    assert names == {"train_pool.parquet", "eval_osv.parquet", "eval_quick.parquet"}
    parts = [folder / "eval_osv.parquet" for folder in (checkout / "data",
             checkout / "outputs/rebuilt")]  # fmt: skip
    assert parts[0].read_bytes() == parts[1].read_bytes()


def test_five_lines_turn_a_table_and_a_folder_of_photos_into_splits(
    drawn: Path, tmp_path: Path
) -> None:
    block = block_of(OWN)
    assert len(block.code.splitlines()) == 5
    checkout = make_checkout(tmp_path)
    rows = make_rows(["FR", "KE", "XK", "JP", "Atlantis"], each=36)
    (checkout / "photos").mkdir()
    for n, row in enumerate(rows):
        (checkout / f"photos/{row['id']}.jpg").write_bytes(scene(n))
    with (checkout / "photos.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "latitude", "longitude", "country"])
        writer.writeheader()
        writer.writerows(rows)
    execute(checkout, block.code)
    data = checkout / "outputs/own/data"
    summary = json.loads((data / "summary.json").read_text())
    assert summary["splits"]["eval_osv"]["rows"] == 100
    assert summary["splits"]["train_pool"]["rows"] == 44
    assert summary["train"]["dropped"]["same_photo"] == 100
    assert summary["train"]["dropped"]["no_country"] == 36  # what is no code is left out
    said = execute(checkout, ".venv/bin/python scripts/prepare_data.py --verify "
                   "--source outputs/own --output_dir outputs/own/data "
                   "--set 'source.train=[0]' --set eval.size=100")  # fmt: skip
    assert said.startswith("verified 3 splits")


def test_the_measuring_block_runs(checkout: Path) -> None:
    block = block_of(MEASURING)
    execute(checkout, ".venv/bin/python scripts/run_eval.py --run_name rl "
            "--set generation.script=random_land")  # fmt: skip
    said = execute(checkout, filled(block))
    assert "country_acc" in said or "country" in said
    runs = {path.parent.name for path in (checkout / "outputs/eval").glob("*/eval_osv")}
    assert {"base", "k8", "prior", "rl"} <= runs


def test_the_api_block_asks_the_server_that_it_names(checkout: Path) -> None:
    block = block_of(API)
    text = format_completion("Kenya", -0.3, 36.9, clues="red soil", style="think")
    with ApiServer(lambda request: chat(text)) as server:
        url = server.url
        code = block.code.replace("https://api.example.com/v1", url)
        assert code != block.code
        if not (checkout / "outputs/eval/base/eval_osv/metrics.json").exists():
            execute(checkout, ".venv/bin/python scripts/run_eval.py --run_name base")
        execute(checkout, code)
        assert len(server.requests) == 20 + 24  # a block that was cut short is asked again whole
        assert server.requests[0].headers["authorization"] == "Bearer YOUR_KEY"
        assert server.requests[0].body["model"] == "their-model"
    metrics = checkout / "outputs/eval/their-model/eval_osv/metrics.json"
    assert json.loads(metrics.read_text())["n"] == 24


def test_the_backend_of_the_guide_is_one() -> None:
    scope: dict[str, Any] = {}
    exec(block_of(BACKEND).code, scope)
    made = scope["AlwaysLima"]()
    for name in ("generate", "logprobs"):
        wanted = inspect.signature(getattr(Backend, name)).parameters
        given = inspect.signature(getattr(type(made), name)).parameters
        assert [(p.name, p.kind, p.default) for p in given.values()] == [
            (p.name, p.kind, p.default) for p in wanted.values()
        ]
    photos = [Photo("1", Path("1.jpg"), 0.0, 0.0, "PE")] * 3
    completions = made.generate(photos, Sampling(max_tokens=20, n=2))
    assert [len(row) for row in completions] == [2, 2, 2]
    from geoguessr_rl.parsing import parse_answer

    answer = parse_answer(completions[0][0].text)
    assert answer is not None and answer.country_iso2 == "PE"
    with pytest.raises(UserError):
        made.logprobs(photos, ["x"])


@pytest.fixture(scope="module")
def weekend(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which the Training block and the one after it were run, on a taught model."""
    from warm_base import warm_up_thinking

    made = make_checkout(tmp_path_factory.mktemp("weekend"), world / "data")
    shutil.copytree(warm_up_thinking(world), made / "base")
    small = {
        "eval": {"generation": {"block_size": 12, "batch_size": 12}},
        "filter": {"rows": 40, "min_rows": 1},
        "grpo": {"trainer": {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 32}},
    }
    change_configs(made, {
        name: {"model": {"name": str(made / "base")}, **small.get(name, {})}
        for name in ("eval", "filter", "grpo", "export")
    })  # fmt: skip
    execute(made, ".venv/bin/python scripts/filter_learnable.py")
    execute(made, ".venv/bin/python scripts/run_eval.py --run_name base")
    (made / "training.txt").write_text(execute(made, filled(block_of(TRAINING))))
    (made / "after.txt").write_text(execute(made, filled(block_of(AFTER))))
    return made


@pytest.mark.slow
def test_the_training_block_runs(weekend: Path) -> None:
    said = (weekend / "training.txt").read_text()
    for words in ("recommended max_steps = 1440", "ready to train: ", "smoke test passed"):
        assert words in said, said[-3000:]
    training = weekend / "outputs/grpo-qwen3vl4b"
    assert (training / "checkpoint-4").is_dir() and (training / "samples.html").is_file()


@pytest.mark.slow
def test_the_block_after_training_runs(weekend: Path) -> None:
    for name in ("report.md", "report.html", "merged/model.safetensors"):
        assert (weekend / "outputs" / name).is_file()
    assert [*(weekend / "outputs").rglob("checkpoints.json")]


@pytest.mark.slow
def test_the_reward_block_runs(weekend: Path) -> None:
    said = execute(weekend, block_of(REWARD).code)
    assert "train_learnable" in said and (weekend / "outputs/reward_lab").is_dir()


@pytest.mark.slow
def test_each_demo_of_the_demo_block_opens(weekend: Path) -> None:
    quick = weekend / "outputs/quickstart/seed-0-transformers"
    quick.mkdir(parents=True)
    for name, target in {"base": "base", "grpo": "outputs/grpo-qwen3vl4b", "data": "data",
                         "report.html": "outputs/report.html"}.items():  # fmt: skip
        (quick / name).symlink_to(weekend / target)
    port = free_port()
    change_configs(weekend, {"demo": {"port": port}})
    lines = commands(block_of(DEMO).code)
    assert len(lines) == 3 and all(script_in(line) for line in lines)
    for line in lines:
        code = " ".join(line).replace("7861", str(port))
        process = subprocess.Popen(
            ["bash", "-c", f"exec {code}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=weekend, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(weekend), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            said = next((row for row in process.stdout if row.startswith("demo: http")), None)
            assert said, f"{code}: {process.communicate(timeout=60)[1][-2000:]}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The first line of each block that a test above takes from the page and runs.
RUN_HERE: dict[str, Callable[..., None]] = {
    DATA: test_the_data_block_runs,
    OWN: test_five_lines_turn_a_table_and_a_folder_of_photos_into_splits,
    MEASURING: test_the_measuring_block_runs,
    API: test_the_api_block_asks_the_server_that_it_names,
    TRAINING: test_the_training_block_runs,
    AFTER: test_the_block_after_training_runs,
    REWARD: test_the_reward_block_runs,
    DEMO: test_each_demo_of_the_demo_block_opens,
    BACKEND: test_the_backend_of_the_guide_is_one,
}
