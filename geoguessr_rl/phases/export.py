"""Export: base + adapter -> one model folder that loads alone, checked against the two.

The adapter is merged in float32 onto copies, so that neither rounding nor the base is touched
before the result is known. The folder gets its name only after it has answered like base + adapter.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends.predictions import check_trained_alike, find_adapter
from geoguessr_rl.config import ExportConfig, Generation
from geoguessr_rl.hub import require_space
from geoguessr_rl.parsing import parse_answer
from geoguessr_rl.records import Photo, Sampling
from geoguessr_rl.reward import haversine_km

RECORD = "export.json"
SHARD = "5GB"
MAX_GAP = 0.05
"""Nats a token that a merge may move the log-probabilities of answers in bfloat16, where the sum of
base and adapter is rounded once more; in float32 the answers are equal, too."""
MAX_GAP_FLOAT32 = 1e-3


def run(config: ExportConfig) -> dict[str, Any]:
    """Merges, checks and writes a model folder; returns what was measured.

    Raises:
        UserError: The adapter does not belong on the base, the disk is full, the folder holds
            another model, or the merged model answers otherwise.
    """
    from geoguessr_rl.backends import models

    lora, out = find_adapter(config.lora), config.output_dir
    models.check_adapter(lora, config.model.name)
    split = data.load_split(config.data_dir, config.split, limit=config.photos)
    check_trained_alike(lora, config.prompt.style, split.image_policy, config.model.name)
    device = models.pick_device(config.device)
    dtype = models.pick_dtype(config.model.dtype, device)
    with artifacts.run_lock(out):
        identity = {
            "model": config.model.name,
            "model_files": artifacts.folder_fingerprint(config.model.name),
            "adapter": artifacts.folder_fingerprint(str(lora)),
            "dtype": dtype,
            "prompt_style": config.prompt.style,
        }
        finished = (out / RECORD).is_file()  # written last
        artifacts.claim(out / artifacts.IDENTITY, identity, holds_work=finished)
        if finished:
            return artifacts.read_json(out / RECORD, remedy="delete the folder and run again")
        parameters = sum(p.numel() for p in models.meta_model(config.model.name).parameters())
        size = parameters * (4 if dtype == "float32" else 2)
        require_space(out, size + size // 10, "the merged model")
        measured = merge(config, lora, split.photos, out, exact=dtype == "float32")
        artifacts.write_json(out / RECORD, measured)
    return measured


def merge(
    config: ExportConfig, lora: Path, photos: Sequence[Photo], out: Path, *, exact: bool
) -> dict[str, Any]:
    """Writes the merged model, compares it with base + adapter, and puts it into its place.

    Args:
        config: The resolved config.
        lora: The adapter's folder.
        photos: What both answer.
        out: Where the folder's files go.
        exact: Whether the answers have to be equal, as in float32.

    Raises:
        UserError: They are not.
    """
    from geoguessr_rl.backends import models, stack
    from geoguessr_rl.backends.transformers import TransformersBackend

    generation = Generation(backend="transformers", device=config.device, batch_size=1)
    sampling = Sampling(max_tokens=generation.max_tokens)
    both = TransformersBackend(generation, config.model, config.prompt.style, lora)
    before = [answers[0].text for answers in both.generate(photos, sampling)]
    scores = both.logprobs(photos, before)
    weights = {name: weight.cpu() for name, weight in stack.merged_weights(both._model)}
    device = both._device
    del both

    staged = out / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    model = models.load_model(config.model, "cpu")
    missing, unexpected = model.load_state_dict(
        {name: weight.to(model.dtype) for name, weight in weights.items()}, strict=False
    )
    if unexpected or set(missing) - set(model.state_dict()) - set(model._tied_weights_keys or ()):
        raise AssertionError(f"merged weights do not fit the base: {missing}, {unexpected}")
    _make_greedy_savable(model.generation_config)
    model.save_pretrained(staged, max_shard_size=SHARD)
    models.load_processor(config.model.name).save_pretrained(staged)
    del model, weights

    alone = config.model.model_copy(update={"name": str(staged)})
    merged = TransformersBackend(
        generation.model_copy(update={"device": device}), alone, config.prompt.style, None
    )
    after = [answers[0].text for answers in merged.generate(photos, sampling)]
    measured = compare(before, after, scores, merged.logprobs(photos, before))
    limit = MAX_GAP_FLOAT32 if exact else MAX_GAP
    if (exact and measured["equal"] < len(photos)) or not measured["gap"] <= limit:
        allowed = "all equal" if exact else f"at most {limit}"
        raise UserError(
            f"the merged model gives {measured['equal']} of {len(photos)} answers as base + "
            f"adapter do, {measured['gap']:.4f} nats a token apart ({allowed} is rounding); check "
            "the adapter, or set model.dtype to float32"
        )
    # The config comes last: without it nobody takes the folder for a model.
    for file in sorted(staged.iterdir(), key=lambda path: path.name == "config.json"):
        file.replace(out / file.name)
    shutil.rmtree(staged)
    return measured


def _make_greedy_savable(generation_config: Any) -> None:
    """Drops sampling settings beside a greedy default, which `save_pretrained` refuses."""
    if not generation_config.do_sample:
        for name in ("temperature", "top_p", "top_k"):
            setattr(generation_config, name, None)


def compare(
    before: Sequence[str],
    after: Sequence[str],
    scores: Sequence[Sequence[float]],
    others: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """Compares the answers of base + adapter with those of the merged model.

    Args:
        before: Greedy answers of base + adapter.
        after: Those of the merged model.
        scores: Log-probabilities that base + adapter gives each token of its answers.
        others: Those that the merged model gives the same tokens.

    Returns:
        `photos`, `equal` answers, the mean `gap` in nats a token, and the largest distance between
        two answers in km, None where no pair of answers parses.
    """
    pairs = [(parse_answer(one), parse_answer(two)) for one, two in zip(before, after, strict=True)]
    apart = [haversine_km(a.lat, a.lon, b.lat, b.lon) for a, b in pairs if a and b]
    gaps = [
        abs(one - two)
        for row, other in zip(scores, others, strict=True)
        for one, two in zip(row, other, strict=True)
    ]
    return {
        "photos": len(before),
        "equal": sum(one == two for one, two in zip(before, after, strict=True)),
        "gap": fmean(gaps) if gaps else 0.0,
        "max_km_apart": max(apart) if apart else None,
    }


def summary_line(config: ExportConfig, measured: dict[str, Any]) -> str:
    """Returns the one line that a merge prints at its end."""
    far = measured["max_km_apart"]
    distance = "no answer parses" if far is None else f"at most {far:.1f} km apart"
    return (
        f"merged into {config.output_dir}: {measured['equal']} of {measured['photos']} answers "
        f"equal to base + adapter, {measured['gap']:.5f} nats a token, {distance}"
    )
