"""Models by folder and by shape, adapters that do not fit, and the tiny Qwen3-VL."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from geoguessr_rl import prompt
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import models
from geoguessr_rl.backends.tiny import build_tiny
from geoguessr_rl.backends.vllm import reserved_rank
from geoguessr_rl.config import Lora, Model

SAMPLE = prompt.format_completion("Kenya", -0.3, 37.0, clues="Red soil, palms.", style="think")
TEXTS = [m["content"] for s in prompt.PROMPT_STYLES for m in prompt.build_messages(s)] + [SAMPLE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    build_tiny(out, 0, TEXTS)
    return out


def test_the_folder_loads_and_stays_tiny(folder: Path) -> None:
    model = models.load_model(Model(name=str(folder)), "cpu")
    assert type(model) is transformers.Qwen3VLForConditionalGeneration
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) < 2_000_000


def test_weights_in_a_pickle_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pickled")
    weights = tmp_path / "pickled/model.safetensors"
    torch.save(load_file(weights), tmp_path / "pickled/pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UserError, match="pickled could not be loaded"):
        models.load_model(Model(name=str(tmp_path / "pickled")), "cpu")


def test_the_same_seed_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    build_tiny(tmp_path, 0, TEXTS)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


@pytest.mark.parametrize("text", [SAMPLE, "Zürich 東京\n\n 12.5 <think>", "\x00\t <|not|> a,b: {}"])
def test_any_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = models.load_processor(str(folder)).tokenizer
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_country_and_coordinates_are_separate_tokens(folder: Path) -> None:
    tokenizer = models.load_processor(str(folder)).tokenizer
    tokens = [tokenizer.decode([i]) for i in tokenizer(SAMPLE).input_ids]
    assert tokens[-8:-4] == [' "Kenya",', ' "lat":', " -0.", "3,"]


@pytest.mark.parametrize("size", [(32, 32), (128, 96), (160, 96), (1024, 768)])
def test_sides_in_multiples_of_32_are_never_resized(folder: Path, size: tuple[int, int]) -> None:
    processor = models.load_processor(str(folder))
    grid = processor.image_processor(images=[Image.new("RGB", size)])["image_grid_thw"]
    assert list(grid[0]) == [1, size[1] // 16, size[0] // 16]


def test_string_and_block_contents_render_alike(folder: Path) -> None:
    processor = models.load_processor(str(folder))
    blocks = [{"type": "text", "text": "hi", "image": None}]  # as Arrow hands it back
    for content in ("hi", blocks):
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-VL-4B-Instruct", 4_437_815_808),
        ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696),
    ],
)
def test_the_real_models_shapes_need_no_download(name: str, parameters: int) -> None:
    model = models.meta_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.device.type == "meta" for p in model.parameters())
    modules = models.adapted_modules(model, Lora())
    assert len(modules) == 36 * 7


def test_the_plans_adapter_has_the_expected_size() -> None:
    modules = models.adapted_modules(models.meta_model("Qwen/Qwen3-VL-4B-Instruct"), Lora())
    assert models.lora_parameters(modules, Lora().r) == 66_060_288


def test_a_target_in_the_vision_tower_is_refused(folder: Path) -> None:
    model = models.meta_model(str(folder))
    with pytest.raises(UserError, match="frozen vision tower"):
        models.adapted_modules(model, Lora(target_modules=["qkv", "q_proj"], exclude_modules=""))
    # The exclusion keeps it out, and what remains is the language model's.
    kept = models.adapted_modules(model, Lora(target_modules=["qkv", "q_proj"]))
    assert kept and all("language_model" in name for name in kept)


def test_targets_that_match_nothing_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="match no module"):
        models.adapted_modules(models.meta_model(str(folder)), Lora(target_modules=["c_attn"]))


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the tiny model as PEFT saves it."""
    from peft import get_peft_model

    out = tmp_path_factory.mktemp("adapter")
    model = models.load_model(Model(name=str(folder)), "cpu")
    get_peft_model(model, models.lora_config(Lora(r=4, alpha=8))).save_pretrained(out)
    return out


def altered(adapter: Path, to: Path, *, config: dict[str, Any], rename: tuple[str, str]) -> Path:
    """A copy of an adapter with other settings and key names."""
    shutil.copytree(adapter, to)
    settings = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    weights = load_file(to / "adapter_model.safetensors")
    renamed = {key.replace(*rename): value for key, value in weights.items()}
    save_file(renamed, to / "adapter_model.safetensors")
    return to


def test_a_fitting_adapter_is_accepted(adapter: Path, folder: Path) -> None:
    models.check_adapter(adapter, str(folder))


