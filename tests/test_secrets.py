"""Keys and tokens of the environment are in no output and in no file that a phase writes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from api_server import ApiServer, Request, error

ROOT = Path(__file__).parents[1]
# As the services write them: their clients refuse a key of another form before they use it.
PLANTED = {
    "HF_TOKEN": "hf_" + "plantedPLANTED" * 2 + "xx",
    "WANDB_API_KEY": "c0ffee" * 6 + "c0ff",
    "OPENAI_API_KEY": "sk-planted-0123456789abcdef",
}


def test_planted_secrets_are_in_no_output_and_in_no_file(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "data", tmp_path / "data")
    environment = {
        **os.environ, **PLANTED, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "runs"), "OPENAI_MODEL": "some/model",
    }  # fmt: skip
    printed = []

    def run(script: str, config: str, *args: object, code: int = 0, **more: str) -> None:
        flags = ["--config", ROOT / f"configs/embedded/{config}.yaml", *args]
        ended = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / script), *map(str, flags)],
            capture_output=True, text=True, cwd=tmp_path, env=environment | more,
        )  # fmt: skip
        printed.append(ended.stdout + ended.stderr)
        assert ended.returncode == code, printed[-1][-3000:]

    def refuse(request: Request) -> object:
        """Says the key back, as servers do when they refuse it."""
        assert request.headers["authorization"] == f"Bearer {PLANTED['OPENAI_API_KEY']}"
        return error(401, f"Incorrect API key provided: {PLANTED['OPENAI_API_KEY']}")

    data, model = ["--data_dir", "data"], ["--model", world / "tiny"]
    run("prepare_data.py", "data", "--source", world / "world", "--output_dir", "again")
    steps = ["max_steps=2", "save_steps=2", "per_device_train_batch_size=8", "num_generations=4"]
    steps += ["max_completion_length=8", "report_to=[wandb,tensorboard,trackio]"]
    settings = [part for step in steps for part in ("--set", f"trainer.{step}")]
    run("train_grpo.py", "grpo", *data, *model, "--split", "train_pool", *settings,
        "--output_dir", "grpo")  # fmt: skip
    run("run_eval.py", "eval", *data, *model, "--limit", 8, "--set", "generation.max_tokens=8",
        "--output_dir", "eval", "--run_name", "base")  # fmt: skip
    with ApiServer(refuse) as server:
        run("run_eval.py", "eval", *data, "--backend", "openai", "--limit", 2, "--output_dir",
            "eval", "--run_name", "api", code=2, OPENAI_BASE_URL=server.url)  # fmt: skip

    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "versions.json", "training_log.json", "predictions.jsonl"} <= {
        path.name for path in written
    }
    assert any(path.suffix == ".wandb" for path in written)
    for name, secret in PLANTED.items():
        assert not [text for text in printed if secret in text], name
        found = [path for path in written if secret.encode() in path.read_bytes()]
        assert not found, (name, found)
