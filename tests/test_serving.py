"""README.md's page on serving: its commands and its snippet give the answers that were verified."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from exports import ROOT, answers, blocks, section, serve, vllm_cpu, warm_adapter

from geoguessr_rl import data
from geoguessr_rl.parsing import parse_answer


@vllm_cpu
def test_the_served_merged_model_gives_the_answers_that_the_export_verified(
    world: Path, tmp_path: Path
) -> None:
    page = section("Serve with vLLM")
    merge, command = blocks(page, "bash")[0].split("\n", 1)
    (snippet,) = blocks(page, "python")
    merge = merge.replace(".venv/bin/python", shlex.quote(sys.executable))
    merge = merge.replace("outputs/grpo-qwen3vl4b", str(warm_adapter(world)))
    tiny = f"--model {world}/warm --data_dir {world}/data --set prompt.style=direct --device cpu"
    out = tmp_path / "outputs/merged"
    done = subprocess.run(
        shlex.split(f"{merge} {tiny} --output_dir {out}"), capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads((out / "export.json").read_text())
    assert measured["equal"] == measured["photos"] == 16

    # The tiny model's prompt style and photo size; the snippet is otherwise as it stands there.
    for old, new in (('"think"', '"direct"'), ("configs/data", f"{ROOT}/configs/embedded/data")):
        assert old in snippet
        snippet = snippet.replace(old, new)
    photos = data.load_split(world / "data", "eval_quick", limit=4).photos
    expected = answers(out, photos)
    assert len(set(expected)) > 1
    with serve(command, tmp_path, dict(os.environ)) as address:
        (tmp_path / "ask.py").write_text(snippet.replace("http://127.0.0.1:8000", address))
        for photo, answer in zip(photos, expected, strict=True):
            shutil.copy(photo.path, tmp_path / "photo.jpg")
            asked = subprocess.run(
                [sys.executable, "ask.py"], capture_output=True, text=True, cwd=tmp_path
            )
            assert asked.returncode == 0, asked.stderr[-3000:]
            assert asked.stdout == f"{answer}\n{parse_answer(answer)}\n"
