"""The commands: a mistake is one sentence and exit code 2, a bug is a traceback."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import run_script

ROOT = Path(__file__).parents[1]
PHASES = {
    "prepare_data.py": "data",
    "run_eval.py": "eval",
    "filter_learnable.py": "filter",
    "warmup_sft.py": "warmup",
    "train_grpo.py": "grpo",
}
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
Script = Callable[..., Any]


def assert_one_sentence(ended: Any) -> None:
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_describes_the_command(name: str, script: Script) -> None:
    ended = script(name, "--help")
    assert ended.code == 0
    assert ended.out.startswith(f"usage: {name}") and len(ended.out.splitlines()) > 4
    if name in PHASES:
        assert all(flag in ended.out for flag in ("--config", "--set", "--limit"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unknown_flag_is_refused(name: str, script: Script) -> None:
    ended = script(name, "--bogus_flag", "3")
    assert ended.code == 2 and "Traceback" not in ended.err


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("limit", ["0", "-1", "abc", "1.5"])
def test_a_limit_that_is_no_count_is_one_sentence(name: str, limit: str, script: Script) -> None:
    ended = script(name, f"--limit={limit}")
    assert_one_sentence(ended)
    assert f"--limit {limit} is wrong" in ended.err


@pytest.mark.parametrize("name", PHASES)
def test_a_missing_config_is_one_sentence(name: str, script: Script, tmp_path: Path) -> None:
    ended = script(name, "--config", tmp_path / "gone.yaml")
    assert_one_sentence(ended)
    assert "gone.yaml does not exist" in ended.err


@pytest.mark.parametrize("name", PHASES)
def test_a_misspelt_key_is_one_sentence(name: str, script: Script, tmp_path: Path) -> None:
    path = tmp_path / "my config.yaml"
    path.write_text("limt: 5\n")
    ended = script(name, "--config", path)
    assert_one_sentence(ended)
    assert f"{path}: unknown key 'limt'; did you mean 'limit'?" in ended.err
    ended = script(name, "--set", "limt=5")
    assert_one_sentence(ended)


# Without train_grpo, which reads TRL's arguments first and so takes seconds.
@pytest.mark.parametrize("name", ["run_eval.py", "filter_learnable.py", "warmup_sft.py"])
def test_missing_data_says_what_to_run(
    name: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = script(name, "--data_dir", tmp_path / "nothing here")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert "run scripts/prepare_data.py first" in ended.err


def test_the_default_config_is_found_from_any_folder(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = script("prepare_data.py", "--source", "nothing here")
    assert_one_sentence(ended)
    assert "test.csv does not exist; check source.root" in ended.err


def test_a_mistake_is_one_sentence_and_a_bug_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def mistake() -> None:
        raise UserError("the file x is empty; download again")

    def bug() -> None:
        raise KeyError("x")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_script(mistake)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: the file x is empty; download again\n"
    with pytest.raises(KeyError):
        run_script(bug)
    with pytest.raises(SystemExit) as ended:
        run_script(stop)
    assert ended.value.code == 130 and "again to continue" in capsys.readouterr().err


def test_a_real_process_ends_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "run_eval.py"), "--limit", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == "error: --limit 0 is wrong: Input should be greater than 0\n"


def test_a_checkout_in_a_folder_with_spaces_works(tmp_path: Path) -> None:
    """The package and the scripts, copied; the configs are found beside them."""
    checkout = tmp_path / "my check out"
    for name in ("geoguessr_rl", "scripts", "configs"):
        shutil.copytree(ROOT / name, checkout / name)
    ended = subprocess.run(
        [sys.executable, str(checkout / "scripts" / "prepare_data.py"), "--source", "nothing"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    assert ended.returncode == 2, ended.stderr
    assert "test.csv does not exist; check source.root" in ended.stderr
