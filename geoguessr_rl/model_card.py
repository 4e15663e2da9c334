"""Run artefacts -> the model card of an adapter or a merged model, and its example photos.

Everything on the card is read from what the phases wrote; what is missing is said to be missing.
The card holds no dates and no paths, so that the same run gives the same card wherever it lies.
This module decides what is said, the template beside it how it reads. It is long because a card has
many parts, each of which may be missing.
"""

import json
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from geoguessr_rl import artifacts, data, embedded
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.comparison import Comparison, paired_comparison
from geoguessr_rl.config import EvalConfig, ExportConfig
from geoguessr_rl.prompt import MAX_COMPLETION_TOKENS, build_messages
from geoguessr_rl.records import Photo
from geoguessr_rl.runs import Run, load_runs
from geoguessr_rl.tables import TABLE, country_name, inert, number, printable, templates
from geoguessr_rl.upload import TAG

Kind = Literal["adapter", "merged"]

CARD = "README.md"
EXAMPLES = 3  # photos
INDEXED = {  # in the model-index: each metric with its type there
    "mean_geoscore": "geoscore",
    "country_acc": "accuracy",
    "median_km": "median_distance_km",
    **{f"acc_at_km.{km}": f"accuracy_at_{km}_km" for km in (1, 25, 200, 750, 2500)},
    "format_rate": "format_rate",
}


@dataclass(frozen=True)
class Evidence:
    """What the runs say, read and checked before anything expensive happens.

    Attributes:
        split: The photos of the evaluation, or those that the export answers.
        dataset: Where that split comes from, as its manifest says.
        runs: The runs before and after; none where nothing was measured.
        found: Their comparison, by metric.
        training: What the training run's folder says; None without one.
    """

    split: data.Split
    dataset: dict[str, Any]
    runs: tuple[Run, Run] | None
    found: dict[str, Comparison]
    training: dict[str, Any] | None

    @property
    def drawn(self) -> bool:
        """Whether this is the embedded world."""
        return {photo.creator for photo in self.split.photos} == {embedded.CREATOR}


def gather(config: ExportConfig, lora: Path) -> Evidence:
    """Reads what the card will say.

    Args:
        config: The resolved config.
        lora: The adapter's folder.

    Raises:
        UserError: A run is missing, unfit, or not one of this adapter and its base.
    """
    runs, found = None, {}
    if (config.base_run is None) != (config.tuned_run is None):
        raise UserError("base_run and tuned_run go together; give both or neither")
    if config.base_run is not None and config.tuned_run is not None:
        (base, tuned), split = load_runs([config.base_run, config.tuned_run])
        _require_own(config, lora, base, tuned)
        runs, folder = (base, tuned), tuned.data_dir
        pairs = paired_comparison(
            base.rows, tuned.rows, country_weights=split.country_share, hits=(base.hits, tuned.hits)
        )
        found = {pair.metric: pair for pair in pairs}
    else:
        split, folder = data.load_split(config.data_dir, config.split), config.data_dir
    dataset = data.read_manifest(data.manifest_path(folder, split.name))["dataset"]
    return Evidence(split, dataset, runs, found, read_training(lora, config.data_dir))


def _require_own(config: ExportConfig, lora: Path, base: Run, tuned: Run) -> None:
    """Raises UserError where a run is not of this base, or of this base with this adapter."""
    weights = artifacts.folder_fingerprint(str(lora))
    for run, wanted in ((base, None), (tuned, weights)):
        if (found := run.identity["adapter"]) != wanted:
            whose = f"the adapter in {lora}" if wanted else "the base alone"
            raise UserError(
                f"{run.folder} is not a run of {whose}: its adapter is {found} and should be "
                f"{wanted}; evaluate it, or name another run"
            )
        files = artifacts.folder_fingerprint(config.model.name)
        same = files or config.model.name
        if (run.identity.get("model_files") or run.identity["model"]) != same:
            raise UserError(
                f"{run.folder} is a run of another base than {config.model.name}; evaluate that "
                "base, or name its run"
            )
        if run.stored["allow_base_mismatch"]:
            raise UserError(f"{run.folder} allowed a base mismatch; evaluate again without that")