@pytest.mark.parametrize(
    ("config", "rename", "message"),
    [
        ({"base_model_name_or_path": "Qwen/Qwen2-VL-2B"}, ("", ""), "was trained on Qwen/Qwen2"),
        ({"use_dora": True}, ("", ""), "DoRA"),
        ({"peft_type": "IA3"}, ("", ""), "IA3"),
        ({}, ("language_model.layers.0", "language_model.blocks.0"), "does not have"),
        ({"r": 5}, ("", ""), "has shape"),
        ({"r": None}, ("", ""), "no rank or no list"),
        ({"target_modules": "all-linear"}, ("", ""), "no rank or no list"),
        ({"target_modules": ["q_proj", "lm_head"]}, ("", ""), "does not have"),
        ({}, ("language_model.layers.0.self_attn.q_proj", "visual.blocks.0.attn.qkv"), "vision"),
    ],
)
def test_an_unfit_adapter_is_refused_with_its_reason(
    adapter: Path,
    folder: Path,
    tmp_path: Path,
    config: dict[str, Any],
    rename: tuple[str, str],
    message: str,
) -> None:
    bad = altered(adapter, tmp_path / "bad", config=config, rename=rename)
    with pytest.raises(UserError, match=message):
        models.check_adapter(bad, str(folder))


def test_another_base_is_refused_by_size_even_when_its_name_is_waived(
    adapter: Path, folder: Path
) -> None:
    base = "Qwen/Qwen3-VL-4B-Instruct"
    with pytest.raises(UserError, match="was trained on"):
        models.check_adapter(adapter, base)
    with pytest.raises(UserError, match="trained on another model"):
        models.check_adapter(adapter, base, allow_base_mismatch=True)


def test_a_partial_adapter_is_refused(adapter: Path, folder: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(adapter, part)
    weights = load_file(part / "adapter_model.safetensors")
    kept = {key: value for key, value in weights.items() if ".layers.0." in key}
    assert 0 < len(kept) < len(weights)
    save_file(kept, part / "adapter_model.safetensors")
    with pytest.raises(UserError, match="saved in part"):
        models.check_adapter(part, str(folder))
    (part / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="is damaged"):
        models.check_adapter(part, str(folder))


def test_a_damaged_model_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    (cut / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="could not be loaded"):
        models.load_model(Model(name=str(cut)), "cpu")
    (cut / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="could not be loaded"):
        models.load_model(Model(name=str(cut)), "cpu")


def test_flash_attention_is_for_half_precision_on_a_gpu() -> None:
    assert models.attention("cpu", "bfloat16") == "sdpa"
    assert models.attention("cuda", "float32") == "sdpa"


def test_a_missing_or_partial_adapter_is_one_sentence(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        models.check_adapter(tmp_path / "nothing", "x")
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    with pytest.raises(UserError, match="is no whole adapter"):
        models.check_adapter(tmp_path, "x")


@pytest.mark.parametrize("name", ["./nothing", "outputs/no/such/model", "model"])
def test_a_missing_model_folder_is_one_sentence(name: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        models.load_processor(name)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert models.pick_device("auto") in ("cuda", "mps", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no cuda device"):
            models.pick_device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cuda", "bfloat16"), ("cuda:1", "bfloat16"), ("cpu", "float32"), ("mps", "float32")],
)
def test_a_gpu_computes_in_bfloat16_and_others_in_float32(device: str, dtype: str) -> None:
    assert models.pick_dtype("auto", device) == dtype
    assert models.pick_dtype("float32", device) == "float32"


def test_a_resized_photo_is_refused() -> None:
    models.check_image_tokens([15, 12], [(160, 96), (128, 96)])
    with pytest.raises(UserError, match="became 14 visual tokens instead of 15"):
        models.check_image_tokens([14], [(160, 96)])


@pytest.mark.parametrize(("rank", "reserved"), [(4, 8), (8, 8), (33, 64), (512, 512)])
def test_vllm_reserves_the_smallest_rank_that_fits(
    tmp_path: Path, rank: int, reserved: int
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    assert reserved_rank(tmp_path) == reserved
    (tmp_path / "adapter_config.json").write_text('{"r": 513}')
    with pytest.raises(UserError, match="serves 512 at most"):
        reserved_rank(tmp_path)


def test_an_adapter_takes_another_s_place_and_one_of_another_shape_is_refused(
    adapter: Path, folder: Path, tmp_path: Path
) -> None:
    base = models.load_model(Model(name=str(folder), dtype="float32"), "cpu")
    model = models.load_adapter(base, adapter)
    shifted, wider = tmp_path / "shifted", tmp_path / "wider"
    weights = load_file(adapter / "adapter_model.safetensors")
    for path, change in (
        (shifted, lambda value: value + 1),
        (wider, lambda value: torch.cat([value, value])),
    ):
        shutil.copytree(adapter, path)
        changed = {key: change(value) for key, value in weights.items()}
        save_file(changed, path / "adapter_model.safetensors")
    models.replace_adapter(model, shifted)
    now = {key: value for key, value in model.state_dict().items() if "lora_A" in key}
    for key, value in weights.items():
        if "lora_A" in key:
            assert torch.equal(
                now[key.replace("lora_A.weight", "lora_A.default.weight")], value + 1
            )
    with pytest.raises(UserError, match="has another shape than the adapter before it"):
        models.replace_adapter(model, wider)


def test_an_adapters_settings_are_written_in_one_order(tmp_path: Path) -> None:
    written = set()
    for seed in ("1", "2"):
        code = (
            "from geoguessr_rl.backends import models; from geoguessr_rl.config import Lora; "
            f"models.lora_config(Lora()).save_pretrained({str(tmp_path)!r})"
        )
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        written.add((tmp_path / "adapter_config.json").read_text())
    assert len(written) == 1
