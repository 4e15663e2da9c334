"""The demo's model at the desk: what all visitors share, whoever shows it to them.

One model and its base answer in this process, one photo at a time, beside the held-out photos of
the games.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geoguessr_rl import data
from geoguessr_rl.artifacts import UserError, read_json
from geoguessr_rl.backends import models, open_backend, predictions, probe_adapter
from geoguessr_rl.config import DemoConfig, Generation, ImagePolicy, Model
from geoguessr_rl.demo_views import ALONE, BASE, TRAINED, Answer
from geoguessr_rl.images import open_upright
from geoguessr_rl.records import Photo, Sampling

QUICKSTARTS = Path("outputs/quickstart")
SECONDS_A_PICTURE = 0.1  # between two updates of a streamed answer
TINY = 10_000_000  # parameters; no model that small has seen a photo


@dataclass(frozen=True)
class Desk:
    """What every visitor shares.

    Attributes:
        backend: The model in this process.
        players: The models by name, and whether the adapter takes part in them.
        tiny: Whether it is the embedded world's.
        policy: The size of the model's photos.
        photos: Held-out photos for games, or why there are none.
        report: Where the report's page is looked for.
        uploads: Where the server puts what visitors send.
        config: The resolved config.
        turn: Held by the one guess that runs.
    """

    backend: Any
    players: Mapping[str, bool]
    tiny: bool
    policy: ImagePolicy
    photos: list[Photo] | str
    report: Path
    uploads: Path
    config: DemoConfig
    turn: threading.Lock

    def ask(self, jpeg: bytes, key: str, samples: int) -> Iterator[dict[str, Answer]]:
        """Yields what the models have written about a photo, a few times a second."""
        sampling = Sampling(
            n=samples,
            temperature=1.0 if samples > 1 else 0.0,
            max_tokens=self.config.max_tokens,
        )
        image, answers = open_upright(jpeg), dict[str, Answer]()
        for name, adapter in self.players.items():
            shown = 0.0
            with self.turn:
                for completions in self.backend.stream(image, key, sampling, adapter=adapter):
                    answers[name] = Answer(completions, done=False)
                    if time.monotonic() - shown > SECONDS_A_PICTURE:
                        yield dict(answers)
                        shown = time.monotonic()
            answers[name] = Answer(completions, done=True)
            yield dict(answers)


def with_defaults(config: DemoConfig) -> DemoConfig:
    """Fills in the model: the adapter's base, or what the quickstart trained last.

    Raises:
        UserError: There is neither.
    """
    if config.model is not None:
        return config
    if config.lora is not None:
        lora = predictions.find_adapter(config.lora)
        settings = read_json(lora / "adapter_config.json", remedy="name the base with --model")
        return config.model_copy(update={"model": Model(name=settings["base_model_name_or_path"])})
    reports = sorted(QUICKSTARTS.glob("*/report.html"), key=lambda path: path.stat().st_mtime)
    if not reports:
        raise UserError(
            f"no model is given, and {QUICKSTARTS} holds no finished quickstart; run "
            "`bash runbook/quickstart.sh` first, or name a model with --model"
        )
    run = reports[-1].parent
    return config.model_copy(
        update={
            "model": Model(name=str(run / "base")),
            "lora": run / "grpo",
            "data_dir": run / "data",
            "report": reports[-1],
        }
    )


def open_desk(config: DemoConfig, uploads: Path) -> Desk:
    """Loads the model and the photos of the games."""
    assert config.model is not None
    lora, style = config.lora, config.prompt.style
    policy, photos = _photos(config)
    if lora is not None:
        lora = predictions.find_adapter(lora)
        trained = predictions.training_record(lora)
        if trained is not None:
            policy, style = ImagePolicy(**trained["image"]), trained["prompt_style"]
        base = None if config.allow_base_mismatch else config.model.name
        predictions.check_trained_alike(lora, style, policy.model_dump(), base)
    generation = Generation(
        backend="transformers", device=config.device, max_tokens=config.max_tokens
    )
    backend: Any = open_backend(
        generation,
        config.model,
        style,
        lora=lora,
        allow_base_mismatch=config.allow_base_mismatch,
    )
    if lora is not None and isinstance(photos, list):
        probe_adapter(backend, photos[0])
    players = {ALONE: True} if lora is None else {BASE: False, TRAINED: True}
    tiny = sum(p.numel() for p in models.meta_model(config.model.name).parameters()) < TINY
    return Desk(
        backend, players, tiny, policy, photos, config.report, uploads, config, threading.Lock()
    )


def _photos(config: DemoConfig) -> tuple[ImagePolicy, list[Photo] | str]:
    """Returns the size of prepared photos, and those that games may show.

    Raises:
        UserError: The split is not held out, or its pictures must not be shown.
    """
    if not (config.data_dir / f"{config.split}.parquet").is_file():
        return ImagePolicy(), (
            f"{config.data_dir} holds no split {config.split}; run scripts/prepare_data.py, or "
            "name a prepared folder with --data_dir"
        )
    split = data.load_split(config.data_dir, config.split)
    if split.role != "evaluation":
        raise UserError(f"the split {config.split} is not held out; play on eval_osv")
    if not split.publishable:
        raise UserError(
            f"the pictures of {config.split} serve evaluation only and are shown to nobody; play "
            "on eval_osv"
        )
    return ImagePolicy(**split.image_policy), list(split.photos)
