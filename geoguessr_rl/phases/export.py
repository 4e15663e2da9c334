"""Export: base + adapter -> one model folder that loads alone, checked against the two.

The adapter is merged in float32 onto copies, so that neither rounding nor the base is touched
before the result is known. The folder gets its name only after it has answered like base + adapter.
What is pushed to the Hub lies in a folder of its own kind before it leaves, card and all; whether
it may be pushed is settled before the merge begins.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from geoguessr_rl import artifacts, data, model_card, space, upload
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import open_backend, probe_adapter
from geoguessr_rl.backends.predictions import (
    check_trained_alike,
    find_adapter,
    training_record,
)
from geoguessr_rl.config import DemoConfig, ExportConfig, Generation
from geoguessr_rl.hub import require_space
from geoguessr_rl.model_card import Kind
from geoguessr_rl.parsing import parse_answer
from geoguessr_rl.records import Photo, Sampling
from geoguessr_rl.reward import haversine_km

RECORD = "export.json"
ADAPTER = "adapter"  # beside the merged model: what is pushed of the adapter
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
TITLES: dict[str, str] = {"adapter": "the adapter", "merged": "the merged model"}
SHARD = "5GB"
MAX_GAP = 0.05
"""Nats a token that a merge may move the log-probabilities of answers in bfloat16, where the sum of
base and adapter is rounded once more; in float32 the answers are equal, too."""
MAX_GAP_FLOAT32 = 1e-3


def run(config: ExportConfig) -> dict[str, Any]:
    """Merges, checks and writes a model folder, and pushes what the config says.

    Returns:
        What was measured: see `compare`, or for the adapter alone the `change` that it makes. With
        a push, `pushed` holds the address of each kind.

    Raises:
        UserError: The adapter does not belong on the base, the disk is full, the folder holds
            another model, the merged model answers otherwise, or the push is refused.
    """
    from geoguessr_rl.backends import models

    targets = repositories(config)
    lora, out = find_adapter(config.lora), config.output_dir
    rank = models.check_adapter(lora, config.model.name)
    split = data.load_split(config.data_dir, config.split, limit=config.photos)
    check_trained_alike(lora, config.prompt.style, split.image_policy, config.model.name)
    if not targets:
        with artifacts.run_lock(out):
            return merged(config, lora, split.photos)
    evidence = model_card.gather(config, lora)
    base, licence = find_base(config)
    for repo in targets.values():
        upload.check_access(repo, private=config.private)
    with artifacts.run_lock(out):
        measured = (
            {"change": probe(config, lora, split.photos[0])}
            if config.push == "adapter"
            else merged(config, lora, split.photos)
        )
        pushed = {}
        for kind, repo in targets.items():
            folder = stage_adapter(out / ADAPTER, lora, base) if kind == "adapter" else out
            card = model_card.write(
                folder,
                kind,
                repo,
                evidence,
                config,
                base=base,
                licence=licence,
                adapter=targets.get("adapter"),
                rank=rank,
                measured=measured,
                template_kwargs=models.template_kwargs(models.load_processor(config.model.name)),
            )
            files = [*model_files(folder, kind), *card]
            pushed[kind] = upload.push(
                repo,
                {path.relative_to(folder).as_posix(): path for path in files},
                f"Push {TITLES[kind]}",
            )
    return measured | {"pushed": pushed}


def write_space(config: ExportConfig, out: Path) -> str:
    """Writes the demo of base and adapter as a Gradio Space, and says what stands there.

    Raises:
        UserError: The adapter does not belong on the base, or see `space.write`.
    """
    from geoguessr_rl.backends import models

    lora = find_adapter(config.lora)
    models.check_adapter(lora, config.model.name)
    demo = DemoConfig(
        model=config.model,
        lora=lora,
        prompt=config.prompt,
        data_dir=config.data_dir,
        split=config.split,
        report=config.report,
    )
    photos = space.write(out, demo, training_record(lora))
    return (
        f"wrote a Space with {photos} photos into {out}; try `python {out / 'app.py'}`, and "
        f"publish it with `hf upload OWNER/NAME {out} --repo-type space`"
    )


def repositories(config: ExportConfig) -> dict[Kind, str]:
    """Returns where each kind is pushed to: of both, the merged model has a name of its own.

    One repository cannot hold the two, since each needs the README.md.

    Raises:
        UserError: There is a push without a name.
    """
    if config.push is None:
        return {}
    if config.repo_id is None:
        raise UserError("--push needs the name of a repository; add --repo_id owner/name")
    if config.push == "both":
        return {"adapter": config.repo_id, "merged": f"{config.repo_id}-merged"}
    return {config.push: config.repo_id}


def find_base(config: ExportConfig) -> tuple[str | None, str | None]:
    """Returns the base's name on the Hub and its licence, each None where unknown.

    Raises:
        UserError: An adapter's base lies in a folder and has no name on the Hub, so that nobody
            else could load the adapter, or the Hub holds another model under that name.
    """
    name, folder = config.model.name, Path(config.model.name)
    if not folder.is_dir():
        if config.base_repo_id not in (None, name):
            raise UserError(
                f"base_repo_id is for a base in a folder, and yours is {name}; unset it"
            )
        return name, upload.check_base(name, None)
    if config.base_repo_id is not None:
        return config.base_repo_id, upload.check_base(config.base_repo_id, folder)
    if config.push == "merged":
        return None, None
    raise UserError(
        f"nobody else can load an adapter whose base lies in {name}; push that folder too, with "
        f"`hf upload owner/base {name}` (see Push in README.md), and name it with --base_repo_id"
    )


def merged(config: ExportConfig, lora: Path, photos: Sequence[Photo]) -> dict[str, Any]:
    """Returns what the merge measured, after merging where that was not done before."""
    from geoguessr_rl.backends import models

    out = config.output_dir
    dtype = models.pick_dtype(config.model.dtype, models.pick_device(config.device))
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
        return dict(artifacts.read_json(out / RECORD, remedy="delete the folder and run again"))
    parameters = sum(p.numel() for p in models.meta_model(config.model.name).parameters())
    size = parameters * (4 if dtype == "float32" else 2)
    require_space(out, size + size // 10, "the merged model")
    measured = merge(config, lora, photos, out, exact=dtype == "float32")
    artifacts.write_json(out / RECORD, measured)
    return measured


def probe(config: ExportConfig, lora: Path, photo: Photo) -> float:
    """Returns how far the adapter moves a fixed answer; raises UserError where it does not."""
    generation = Generation(backend="transformers", device=config.device, batch_size=1)
    backend = open_backend(generation, config.model, config.prompt.style, lora=lora)
    return probe_adapter(backend, photo)


def stage_adapter(folder: Path, lora: Path, base: str | None) -> Path:
    """Copies an adapter to where it is pushed from, with its base by the name that others know."""
    weights = lora / ADAPTER_FILES[1]
    require_space(folder, weights.stat().st_size, "the adapter's copy")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = artifacts.read_json(lora / ADAPTER_FILES[0], remedy="name a whole adapter")
    artifacts.write_json(folder / ADAPTER_FILES[0], settings | {"base_model_name_or_path": base})
    shutil.copyfile(weights, folder / weights.name)
    return folder


def model_files(folder: Path, kind: Kind) -> list[Path]:
    """Returns what of a folder is the model, and so may be pushed."""
    if kind == "adapter":
        return [folder / name for name in ADAPTER_FILES]
    ours = (artifacts.IDENTITY, RECORD)
    kinds = (".safetensors", ".json", ".jinja", ".txt")
    return [
        path for path in sorted(folder.iterdir()) if path.suffix in kinds and path.name not in ours
    ]


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


def summary_line(config: ExportConfig, measured: Mapping[str, Any]) -> str:
    """Returns what an export prints at its end: a line for the merge, and one a push."""
    lines = [f"pushed {TITLES[kind]} to {url}" for kind, url in measured.get("pushed", {}).items()]
    if "change" in measured:
        return "\n".join(lines)
    far = measured["max_km_apart"]
    distance = "no answer parses" if far is None else f"at most {far:.1f} km apart"
    merge = (
        f"merged into {config.output_dir}: {measured['equal']} of {measured['photos']} answers "
        f"equal to base + adapter, {measured['gap']:.5f} nats a token, {distance}"
    )
    return "\n".join([merge, *lines])
