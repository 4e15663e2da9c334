"""Models by name or by folder: device, number format, LoRA, and what a model's shape says.

Heavy libraries are imported inside the functions.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from geoguessr_rl import prompt
from geoguessr_rl.artifacts import UserError, read_json
from geoguessr_rl.config import Lora, Model
from geoguessr_rl.images import visual_tokens


def pick_device(device: str) -> str:
    """Resolves `auto` to cuda, mps or cpu; raises UserError when the named device is missing."""
    import torch

    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device == "auto":
        return next(name for name, available in there.items() if available)
    if not there[device]:
        raise UserError(f"this machine has no {device} device; pass --device auto or cpu")
    return device


def pick_dtype(dtype: str, device: str) -> str:
    """Resolves `auto`: bfloat16 on a GPU, float32 elsewhere, where greedy answers stay stable."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def attention(device: str, dtype: str) -> str:
    """Returns flash_attention_2 where it imports and can compute this, else sdpa."""
    if not device.startswith("cuda") or dtype == "float32":
        return "sdpa"
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "sdpa"
    return "flash_attention_2"


def require_model(name: str) -> None:
    """Raises UserError when a name that can only be a folder does not exist."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"the model folder {name} holds no config.json; name a whole model")
    elif path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise UserError(f"the model folder {name} does not exist; check model.name or --model")


def _from_hub(load: Callable[..., Any], name: str, **kwargs: Any) -> Any:
    """Calls a `from_pretrained`, and turns a missing model into a UserError."""
    from safetensors import SafetensorError

    require_model(name)
    try:
        return load(name, **kwargs)
    # A model type that is no vision-language model, or a file that was cut, raise the last two.
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the model {name} could not be loaded ({reason}); check the name, the network and "
            "HF_TOKEN, or give a local folder"
        ) from None


def load_processor(name: str) -> Any:
    """Loads a model's processor, padding on the left as generation needs."""
    from transformers import AutoProcessor

    return _from_hub(AutoProcessor.from_pretrained, name, padding_side="left")


def template_kwargs(processor: Any) -> dict[str, Any]:
    """Returns what every rendering of the prompt passes to the model's chat template.

    A template that does not know a name must not get it: transformers hands it to the processor.
    """
    template = str(processor.chat_template)
    return {name: value for name, value in prompt.TEMPLATE_KWARGS.items() if name in template}


def load_model(model: Model, device: str) -> Any:
    """Loads a vision-language model for generation or training."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading and saving; the phases have their own
    loaded = _from_hub(
        AutoModelForImageTextToText.from_pretrained,
        model.name,
        use_safetensors=True,  # no pickle of a stranger's
        dtype=pick_dtype(model.dtype, device),
        attn_implementation=attention(device, pick_dtype(model.dtype, device)),
    )
    return loaded.to(device)


def load_adapter(model: Any, lora: Path) -> Any:
    """Puts a checked adapter on a loaded base; see `check_adapter`."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(lora))


def replace_adapter(model: Any, lora: Path) -> None:
    """Puts another adapter's weights in the place of the one that is loaded.

    Raises:
        UserError: It has another shape, as adapters of one training run never have.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(str(lora), device="cpu")
    try:
        outcome = set_peft_model_state_dict(model, weights)
    except RuntimeError as error:  # torch's word for other sizes
        raise UserError(f"{lora} has another shape than the adapter before it: {error}") from None
    if outcome.unexpected_keys:
        raise UserError(f"{lora} adapts other modules than the adapter before it")


def end_token_ids(model: Any, processor: Any) -> list[int]:
    """Returns every token that ends a completion: the model's own, and the tokenizer's."""
    ids = model.generation_config.eos_token_id
    ids = [ids] if isinstance(ids, int) else list(ids or [])
    return sorted({*ids, processor.tokenizer.eos_token_id})


def image_token_id(processor: Any) -> int:
    """Returns the id of `<|image_pad|>`, one of which stands for each visual token."""
    return int(processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"))


def check_image_tokens(counts: Sequence[int], sizes: Sequence[tuple[int, int]]) -> None:
    """Raises UserError when a photo costs another number of tokens than its stored size says.

    Then some processor resized it, and the model would see other pixels here than in training.
    """
    for count, size in zip(counts, sizes, strict=True):
        if count != visual_tokens(size):
            raise UserError(
                f"a photo of {size[0]} × {size[1]} pixels became {count} visual tokens instead of "
                f"{visual_tokens(size)}: the model's processor resizes what the image policy "
                "stored; prepare the data again with sizes that the model accepts"
            )


def meta_model(name: str) -> Any:
    """Builds a model's modules on the meta device: shapes without weights, in about a second.

    The shapes of the models that the configs name are kept in the project, so that nothing has to
    be downloaded to list modules and count parameters.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLConfig

    shapes = json.loads((Path(__file__).parent / "qwen3_vl.json").read_text(encoding="utf-8"))
    if name in shapes:
        config = Qwen3VLConfig(**shapes[name])
    else:
        config = _from_hub(AutoConfig.from_pretrained, name)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def adapted_modules(model: Any, lora: Lora) -> dict[str, tuple[int, int]]:
    """Returns the modules that a LoRA config adapts, with their (in, out) features.

    Raises:
        UserError: None is adapted, or one of them lies in the vision tower, which stays frozen.
    """
    import torch

    modules = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and name.rpartition(".")[2] in lora.target_modules
        and not (lora.exclude_modules and re.fullmatch(lora.exclude_modules, name))
    }
    if not modules:
        raise UserError(f"lora.target_modules {lora.target_modules} match no module of the model")
    refuse_visual(modules)
    return modules