def read_training(lora: Path, data_dir: Path) -> dict[str, Any] | None:
    """Returns what the folder of an adapter's training run says of it; None without one.

    Args:
        lora: The adapter's folder.
        data_dir: Where the manifest of the train split is looked for.
    """
    remedy = "train the adapter again"
    for folder in (lora, lora.parent):
        if not (folder / artifacts.IDENTITY).is_file():
            continue
        identity = artifacts.read_json(folder / artifacts.IDENTITY, remedy=remedy)
        if "lora" in identity:
            break
    else:
        return None
    settings = artifacts.read_json(folder / artifacts.RESOLVED_CONFIG, remedy=remedy)
    record = folder / artifacts.TRAINING_LOG
    whole = (
        artifacts.read_json(record, remedy=remedy)
        if record.is_file()
        else artifacts.read_training_log(folder)
    )
    is_checkpoint = re.fullmatch(r"checkpoint-\d+", lora.name)
    last = artifacts.checkpoint_step(lora) if is_checkpoint else math.inf
    log = [entry for entry in whole if "hours" in entry and entry["step"] <= last]
    manifest = data.manifest_path(data_dir, identity["split"])
    there = data.read_manifest(manifest) if manifest.is_file() else {}
    same = there.get("fingerprint") == identity["split_fingerprint"]
    return {
        "name": folder.resolve().name,
        "identity": identity,
        "settings": settings,
        "versions": artifacts.read_json(folder / artifacts.VERSIONS, remedy=remedy),
        "cost": log[-1] if log else None,
        "dataset": there["dataset"] if same else None,
    }


