"""The Space's folder runs by itself, and holds nothing that may not leave the machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import RepoCard
from test_demo import ROOT, free_port, url_of
from warm_base import loud_adapter, warm_up_thinking

from geoguessr_rl import data, space
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import DemoConfig, ImagePolicy, Model


@pytest.fixture(scope="module")
def config(world: Path) -> DemoConfig:
    base = warm_up_thinking(world)
    lora = loud_adapter(base, world / "loud")
    report = world / "report.html"
    report.write_text("<h1>A report</h1>")
    return DemoConfig(
        model=Model(name=str(base)), lora=lora, data_dir=world / "data", report=report
    )


RECORD = {
    "lora": {"r": 4},
    "prompt_style": "think",
    "image": ImagePolicy(long_edge=160, min_pixels=1024).model_dump(),
    "model_files": "a fingerprint",
}


def serve(folder: Path, python: str = sys.executable) -> "subprocess.Popen[str]":
    """Starts `app.py` from another folder, without this checkout on the path."""
    return subprocess.Popen(
        [python, str(folder / "app.py")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        env={**os.environ, "GRADIO_SERVER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
    )


def check_served(folder: Path, python: str = sys.executable) -> None:
    """Asks the page for an answer and for its own text."""
    from gradio_client import Client

    process = serve(folder, python)
    try:
        url = url_of(process)
        assert "changed in the Space" in httpx.get(f"{url}/config").text
        photo = next((folder / "data/images").rglob("*.jpg")).read_bytes()
        sent = httpx.post(f"{url}/gradio_api/upload", files={"files": ("a.jpg", photo)}).json()[0]
        client = Client(url, verbose=False)
        client.predict({"path": sent, "name": "a.jpg"}, api_name="/photo")
        cards = client.predict(1, api_name="/guess")[-2:]
        assert "Brazil" in cards[0] and "Trained model" in cards[1]
    finally:
        process.terminate()
        process.wait(30)


def write(config: DemoConfig, out: Path) -> Path:
    """Writes a Space, and changes its copy of the code so that no other can pass for it."""
    assert space.write(out, config, RECORD) == 24
    page = out / "geoguessr_rl/phases/demo.py"
    page.write_text(page.read_text().replace("# Where was", "# changed in the Space: where was"))
    return out


def test_a_space_serves_its_own_copy_of_the_demo(config: DemoConfig, tmp_path: Path) -> None:
    check_served(write(config, tmp_path / "space"))


@pytest.mark.slow
def test_a_space_runs_in_an_environment_of_its_own_requirements(
    config: DemoConfig, tmp_path: Path
) -> None:
    folder = write(config, tmp_path / "space")
    uv = shutil.which("uv") or str(ROOT / ".uv/bin/uv")  # one of them has installed these tests
    subprocess.run([uv, "venv", "--quiet", "--python", "3.11", str(tmp_path / "fresh")], check=True)
    python = str(tmp_path / "fresh/bin/python")
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
    subprocess.run([*install, "-r", str(folder / "requirements.txt")], check=True)
    check_served(folder, python)


def test_the_folder_holds_no_path_of_this_machine_and_no_pickle(
    config: DemoConfig, world: Path, tmp_path: Path
) -> None:
    space.write(tmp_path / "space", config, RECORD)
    for file in (tmp_path / "space").rglob("*"):
        assert file.suffix not in (".pt", ".pth", ".bin", ".pkl", ".pyc")
        if file.suffix in (".json", ".yaml", ".md", ".txt", ".py"):
            assert str(world) not in file.read_text(), file
    settings = json.loads((tmp_path / "space/adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "base"


def test_the_card_is_one_that_the_hub_reads(config: DemoConfig, tmp_path: Path) -> None:
    space.write(tmp_path / "space", config, RECORD)
    card = RepoCard.load(tmp_path / "space/README.md")
    found = card.data.to_dict()
    assert found["sdk"] == "gradio" and found["app_file"] == "app.py"
    assert len(found["short_description"]) <= 60  # the Hub's own limit
    assert space.readme("Qwen/Qwen3-VL-4B-Instruct", ["<b>Ann"]).count(r"\<b\>Ann") == 1
    assert "models:\n  - Qwen/Qwen3-VL-4B-Instruct" in space.readme("Qwen/Qwen3-VL-4B-Instruct", [])


@pytest.mark.parametrize("kind", ["pano", "train"])
def test_photos_that_may_not_leave_the_machine_are_refused(
    kind: str, config: DemoConfig, world: Path, tmp_path: Path
) -> None:
    for name in ("eval_osv.parquet", "eval_osv.manifest.json"):
        (tmp_path / name).write_bytes((world / "data" / name).read_bytes())
    path = data.manifest_path(tmp_path, "eval_osv")
    change: dict[str, Any] = {"publishable": False} if kind == "pano" else {"role": "train"}
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    pano = config.model_copy(update={"data_dir": tmp_path})
    with pytest.raises(UserError, match="evaluation only" if kind == "pano" else "held out"):
        space.write(tmp_path / "space", pano, RECORD)
    assert not (tmp_path / "space").exists()


def test_the_export_script_writes_a_space(
    config: DemoConfig, tmp_path: Path, script: Callable[..., Any]
) -> None:
    assert config.model is not None
    flags = ("--model", config.model.name, "--lora", config.lora, "--data_dir", config.data_dir)
    split = ("--set", "split=eval_osv", "--report", config.report)
    ended = script("merge_and_export.py", *flags, *split, "--space", tmp_path / "space")
    assert ended.code == 0, ended.err
    assert "wrote a Space with 24 photos" in ended.out
    assert (tmp_path / "space/report.html").is_file()


def test_a_folder_with_other_files_is_left_alone(config: DemoConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="holds other files"):
        space.write(tmp_path, config, RECORD)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
