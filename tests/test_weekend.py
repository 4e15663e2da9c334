"""The weekend's script: every phase in order, each once, whatever happens in between."""

import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
WEEKEND = ROOT / "runbook/weekend.sh"

SMALL = {
    "data": {"eval": {"size": 60, "quick": 30}, "train": {"cap": 12}},
    "warmup": {"steps": 80, "batch_size": 16, "learning_rate": 4e-3},
    "filter": {"rows": 100, "min_rows": 1},
    "grpo": {"trainer": {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 32}},
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded configs, made small."""
    folder = tmp_path_factory.mktemp("a weekend") / "embedded"
    shutil.copytree(ROOT / "configs/embedded", folder)
    yaml = YAML()
    for name, changes in SMALL.items():
        path = folder / f"{name}.yaml"
        config = yaml.load(path)
        for key, value in changes.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        yaml.dump(config, path)
    return folder


def start(configs: Path, out: Path, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", str(WEEKEND), "--config_dir", str(configs), "--output_dir", str(out), *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def done(out: Path) -> list[str]:
    """The phases that are done."""
    return sorted(path.name for path in (out / "weekend").glob("*"))


def test_a_dry_run_names_every_phase_and_the_price_and_does_nothing(
    configs: Path, tmp_path: Path
) -> None:
    text, _ = start(ROOT / "configs", tmp_path / "out", "--dry_run").communicate()
    phases = [line.removeprefix("to do:").strip() for line in text.splitlines() if "to do" in line]
    assert phases == [
        "prepare the data", "measure the base on eval_osv", "measure the base on eval_pano",
        "smoke test", "filter", "train", "measure the checkpoints",
        "measure the trained model on eval_osv", "measure the trained model on eval_pano",
        "write the report", "export",
    ]  # fmt: skip
    assert "seconds a step" in text and "dollars" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [["--config_dir"], ["--fast"], ["--config_dir", "/nowhere"]])
def test_a_mistake_is_one_sentence(flags: list[str]) -> None:
    command = ["bash", str(WEEKEND), *flags]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_answers(
    configs: Path, tmp_path: Path
) -> None:
    quiet, killed = tmp_path / "quiet run", tmp_path / "killed run"
    text, _ = (process := start(configs, quiet)).communicate()
    assert process.returncode == 0, text[-3000:]
    rng, kills, seen = random.Random(0), 0, set()
    while (process := start(configs, killed)).poll() is None:
        try:
            # Longer and longer, or a phase that cannot be continued never ends.
            text, _ = process.communicate(timeout=rng.uniform(3, 20) + 6 * kills)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            kills += 1
            seen.add(len(done(killed)))
    assert process.returncode == 0, text[-3000:]
    assert kills >= 5 and len(seen) >= 4  # in different phases
    assert done(killed) == done(quiet)
    for run in ("base", "rl"):
        for name in ("predictions.jsonl", "metrics.json"):
            part = f"eval/{run}/eval_osv/{name}"
            before, after = ((out / part).read_text() for out in (quiet, killed))
            assert before.replace(str(quiet), "") == after.replace(str(killed), ""), part
    assert (killed / "report.html").is_file() and (killed / "merged/model.safetensors").is_file()
    again, _ = start(configs, killed).communicate()
    assert again.count("done:") == len(done(killed))  # nothing is done twice
    assert "Traceback" not in again
