"""Warm-up: supervised steps on completions made from labels, with TRL's `SFTTrainer`.

For a model that does not know the answer format yet, GRPO has nothing to reward. The embedded
world makes its base this way, and can be given a hot spot: a country that the model then names too
often, as untrained models do. All weights are trained; the result is a whole model folder.
"""

import random
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError, read_json, seed_for
from geoguessr_rl.config import HotSpot, WarmupConfig
from geoguessr_rl.countries import name_of
from geoguessr_rl.prompt import PromptStyle, format_completion
from geoguessr_rl.records import Photo


def country_centres(photos: Sequence[Photo]) -> dict[str, tuple[float, float]]:
    """Returns the median latitude and longitude of each country's photos, to one decimal."""
    places: dict[str, list[Photo]] = defaultdict(list)
    for photo in photos:
        places[photo.country_iso2].append(photo)

    def middle(values: list[float]) -> float:
        return round(sorted(values)[len(values) // 2], 1)

    return {
        code: (middle([p.latitude for p in group]), middle([p.longitude for p in group]))
        for code, group in places.items()
    }


def write_completions(
    photos: Sequence[Photo],
    style: PromptStyle,
    *,
    clues: Mapping[str, str],
    hot_spot: HotSpot | None,
    seed: int,
) -> list[str]:
    """Returns the completion that each photo's label makes.

    The place is the middle of the country, which a model can learn from the country alone. For a
    share of the visits country and place are the hot spot's, while the clues stay true.

    Args:
        photos: The order of training; a photo may come more than once.
        style: The prompt style.
        clues: Country code to what a thinking block says.
        hot_spot: The bias, or None.
        seed: Decides which visits name the hot spot.

    Raises:
        UserError: The hot spot is no country among the photos.
    """
    centres = country_centres(photos)
    if hot_spot is not None and hot_spot.country_iso2 not in centres:
        raise UserError(
            f"hot_spot.country_iso2 {hot_spot.country_iso2!r} is none of the countries in the "
            f"data: {', '.join(sorted(centres))}"
        )
    completions = []
    for visit, photo in enumerate(photos):
        code = photo.country_iso2
        draw = random.Random(seed_for(seed, f"{visit}:{photo.id}")).random()
        if hot_spot is not None and draw < hot_spot.share:
            code = hot_spot.country_iso2
        text = format_completion(
            name_of(code), *centres[code], clues=clues.get(photo.country_iso2, ""), style=style
        )
        completions.append(text)
    return completions


def run(config: WarmupConfig) -> dict[str, Any]:
    """Trains a model folder and returns what was done.

    Raises:
        UserError: The data or the model is missing, or the data is for evaluation.
    """
    split = data.load_split(config.data_dir, config.split, limit=config.limit)
    data.require_train_role(split, config.data_dir)
    clues = read_json(config.clues, remedy="mend warmup clues") if config.clues else {}
    order = data.lay_out(split.photos, config.steps * config.batch_size, config.seed)
    completions = write_completions(
        order, config.prompt.style, clues=clues, hot_spot=config.hot_spot, seed=config.seed
    )
    columns = data.training_columns(order, config.prompt.style)
    columns["completion"] = [[{"role": "assistant", "content": text}] for text in completions]

    out = config.output_dir
    with artifacts.run_lock(out):
        identity = {
            **config.model_dump(mode="json", exclude={"output_dir", "data_dir", "clues"}),
            "split_fingerprint": split.fingerprint,
            "clues": artifacts.fingerprint(clues),
            "model_files": artifacts.folder_fingerprint(config.model.name),
        }
        checkpoints = artifacts.complete_checkpoints(out / "trainer")
        finished = (out / "config.json").is_file()  # renamed into place last
        artifacts.claim(
            out / artifacts.IDENTITY, identity, holds_work=finished or bool(checkpoints)
        )
        artifacts.write_json(out / artifacts.RESOLVED_CONFIG, config)
        summary = {"rows": len(split.photos), "steps": config.steps, "model": str(out)}
        if finished:
            return {**summary, "done_before": True}
        trainer = _build_trainer(config, columns)
        trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
        _publish(trainer, out)
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {**summary, "loss_first": losses[0], "loss_last": losses[-1], "done_before": False}


def _build_trainer(config: WarmupConfig, columns: Mapping[str, Any]) -> Any:
    """Returns an `SFTTrainer` of all weights on the columns, in their order."""
    import torch
    from datasets import Dataset, Image
    from trl import SFTConfig, SFTTrainer

    from geoguessr_rl.backends import models
    from geoguessr_rl.backends.progress import Column, show_table

    device = models.pick_device(config.device)
    # float32 weights, since bfloat16 is too coarse for small updates of all of them.
    full = config.model.model_copy(update={"dtype": "float32"})
    model = models.load_model(full, device)
    processor = models.load_processor(config.model.name)
    dataset = Dataset.from_dict(
        {name: columns[name] for name in ("prompt", "completion", "image")}
    ).cast_column("image", Image())
    trainer = SFTTrainer(
        model=model,
        processing_class=processor,
        train_dataset=dataset,
        args=SFTConfig(
            output_dir=str(config.output_dir / "trainer"),
            max_steps=config.steps,
            per_device_train_batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, config.steps // 20),
            weight_decay=0.0,
            max_length=None,  # truncation would cut image pads
            completion_only_loss=True,
            seed=config.seed,
            shuffle_dataset=False,  # `data.lay_out` decides the order
            use_cpu=device == "cpu",
            bf16=device == "cuda" and torch.cuda.is_bf16_supported(),
            gradient_checkpointing=device == "cuda",
            save_steps=max(50, config.steps // 4),
            save_total_limit=2,
            report_to="none",
            logging_steps=max(1, config.steps // 10),
        ),
    )
    show_table(
        trainer,
        (
            Column(" loss", "loss", "{:.3f}".format),
            Column("token accuracy", "mean_token_accuracy", "{:.3f}".format),
        ),
    )
    return trainer


def _publish(trainer: Any, out: Path) -> None:
    """Moves the model's files into the folder, `config.json` last, and deletes the checkpoints."""
    staged = out / "staged"
    trainer.model.save_pretrained(staged)
    trainer.processing_class.save_pretrained(staged)
    for file in sorted(staged.iterdir(), key=lambda path: path.name == "config.json"):
        file.replace(out / file.name)
    shutil.rmtree(staged)
    shutil.rmtree(out / "trainer", ignore_errors=True)
