"""One model on one split -> its run folder: what evaluation and the checkpoints share.

Every figure is computed from the rows that stand in the file. Comparing two runs is the work of
`runs.py` and the phases above it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import Backend, open_backend, ray_engine
from geoguessr_rl.backends.predictions import (
    check_trained_alike,
    find_adapter,
    generate,
    holds_work,
    identity,
    sampling_of,
)
from geoguessr_rl.config import Api, EvalConfig
from geoguessr_rl.eval_metrics import compute_metrics
from geoguessr_rl.places import look_up_hits
from geoguessr_rl.records import Prediction


def evaluate(config: EvalConfig, engine: Callable[[], Backend] | None = None) -> dict[str, Any]:
    """Evaluates one model on one split and returns its metrics.

    Args:
        config: What to evaluate, and where the run's folder goes.
        engine: Gives a backend that is open already and uses `config.lora`; None opens one.

    Raises:
        UserError: The split, model or adapter is missing or unfit, the folder holds another run,
            or another process writes it.
    """
    if config.samples > 1 and config.generation.temperature == 0:
        raise UserError(
            f"samples is {config.samples} and generation.temperature 0, so that all answers to a "
            "photo are equal; set a temperature, 1.0 for example"
        )
    split = data.load_split(config.data_dir, config.split, limit=config.limit)
    sampling = sampling_of(config.generation, config.samples)
    if config.lora is not None:
        lora = find_adapter(config.lora)
        base = None if config.allow_base_mismatch else config.model.name
        check_trained_alike(lora, config.prompt.style, split.image_policy, base)
        config = config.model_copy(update={"lora": lora})
    out = config.output_dir / config.run_name / config.split
    with artifacts.run_lock(out), ray_engine.session(config.engine, config.ray):
        described = identity(split, config, sampling)
        if config.allow_base_mismatch:  # else a second run without it would wash the figures
            described["allow_base_mismatch"] = True
        artifacts.claim(
            out / artifacts.IDENTITY,
            described,
            holds_work=holds_work(out),
        )
        artifacts.write_json(out / artifacts.RESOLVED_CONFIG, config)
        rows = generate(
            out / artifacts.PREDICTIONS,
            split.photos,
            config.generation,
            config.model,
            config.prompt,
            sampling,
            data_dir=config.data_dir,
            header={**described, "versions": artifacts.installed_versions()},
            lora=config.lora,
            allow_base_mismatch=config.allow_base_mismatch,
            engine=engine,
            ray=config.ray if config.engine == "ray" else None,
        )
        metrics = summarize(config, split, rows, described)
        longer = artifacts.read_rows(out / artifacts.PREDICTIONS, Prediction)[len(rows) :]
        if longer and (out / artifacts.METRICS).is_file():
            print(f"{out / artifacts.METRICS} keeps the figures of the longer run")
        else:
            artifacts.write_json(out / artifacts.METRICS, metrics)
    return metrics


def require_adapters(config: EvalConfig) -> None:
    """Raises UserError when the backend cannot change adapters."""
    if config.generation.backend not in ("vllm", "transformers"):
        raise UserError(
            f"the {config.generation.backend} backend has no adapters; choose vllm or transformers"
        )


def shared_engine(
    config: EvalConfig, adapters: Sequence[Path]
) -> Callable[[Path | None], Callable[[], Backend]]:
    """Returns what gives, for an adapter or None, the `engine` that `evaluate` takes.

    The base is loaded once, when first asked, and the adapters are changed under it.
    """

    @cache
    def engine() -> Any:
        return open_backend(
            config.generation,
            config.model,
            config.prompt.style,
            lora=adapters[0],
            others=adapters[1:],
            allow_base_mismatch=config.allow_base_mismatch,
        )

    def using(lora: Path | None) -> Backend:
        backend = engine()
        backend.use(lora)
        return backend

    return lambda lora: partial(using, lora)


def summarize(
    config: EvalConfig,
    split: data.Split,
    rows: Sequence[Prediction],
    described: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns what goes into `metrics.json`; photos without an answer are named in `missing`."""
    answered = {row.id for row in rows} - {row.id for row in rows if row.outcome == "error"}
    missing = [photo.id for photo in split.photos if photo.id not in answered]
    metrics = compute_metrics(rows, split.country_share, look_up_hits(rows, split.places()))
    return {
        "run_name": config.run_name,
        **metrics,
        "complete": not missing,
        "missing": missing,
        "usage": usage(rows, config.generation.api),
        "run": dict(described),
        "allow_base_mismatch": config.allow_base_mismatch,
    }


def usage(rows: Sequence[Prediction], api: Api) -> dict[str, float | None] | None:
    """Returns the tokens that a server billed and what they cost; None where nobody counted."""
    billed = [(row.prompt_tokens, row.tokens) for row in rows if row.prompt_tokens is not None]
    if not billed:
        return None
    prompt, completion = map(sum, zip(*billed, strict=True))
    prices = (api.price_prompt, api.price_completion)
    dollars = None
    if None not in prices:
        dollars = (prompt * (prices[0] or 0) + completion * (prices[1] or 0)) / 1e6
    return {"prompt_tokens": prompt, "completion_tokens": completion, "dollars": dollars}