def write(
    folder: Path,
    kind: Kind,
    repo: str,
    evidence: Evidence,
    config: ExportConfig,
    *,
    base: str | None,
    licence: str | None,
    adapter: str | None,
    rank: int,
    measured: Mapping[str, Any],
    template_kwargs: Mapping[str, Any],
) -> list[Path]:
    """Writes the card and its example photos into a folder, and returns their paths.

    Args:
        folder: What is to be pushed.
        kind: Whether it holds the adapter or the merged model.
        repo: Where it will be, `owner/name`.
        evidence: What the runs say.
        config: The resolved config.
        base: The base's name on the Hub, where it has one.
        licence: The base's licence, where the Hub names it.
        adapter: The adapter's name on the Hub, where it has one.
        rank: The adapter's.
        measured: What the check of the merge found; empty without a merge.
        template_kwargs: What every rendering of the prompt passes to the chat template.
    """
    shutil.rmtree(folder / "examples", ignore_errors=True)
    shown = examples(evidence)
    for example in shown:
        (folder / example["src"]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(example["photo"].path, folder / example["src"])
    system, user = (message["content"] for message in build_messages(config.prompt.style))
    context = {
        "kind": kind,
        "repo": repo,
        "name": repo.rpartition("/")[2],
        "note": embedded.NOTE if evidence.drawn else "",
        "base": base,
        "licence": licence,
        "adapter": adapter or "ADAPTER",
        "rank": max(8, 1 << (rank - 1).bit_length()),  # vLLM reserves room for powers of two
        "measured": measured,
        "template_kwargs": "".join(f", {key}={value!r}" for key, value in template_kwargs.items()),
        "prompt": {"SYSTEM": system, "USER": user},
        "max_tokens": MAX_COMPLETION_TOKENS,
        "image": evidence.split.image_policy,
        "style": config.prompt.style,
        "split": evidence.split,
        "origin": origin(evidence.dataset),
        "drawn": evidence.drawn,
        "head": evidence.found.get("mean_geoscore"),
        "table": table(evidence.found),
        "training": evidence.training,
        "train_origin": origin(evidence.training and evidence.training["dataset"]),
        "settings": settings(evidence.training, base),
        "examples": shown,
        "commands": commands(evidence, base),
        "versions": versions(evidence),
        "version": version("geoguessr-rl"),
    }
    environment = templates()
    environment.filters |= {"number": number, "inert": inert, "json": json.dumps}
    body = environment.get_template("model_card.md.jinja").render(context)
    meta = front_matter(kind, repo, evidence, base, licence, shown)
    text = f"---\n{meta.to_yaml()}\n---\n\n{body}\n"
    check(text, meta)
    artifacts.write_text(folder / CARD, text)
    return [folder / CARD, *(folder / example["src"] for example in shown)]


def front_matter(
    kind: Kind,
    repo: str,
    evidence: Evidence,
    base: str | None,
    licence: str | None,
    shown: Sequence[Mapping[str, Any]],
) -> Any:
    """Returns the card's metadata as the Hub's client models it."""
    from huggingface_hub import ModelCardData

    merged = kind == "merged"
    results = eval_results(evidence)
    origins = (evidence.training["dataset"] if evidence.training else None, evidence.dataset)
    datasets = {one["repo"] for one in origins if one and one.get("repo")}
    extra: dict[str, Any] = {}
    if base:
        extra["base_model_relation"] = "finetune" if merged else "adapter"
    if shown:
        extra["widget"] = [
            {key: example[key] for key in ("src", "example_title", "text")} for example in shown
        ]
    return ModelCardData(
        license=licence if merged else "apache-2.0",
        library_name="transformers" if merged else "peft",
        pipeline_tag="image-text-to-text",
        base_model=base,
        datasets=sorted(datasets) or None,
        tags=[TAG, "geolocation", "geoguessr", "grpo", "trl", *([] if merged else ["lora"])],
        model_name=repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
        **extra,
    )


def eval_results(evidence: Evidence) -> list[Any]:
    """Returns the figures of the run with the adapter, for the model-index."""
    from huggingface_hub import EvalResult

    if evidence.runs is None:
        return []
    tuned, split = evidence.runs[1], evidence.split
    labels = {key: label for *_, names in TABLE for key, label in names.items()}
    where = evidence.dataset.get("repo")
    name = "embedded world" if evidence.drawn else where or "OSV-5M, a local copy"
    return [
        EvalResult(
            task_type="image-text-to-text",
            task_name="Geolocation from one street-level photo",
            dataset_type=where or name.replace(" ", "-").replace(",", "").lower(),
            dataset_name=f"{name}: {split.name}",
            dataset_split=split.name,
            dataset_revision=evidence.dataset.get("revision"),
            dataset_args={
                "fingerprint": split.fingerprint,
                "photos": evidence.found["mean_geoscore"].n,
            },
            metric_type=kind,
            metric_name=labels[key],
            metric_value=value,
            metric_args={"interval_95": ends}
            if (ends := tuned.stored["intervals"].get(key))
            else None,
        )
        for key, kind in INDEXED.items()
        if key in evidence.found and (value := evidence.found[key].after) is not None
    ]


def check(text: str, meant: Any) -> None:
    """Raises ValueError where the Hub's client reads other metadata from a card than was meant.

    Args:
        text: The card.
        meant: The `ModelCardData` that was written into it.
    """
    from huggingface_hub import ModelCard
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    read: Any = ModelCard(text).data
    if read.to_dict() != meant.to_dict():
        raise ValueError("the front matter reads back otherwise than it was written")
    for result in read.eval_results or ():
        value = result.metric_value
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{result.metric_type} = {value!r} in the model-index is no figure")
        for name in ("task_type", "dataset_type", "dataset_name", "metric_type"):
            if not isinstance(getattr(result, name), str):
                raise ValueError(f"{name} in the model-index is no text")
    for name in [read.get("base_model"), *read.get("datasets", ())]:
        if name is not None:
            validate_repo_id(name)


def table(found: Mapping[str, Comparison]) -> list[dict[str, Any]]:
    """Returns the groups of the before-and-after table with every figure written out."""

    def line(pair: Comparison, label: str, unit: str) -> list[str]:
        ends = [number(end, unit, signed=True) for end in (pair.low, pair.high)]
        figures = [number(value, unit) for value in (pair.before, pair.after)]
        change = number(pair.difference, unit, signed=True)
        return [label, *figures, change, " to ".join(ends), pair.verdict.partition(" at n")[0]]

    return [
        {"title": title, "rows": rows}
        for title, unit, _, labels in TABLE
        if (
            rows := [line(found[key], label, unit) for key, label in labels.items() if key in found]
        )
    ]


def examples(evidence: Evidence) -> list[dict[str, Any]]:
    """Returns the split's first photos that name their creator; none where they are not ours.

    They are not chosen by how well they were answered.
    """
    photos = [photo for photo in evidence.split.photos if photo.creator and photo.path.is_file()]
    rows = (
        {row.id: row for row in evidence.runs[1].rows if row.sample == 0} if evidence.runs else {}
    )

    def example(n: int, photo: Photo) -> dict[str, Any]:
        row = rows.get(photo.id)
        licence = "Apache-2.0" if evidence.drawn else "CC BY-SA 4.0"
        country, creator = country_name(photo.country_iso2), printable(str(photo.creator))
        answer = None
        if row is not None:
            named = printable(row.pred_country) if row.pred_country else "no answer"
            answer = f"{named}, {number(row.d_km, 'km')} km off" if row.d_km is not None else named
        return {
            "photo": photo,
            "src": f"examples/{n}{photo.path.suffix}",
            "example_title": f"{country}. Photo: {creator}, {licence}",
            "text": "Where on Earth was this photo taken?",
            "country": country,
            "creator": creator,
            "licence": licence,
            "answer": answer,
        }

    if not evidence.split.publishable:
        return []
    return [example(n, photo) for n, photo in enumerate(photos[:EXAMPLES], start=1)]


def origin(dataset: Mapping[str, Any] | None) -> str | None:
    """Returns where a split comes from in words; None where nothing says so."""
    if dataset is None:
        return None
    if dataset.get("repo"):
        return f"{dataset['repo']}, revision {dataset['revision']}"
    return "a local folder in the layout of OSV-5M"


def settings(training: Mapping[str, Any] | None, base: str | None) -> str:
    """Returns a training run's resolved config as YAML, without a path of the machine it ran on."""
    from huggingface_hub.utils import yaml_dump  # type: ignore[attr-defined]

    if training is None:
        return ""
    config = _without_paths(training["settings"])
    config["data_dir"] = "data"
    if base:
        config["model"]["name"] = base
    config["trainer"]["output_dir"] = f"outputs/{training['name']}"
    for key in [key for key in config["trainer"] if key.startswith("hub_")]:
        del config["trainer"][key]
    passing = ("resume_from_checkpoint", "seconds_per_step", "budget_hours", "dry_run")
    kept = {key: value for key, value in config.items() if key not in passing and value is not None}
    return str(yaml_dump(kept)).strip()


def _without_paths(value: Any) -> Any:
    """Returns a JSON value in which every absolute path stands by its last part alone."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~"))
    return Path(value).name if is_path else value


def commands(evidence: Evidence, base: str | None) -> list[str]:
    """Returns the commands that train the adapter and make its figures again."""
    lines = []
    if evidence.training is not None:
        lines.append(".venv/bin/python scripts/train_grpo.py --config training.yaml")
    for name, run in zip(("base", "rl"), evidence.runs or (), strict=False):
        default, changed = map(artifacts._flat, (EvalConfig().model_dump(mode="json"), run.config))
        skipped = ("data_dir", "output_dir", "run_name", "split", "lora", "model.name")
        options = [
            f"--set {shlex.quote(f'{key}={json.dumps(_without_paths(value))}')}"
            for key, value in changed.items()
            if key not in skipped and value != default.get(key)
        ]
        flags = [f"--run_name {name}", f"--split {shlex.quote(evidence.split.name)}"]
        flags += [f"--model {shlex.quote(base or 'BASE')}"]
        flags += ["--lora adapter"] if name == "rl" else []
        lines.append(" ".join([".venv/bin/python scripts/run_eval.py", *flags, *options]))
    if evidence.runs:
        split = shlex.quote(evidence.split.name)
        lines.append(
            f".venv/bin/python scripts/compare_runs.py outputs/eval/base/{split} "
            f"outputs/eval/rl/{split}"
        )
    return [printable(line) for line in lines]


def versions(evidence: Evidence) -> list[tuple[str, str, str]]:
    """Returns each library's version in training and in evaluation."""
    trained = evidence.training["versions"] if evidence.training else {}
    tuned = evidence.runs[1] if evidence.runs else None
    header = artifacts.read_header(tuned.folder / artifacts.PREDICTIONS) if tuned else None
    measured = (header or {}).get("versions", {})
    return [
        (name, trained.get(name, "–"), measured.get(name, "–"))
        for name in (*artifacts.LIBRARIES, "source")
        if name in trained or name in measured
    ]