def refuse_visual(names: Iterable[str]) -> None:
    """Raises UserError when an adapted module lies in the vision tower."""
    visual = [name for name in names if ".visual." in f".{name}"]
    if visual:
        raise UserError(
            f"the adapter reaches into the frozen vision tower: {visual[0]} and {len(visual) - 1} "
            "more; mend lora.exclude_modules"
        )


def lora_parameters(modules: dict[str, tuple[int, int]], rank: int) -> int:
    """Returns how many parameters a LoRA of this rank trains on these modules."""
    return sum(rank * (fan_in + fan_out) for fan_in, fan_out in modules.values())


def lora_config(lora: Lora) -> Any:
    """Returns PEFT's config of the adapter."""
    from peft import LoraConfig

    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias="none",
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules or None,
        task_type="CAUSAL_LM",
    )
    # PEFT keeps lists as sets, and writes those in an order that changes from process to process.
    for name in ("target_modules", "exclude_modules"):
        if isinstance(value := getattr(config, name), set):
            setattr(config, name, sorted(value))
    return config


def _same_model(left: str, right: str) -> bool:
    """Whether two names are one model: equal, or the same folder."""
    folders = Path(left), Path(right)
    both = folders[0].is_dir() and folders[1].is_dir()
    return left == right or (both and folders[0].resolve() == folders[1].resolve())


def check_adapter(lora: Path, base: str, *, allow_base_mismatch: bool = False) -> int:
    """Refuses an adapter that does not belong on a base, before either is loaded.

    Args:
        lora: The adapter's folder.
        base: The base model's name or folder.
        allow_base_mismatch: Accept another base name; the shapes must agree all the same.

    Returns:
        The adapter's rank.

    Raises:
        UserError: It is not a whole LoRA adapter, was trained on another base, uses DoRA, reaches
            into the vision tower, or has other keys or sizes than its targets on this base.
    """
    from safetensors import SafetensorError, safe_open

    weights = lora / "adapter_model.safetensors"
    settings = read_json(lora / "adapter_config.json", remedy="name a folder that holds an adapter")
    if not isinstance(settings, dict) or not weights.is_file():
        raise UserError(f"{lora} is no whole adapter; name a folder that holds one")
    if settings.get("peft_type") != "LORA" or settings.get("use_dora"):
        kind = "DoRA" if settings.get("use_dora") else settings.get("peft_type")
        raise UserError(f"{lora} is a {kind} adapter, which vLLM cannot serve; train a plain LoRA")
    named = isinstance(settings.get("r"), int) and isinstance(settings.get("target_modules"), list)
    if not named:
        raise UserError(
            f"{lora}/adapter_config.json gives no rank or no list of target modules; save the "
            "adapter again with PEFT"
        )
    trained_on = str(settings.get("base_model_name_or_path"))
    if not allow_base_mismatch and not _same_model(trained_on, base):
        raise UserError(
            f"{lora} was trained on {trained_on}, and the base here is {base}; pass that base with "
            "--model, or --allow_base_mismatch when they are the same weights"
        )
    try:
        with safe_open(str(weights), framework="pt") as file:
            found = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{weights} is damaged ({error}); train or download it again") from None
    refuse_visual(key.removeprefix("base_model.model.") for key in found)
    rank = int(settings["r"])
    targets = Lora(
        target_modules=list(settings["target_modules"]),
        exclude_modules=settings.get("exclude_modules") or "",
    )
    expected = {}
    for name, (fan_in, fan_out) in adapted_modules(meta_model(base), targets).items():
        expected[f"base_model.model.{name}.lora_A.weight"] = [rank, fan_in]
        expected[f"base_model.model.{name}.lora_B.weight"] = [fan_out, rank]
    for key in sorted(found.keys() - expected.keys()):
        raise UserError(f"{lora} adapts {key}, which the base {base} does not have")
    for key in sorted(expected.keys() - found.keys()):
        raise UserError(f"{lora} lacks {key}; it was saved in part, or trained on another model")
    for key, shape in expected.items():
        if found[key] != shape:
            raise UserError(
                f"{lora} has shape {found[key]} at {key}, and the base {base} takes {shape}: it "
                "was trained on another model"
            )
    return rank
