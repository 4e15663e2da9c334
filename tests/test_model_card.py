"""A model card says what the runs measured and nothing else, and each of its snippets runs."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from exports import ROOT, answers, blocks, section, serve, vllm_cpu, warm_adapter
from hub_upload_server import INITIAL, UploadServer
from huggingface_hub import ModelCard
from PIL import Image

from geoguessr_rl import data, model_card
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import CONFIGS, EvalConfig, ExportConfig, GrpoConfig, load
from geoguessr_rl.model_card import Evidence
from geoguessr_rl.phases import evaluate
from geoguessr_rl.tables import number

BASE, ADAPTER, BOTH = "YOU/tiny-base", "YOU/tiny-geoguessr", "YOU/geoguessr-qwen3vl4b"
MEASURED = {"photos": 16, "equal": 16, "gap": 0.0, "max_km_apart": 0.0}


@pytest.fixture(scope="module")
def adapter(world: Path) -> Path:
    return warm_adapter(world)


@pytest.fixture(scope="module")
def runs(world: Path, adapter: Path) -> tuple[Path, Path]:
    """The folders of an evaluation of the base, and of one with the adapter."""
    folders = []
    for name, lora in (("base", None), ("rl", adapter)):
        flags = {"model.name": str(world / "warm"), "prompt.style": "direct", "lora": lora}
        flags |= {"data_dir": world / "data", "output_dir": world / "eval", "run_name": name}
        config = load(EvalConfig, CONFIGS / "embedded/eval.yaml", flags=flags)
        evaluate.run(config)
        folders.append(world / "eval" / name / config.split)
    return folders[0], folders[1]


@pytest.fixture
def config(world: Path, adapter: Path, runs: tuple[Path, Path]) -> ExportConfig:
    flags = {"model.name": str(world / "warm"), "prompt.style": "direct", "lora": adapter}
    flags |= {"data_dir": world / "data", "base_run": runs[0], "tuned_run": runs[1]}
    return load(ExportConfig, CONFIGS / "export.yaml", flags=flags)


@pytest.fixture
def evidence(config: ExportConfig, adapter: Path) -> Evidence:
    return model_card.gather(config, adapter)


@pytest.fixture
def card(config: ExportConfig, tmp_path: Path) -> Callable[..., str]:
    """Writes a card, and returns its text."""

    def write(evidence: Evidence, kind: model_card.Kind = "adapter", **options: Any) -> str:
        settings: dict[str, Any] = {"base": "me/base", "licence": None, "adapter": "me/geo"}
        settings |= {"rank": 16, "measured": MEASURED, "template_kwargs": {}, **options}
        paths = model_card.write(tmp_path, kind, "me/geo", evidence, config, **settings)
        assert sorted(paths) == sorted(path for path in tmp_path.rglob("*") if path.is_file())
        return (tmp_path / "README.md").read_text(encoding="utf-8")

    return write


def test_figures_are_those_of_the_runs_with_their_intervals(
    card: Callable[..., str], evidence: Evidence, runs: tuple[Path, Path]
) -> None:
    text = card(evidence)
    before, after = (json.loads((run / "metrics.json").read_text()) for run in runs)
    pair = evidence.found["mean_geoscore"]
    figures = [
        number(value, "score") for value in (before["mean_geoscore"], after["mean_geoscore"])
    ]
    change = number(pair.difference, "score", signed=True)
    ends = " to ".join(number(end, "score", signed=True) for end in (pair.low, pair.high))
    assert f"| Mean GeoScore | {figures[0]} | {figures[1]} | {change} | {ends} |" in text
    found = {result.metric_type: result for result in ModelCard(text).data.eval_results}
    assert found["geoscore"].metric_value == after["mean_geoscore"]
    assert found["geoscore"].metric_args["interval_95"] == after["intervals"]["mean_geoscore"]
    assert found["accuracy_at_25_km"].metric_value == after["acc_at_km"]["25"]
    assert found["accuracy"].dataset_args["fingerprint"] == evidence.split.fingerprint


def test_training_data_and_versions_are_those_of_the_run(
    card: Callable[..., str], evidence: Evidence, world: Path
) -> None:
    text = card(evidence)
    log = json.loads((world / "to-export/training_log.json").read_text())
    hours = max(entry["hours"] for entry in log if "hours" in entry)
    versions = json.loads((world / "to-export/versions.json").read_text())
    assert f"2 steps took {hours:.3g} hours and {1.39 * hours:.3g} dollars at 1.39" in text
    assert f"| trl | {versions['trl']} | {versions['trl']} |" in text
    for split in ("train_pool", "eval_osv"):
        assert data.load_split(world / "data", split).fingerprint in text
    assert text.splitlines().count("**" + model_card.embedded.NOTE + "**") == 1


@pytest.mark.parametrize(
    ("kind", "library", "relation", "licence"),
    [("adapter", "peft", "adapter", "apache-2.0"), ("merged", "transformers", "finetune", "mit")],
)
def test_the_front_matter_is_what_the_hubs_client_reads(
    card: Callable[..., str], evidence: Evidence, kind: str, library: str, relation: str,
    licence: str,
) -> None:  # fmt: skip
    read = ModelCard(card(evidence, kind, licence="mit")).data
    assert (read.library_name, read.base_model_relation, read.license) == (
        library, relation, licence,
    )  # fmt: skip
    assert read.pipeline_tag == "image-text-to-text" and read.base_model == "me/base"
    assert "geoguessr-rl" in read.tags and read.model_name == "geo"
    assert [entry["src"] for entry in read.widget] == [f"examples/{n}.jpg" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("type: geoscore", "typ: geoscore"),
        ("    metrics:\n", "    metric:\n"),
        ("pipeline_tag: image-text-to-text", "pipeline_tag: text"),
        ("library_name: peft", "library_name: [peft"),
        ("---\nbase_model", "base_model"),
    ],
)
def test_a_card_that_reads_back_otherwise_is_refused(
    card: Callable[..., str], evidence: Evidence, old: str, new: str
) -> None:
    text = card(evidence)
    meant = model_card.front_matter("adapter", "me/geo", evidence, "me/base", None, [])
    meant.widget = ModelCard(text).data.widget
    model_card.check(text, meant)
    assert old in text
    with pytest.raises((ValueError, yaml.YAMLError)):
        model_card.check(text.replace(old, new, 1), meant)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.9", True])
def test_a_figure_that_is_none_is_refused(
    card: Callable[..., str], evidence: Evidence, value: Any
) -> None:
    found = dict(evidence.found)
    found["mean_geoscore"] = replace(found["mean_geoscore"], after=value)
    meant = model_card.front_matter(
        "adapter", "me/geo", replace(evidence, found=found), None, None, []
    )
    with pytest.raises(ValueError, match=r"is no figure|reads back otherwise"):
        model_card.check(f"---\n{meant.to_yaml()}\n---\n", meant)


def test_what_is_missing_is_said_to_be_missing(
    config: ExportConfig, adapter: Path, tmp_path: Path, card: Callable[..., str]
) -> None:
    alone = tmp_path / "alone/adapter"
    alone.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, alone)
    unmeasured = config.model_copy(update={"base_run": None, "tuned_run": None})
    evidence = model_card.gather(unmeasured, alone)
    shutil.rmtree(alone.parent)
    text = card(evidence, base=None, licence=None)
    assert "Not measured yet." in text and "| not measured yet |" in text
    assert "its settings, hours and cost are not recorded here" in text
    assert "Training: not recorded here." in text and "see the base model's card" in text
    assert ModelCard(text).data.get("eval_results") is None
    assert "took" not in text and "%" not in text.split("## Training")[1]


def wrong(config: ExportConfig, **updates: Any) -> str:
    with pytest.raises(UserError) as raised:
        model_card.gather(config.model_copy(update=updates), config.lora)
    return str(raised.value)


def test_runs_of_something_else_are_refused(
    config: ExportConfig, runs: tuple[Path, Path], world: Path, tmp_path: Path
) -> None:
    base, tuned = runs
    assert "is not a run of the adapter in" in wrong(config, tuned_run=base)
    assert "is not a run of the base alone" in wrong(config, base_run=tuned)
    assert "go together" in wrong(config, base_run=None)
    other = config.model.model_copy(update={"name": str(world / "tiny")})
    assert "is a run of another base than" in wrong(config, model=other)
    loose = shutil.copytree(tuned, tmp_path / "loose")
    metrics = json.loads((loose / "metrics.json").read_text())
    (loose / "metrics.json").write_text(json.dumps(metrics | {"allow_base_mismatch": True}))
    assert "allowed a base mismatch" in wrong(config, tuned_run=loose)


HOSTILE = "<img src=x onerror=alert(1)>|`[a](javascript:b)\n# c"


def test_a_creators_markup_is_text(card: Callable[..., str], evidence: Evidence) -> None:
    photos = [replace(photo, creator=HOSTILE) for photo in evidence.split.photos]
    text = card(replace(evidence, split=replace(evidence.split, photos=photos)))
    body = ModelCard(text).text
    rows = [line for line in body.splitlines() if "![Street-level photo]" in line]
    assert len(rows) == 3
    for row in rows:
        assert "\\<img" in row and "CC BY-SA 4.0" in row
        assert len(row.replace("\\|", "").split("|")) == 6
    assert "<img" not in body.replace("\\<img", "") and "\n# c" not in body
    assert "creator_username" in text and "This is the embedded world" not in text


def test_pictures_that_may_not_be_published_are_not_shown(
    card: Callable[..., str], evidence: Evidence, tmp_path: Path
) -> None:
    card(evidence)
    split = replace(evidence.split, name="eval_pano", publishable=False)
    text = card(replace(evidence, split=split))
    assert not (tmp_path / "examples").exists()
    assert "widget" not in text and "examples/" not in text
    assert "pictures of eval\\_pano may not be published" in text
    assert "| Mean GeoScore |" in text


def test_the_photos_of_a_card_are_the_splits_first_with_a_creator(
    evidence: Evidence, tmp_path: Path, card: Callable[..., str]
) -> None:
    first, *rest = evidence.split.photos
    photos = [replace(first, creator=None), *rest]
    card(replace(evidence, split=replace(evidence.split, photos=photos)))
    for n, photo in enumerate(rest[:3], start=1):
        assert (tmp_path / f"examples/{n}.jpg").read_bytes() == photo.path.read_bytes()


def test_the_settings_of_the_card_train_the_same_run(
    card: Callable[..., str], evidence: Evidence, world: Path, tmp_path: Path
) -> None:
    assert evidence.training is not None
    evidence.training["settings"]["trainer"]["hub_token"] = "hf_secret"
    text = card(evidence)
    assert "hf_secret" not in text
    (settings,) = blocks(text, "yaml")
    (tmp_path / "training.yaml").write_text(settings)
    again = load(GrpoConfig, tmp_path / "training.yaml")
    before = json.loads((world / "to-export/resolved_config.json").read_text())
    before["trainer"]["output_dir"] = "outputs/to-export"
    assert again.trainer == before["trainer"]
    assert again.model.name == "me/base" and str(again.data_dir) == "data"
    ours = again.model_dump(mode="json")
    assert {key: ours[key] for key in ("lora", "reward", "prompt", "split")} == {
        key: before[key] for key in ("lora", "reward", "prompt", "split")
    }


def test_the_commands_of_the_card_make_the_same_run(
    card: Callable[..., str], evidence: Evidence, runs: tuple[Path, Path]
) -> None:
    commands = blocks(card(evidence), "bash")[-1].splitlines()
    evaluations = [shlex.split(line)[2:] for line in commands if "run_eval.py" in line]
    assert len(evaluations) == 2
    for words, run in zip(evaluations, runs, strict=True):
        pairs = list(zip(words[::2], words[1::2], strict=True))
        named = {flag.removeprefix("--"): value for flag, value in pairs if flag != "--set"}
        flags = {"model.name" if key == "model" else key: value for key, value in named.items()}
        overrides = [value for flag, value in pairs if flag == "--set"]
        again = load(EvalConfig, CONFIGS / "eval.yaml", overrides=overrides, flags=flags)
        before = json.loads((run / "resolved_config.json").read_text())
        ours = again.model_dump(mode="json")
        own = ("model", "lora", "data_dir", "output_dir")
        assert {k: v for k, v in ours.items() if k not in own} == {
            k: v for k, v in before.items() if k not in own
        }


def test_a_prepared_photo_is_opened_as_it_is_and_any_other_within_bounds(
    card: Callable[..., str], evidence: Evidence, tmp_path: Path
) -> None:
    scope: dict[str, Any] = {}
    policy = {"long_edge": 1024, "multiple": 32, "min_pixels": 200704, "max_pixels": 802816}
    for photo in evidence.split.photos[:3]:
        exec(blocks(card(evidence), "python")[0], scope)
        expected = Image.open(photo.path).convert("RGB")
        assert scope["open_photo"](photo.path).tobytes() == expected.tobytes()
    text = card(replace(evidence, split=replace(evidence.split, image_policy=policy)))
    exec(blocks(text, "python")[0], scope)
    for size in [
        (640, 480),
        (700, 500),
        (4000, 3000),
        (3000, 4000),
        (1000, 1000),
        (200, 150),
        (2048, 900),
    ]:
        Image.new("RGB", size).save(tmp_path / "any.png")
        width, height = scope["open_photo"](tmp_path / "any.png").size
        (tmp_path / "any.png").unlink()
        assert width % 32 == height % 32 == 0
        assert max(width, height) <= 1024 and width * height <= 802_816
        assert width * height >= 0.75 * 200_704


class Pushed(NamedTuple):
    """What the commands of the README have pushed, and how to be a stranger who loads it."""

    server: UploadServer
    environment: dict[str, str]
    folder: Path

    def card(self, repo: str) -> str:
        return self.server.repos[repo].main["README.md"].decode()

    def run(self, prompt: str, code: str, photo: Path) -> str:
        """Runs a card's snippet beside its `prompt.py`, and returns what it prints."""
        (self.folder / "prompt.py").write_text(prompt)
        (self.folder / "snippet.py").write_text(code)
        shutil.copy(photo, self.folder / "photo.jpg")
        done = subprocess.run(
            [sys.executable, "snippet.py"], capture_output=True, text=True, cwd=self.folder,
            env=self.environment, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.removesuffix("\n")


@pytest.fixture(scope="module")
def pushed(
    world: Path, adapter: Path, runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pushed]:
    """Runs the commands of the README's Push section, with the tiny model in the real one's place.

    Objects and commits meet a 500 and a broken connection on their way.
    """
    folder = tmp_path_factory.mktemp("pushed")
    quick = "outputs/quickstart/seed-0-transformers"
    names = {f"{quick}/base": world / "warm", f"{quick}/grpo": adapter}
    names |= {f"{quick}/data": world / "data", "outputs/grpo-qwen3vl4b": adapter}
    names |= {"outputs/eval/base/eval_osv": runs[0], "outputs/eval/rl/eval_osv": runs[1]}
    names |= {".venv/bin": Path(sys.executable).parent}
    tiny = f"--output_dir {folder}/out --device cpu --set prompt.style=direct"
    real = f"--model {world}/warm --data_dir {world}/data --base_repo_id {BASE}"
    both, upload, alone = (
        line
        for block in blocks(section("Push"), "bash")
        for line in block.replace("\\\n", "").splitlines()
    )
    with UploadServer() as server:
        server.user = "YOU"
        environment = server.environment(folder / "cache", OMP_NUM_THREADS="1")
        for command in (upload, f"{alone} {tiny}", f"{both} {tiny} {real}"):
            if command != upload:
                server.faults |= {"put": [500, "reset"], "commit": ["drop", 500]}
            arguments = shlex.split(command)
            for old, new in names.items():  # after the split: a path may hold spaces
                arguments = [argument.replace(old, str(new)) for argument in arguments]
            done = subprocess.run(
                arguments, capture_output=True, text=True, env=environment, cwd=ROOT
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert not any(server.faults.values())
        yield Pushed(server, environment, folder)


@pytest.fixture(scope="module")
def expected(world: Path, adapter: Path) -> list[str]:
    photos = data.load_split(world / "data", "eval_osv").photos
    found = answers(world / "warm", photos, adapter)
    assert len(set(found)) > 2 and found[0] != answers(world / "warm", photos[:1])[0]
    return found


def test_the_commands_of_the_readme_push_whole_repositories(pushed: Pushed, world: Path) -> None:
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
             "tokenizer_config.json", "processor_config.json", "chat_template.jinja"}  # fmt: skip
    card = {"README.md", *(f"examples/{n}.jpg" for n in (1, 2, 3))}
    lora = {"adapter_config.json", "adapter_model.safetensors"}
    wanted = {BASE: model, ADAPTER: lora | card, BOTH: lora | card, f"{BOTH}-merged": model | card}
    assert pushed.server.repos.keys() == wanted.keys()
    for repo, files in wanted.items():
        history = pushed.server.history(repo)
        assert history == [set(INITIAL), set(INITIAL) | files], repo
        assert pushed.server.repos[repo].private
    for repo in (ADAPTER, BOTH, f"{BOTH}-merged"):
        for name, content in pushed.server.repos[repo].main.items():
            for path in (world, ROOT, Path.home() / "x"):
                assert str(path).encode() not in content, (repo, name)
    settings = json.loads(pushed.server.repos[BOTH].main["adapter_config.json"])
    assert settings["base_model_name_or_path"] == BASE
    assert "Not measured yet." in pushed.card(ADAPTER)
    assert "16 of 16 answers as base + adapter" in pushed.card(f"{BOTH}-merged")


@pytest.mark.parametrize("repo", [ADAPTER, f"{BOTH}-merged"])
def test_a_stranger_who_runs_the_snippet_gets_the_answers_of_base_and_adapter(
    pushed: Pushed, expected: list[str], world: Path, repo: str
) -> None:
    prompt, snippet, _ = blocks(pushed.card(repo), "python")
    photo = data.load_split(world / "data", "eval_osv").photos[1].path
    assert pushed.run(prompt, snippet, photo) == expected[1]


@vllm_cpu
@pytest.mark.slow
def test_the_adapter_is_served_by_the_cards_command(
    pushed: Pushed, expected: list[str], world: Path
) -> None:
    text = pushed.card(ADAPTER)
    prompt, _, ask = blocks(text, "python")
    photos = data.load_split(world / "data", "eval_osv").photos
    environment = {**os.environ, **pushed.environment}
    with serve(blocks(text, "bash")[0], pushed.folder, environment) as address:
        for n in (0, 1, 2):
            code = ask.replace("http://127.0.0.1:8000", address)
            assert pushed.run(prompt, code, photos[n].path) == expected[n]


def test_the_merged_model_is_served_as_the_readme_says(pushed: Pushed) -> None:
    card, readme = (
        shlex.split(blocks(text, "bash")[0].replace("\\\n", "").split("vllm serve ")[1])
        for text in (pushed.card(f"{BOTH}-merged"), section("Serve with vLLM"))
    )
    assert card == [f"{BOTH}-merged", *readme[1:]]
