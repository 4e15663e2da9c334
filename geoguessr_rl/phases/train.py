"""Train: GRPO with TRL, LoRA on the language model, rollouts by vLLM or by transformers.

The trainer section of the config is TRL's `GRPOConfig` verbatim and is checked before anything
loads. The order of the photos is laid out in advance for the whole run, so that a resumed run sees
what it would have seen. Remedies for faults of the libraries stand in `backends/stack.py`.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pydantic

from geoguessr_rl import artifacts, budget, data, samples
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import GrpoConfig, nearest
from geoguessr_rl.prompt import TEMPLATE_KWARGS
from geoguessr_rl.records import PHOTO_SCHEMA, Photo
from geoguessr_rl.reward import reward_functions

REWARD_WEIGHTS = [1.0, 0.0, 0.0, 0.0]  # the total trains; its components are curves only
RUNS = Path("runs")
PROJECT = "geoguessr-rl"  # in W&B and Trackio
OURS = {  # trainer keys that the config may not set otherwise
    "reward_weights": REWARD_WEIGHTS,
    "shuffle_dataset": False,  # `data.lay_out` decides the order
    "remove_unused_columns": False,  # the rewards read the labels
}
EXTENDABLE = (  # trainer keys that a resumed run may change: its logs, its memory, its end
    "max_steps",  # where nothing depends on it, see `identity`
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "log_completions",
    "num_completions_to_print",
    "output_dir",
    "run_name",
    "report_to",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "vllm_gpu_memory_utilization",
    "vllm_enable_sleep_mode",
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


def build_args(trainer: Mapping[str, Any], *, use_cpu: bool) -> Any:
    """Builds `GRPOConfig` from a checked trainer section.

    Raises:
        UserError: Keys contradict each other, or what resuming and the rewards need.
    """
    from trl import GRPOConfig

    for key, value in OURS.items():
        if trainer.get(key, value) != value:
            raise UserError(f"trainer.{key} must be {value}: the run depends on it; remove the key")
    if trainer.get("chat_template_kwargs", TEMPLATE_KWARGS) != TEMPLATE_KWARGS:
        raise UserError(
            f"trainer.chat_template_kwargs must be {TEMPLATE_KWARGS}, as the evaluation renders "
            "the prompt; remove the key"
        )
    if trainer.get("max_steps", -1) < 1:
        raise UserError("trainer.max_steps must be 1 or more; a run is laid out in advance")
    settings = {
        "report_to": "wandb" if os.environ.get("WANDB_API_KEY") else "tensorboard",
        "log_multimodal": False,  # it uploads up to 64 photos a log call
        "project": PROJECT,
        "trackio_static_space_id": False,  # else a push to the Hub publishes the curves too
        **({"use_cpu": True} if use_cpu else {}),
        **trainer,
        **OURS,
    }
    try:
        args = GRPOConfig(**settings)
    except ValueError as error:
        raise UserError(f"the trainer section is refused by TRL: {error}") from None
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise UserError(
            f"trainer.generation_batch_size {args.generation_batch_size} is no multiple of the "
            f"completions a step ({args.per_device_train_batch_size} x "
            f"{args.gradient_accumulation_steps} x {args.world_size} processes); mend one of them"
        )
    if args.deepspeed or args.fsdp:
        raise UserError("trainer.deepspeed and trainer.fsdp shard what the weight sync needs whole")
    every = steps_a_generation(args)
    for key in ("save_steps", "max_steps"):
        if args.save_strategy != "no" and getattr(args, key) % every:
            raise UserError(
                f"trainer.{key} {getattr(args, key):g} is no multiple of {every}, the steps "
                "between generations, so its checkpoints could not be continued"
            )
    return args


def prompts_a_generation(args: Any) -> int:
    """Returns how many different photos one generation batch holds."""
    return int(args.generation_batch_size // args.num_generations)


def steps_a_generation(args: Any) -> int:
    """Returns how many optimizer steps one generation batch feeds; metrics come this often."""
    return int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


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
            dollars_per_hour=config.dollars_per_hour,
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

    Under `accelerate launch` or `torchrun` every process calls this; the main one alone prints,
    holds the folder, writes into it and returns something.

    Args:
        config: The resolved config.
        source: The config file's name, for messages.

    Raises:
        UserError: A key, the data, the model or the checkpoint is unfit, or the disk is full.
    """
    started = time.monotonic()
    if (config.seconds_per_step is None) != (config.budget_hours is None):
        raise UserError("--seconds_per_step and --budget_hours go together; give both or neither")
    from geoguessr_rl.backends import stack

    trainer_section = check_trainer_keys(config.trainer, source)
    stack.require_known_stack(use_vllm=bool(trainer_section.get("use_vllm")) and not config.dry_run)
    stack.require_token_level_correction(trainer_section)

    import torch
    from accelerate.utils import broadcast_object_list

    args = build_args(trainer_section, use_cpu=not torch.cuda.is_available())
    out, is_main = Path(args.output_dir), args.process_index == 0
    if config.dry_run:
        if is_main:
            dry_run(config, args)
        return {}
    split = data.load_split(config.data_dir, config.split, limit=config.limit)
    data.require_train_role(split, config.data_dir)
    with artifacts.run_lock(out) if is_main else nullcontext():
        checkpoint = begin(config, args, split) if is_main else None
        (checkpoint,) = broadcast_object_list([checkpoint])
        trainer = build_trainer(config, args, split.photos)
        end = attend(trainer, config, split.photos, started)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            end.close()
        if end.error is not None:
            raise end.error
        if not is_main:
            return {}
        artifacts.write_json(out / artifacts.TRAINING_LOG, trainer.state.log_history)
        last = artifacts.complete_checkpoints(out)
        rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return {
        "steps": trainer.state.global_step,
        "adapter": str(last[-1]) if last else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "stopped": end.reason,
    }


def attend(trainer: Any, config: GrpoConfig, photos: Sequence[Photo], started: float) -> Any:
    """Puts the eyes of a run on its trainer, and returns the `OrderlyEnd` that can stop it.

    Args:
        trainer: As `build_trainer` returns it.
        config: The resolved config.
        photos: The train photos.
        started: When the costs began, on `time.monotonic`'s clock.
    """
    from geoguessr_rl.backends.monitor import Monitor
    from geoguessr_rl.backends.saving import OrderlyEnd

    args = trainer.args
    every = steps_a_generation(args)
    end = OrderlyEnd(Path(args.output_dir), every, saves=args.save_strategy != "no")
    Monitor(
        trainer,
        photos,
        samples_every=config.samples_every,
        stop_on=config.stop.on,
        dollars_per_hour=config.dollars_per_hour,
        every=every,
        started=started,
        end=end,
    )
    trainer.add_callback(end)
    return end


def begin(config: GrpoConfig, args: Any, split: data.Split) -> Path | None:
    """Prints the plan, records beside the run what it is, and returns where it continues.

    Raises:
        UserError: The folder holds another run, or the checkpoint is unfit.
    """
    from geoguessr_rl.backends import saving

    out = Path(args.output_dir)
    there = artifacts.complete_checkpoints(out)
    artifacts.claim(out / artifacts.IDENTITY, identity(config, args, split), holds_work=bool(there))
    checkpoint = saving.choose_checkpoint(
        out, config.resume_from_checkpoint, steps_a_generation(args)
    )
    print("\n".join(describe_plan(config, args, len(split.photos))), flush=True)
    if checkpoint:
        print(f"continuing from {checkpoint}", flush=True)
    samples.cut_after(out, artifacts.checkpoint_step(checkpoint) if checkpoint else 0)
    versions = artifacts.installed_versions() | {"source": artifacts.source_state()}
    if (out / artifacts.VERSIONS).is_file() and checkpoint:
        before = artifacts.read_json(out / artifacts.VERSIONS, remedy="delete it")
        for name in sorted(name for name in versions if before.get(name) != versions[name]):
            print(f"note: {name} was {before.get(name)} and is now {versions[name]}", flush=True)
    artifacts.write_json(out / artifacts.VERSIONS, versions)
    artifacts.write_json(out / artifacts.RESOLVED_CONFIG, config)
    return checkpoint


def summary_line(done: Mapping[str, Any]) -> str:
    """Returns the one line that a run prints at its end."""
    first, last = (
        "none" if done[key] is None else f"{done[key]:.3f}"
        for key in ("reward_first", "reward_last")
    )
    adapter = done["adapter"] or "no checkpoint (trainer.save_strategy is no)"
    line = f"trained {done['steps']} steps: reward {first} to {last}; adapter in {adapter}"
    if done["stopped"]:
        line += f"; stopped by {done['stopped']}: --resume_from_checkpoint auto continues"
    return line


def identity(config: GrpoConfig, args: Any, split: data.Split) -> dict[str, Any]:
    """Returns everything that must be equal for a resumed run to be the same run."""
    fixed = {k: v for k, v in config.trainer.items() if k not in EXTENDABLE}
    constant = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if not constant.startswith("constant") or config.reward.shape == "curriculum":
        fixed["max_steps"] = args.max_steps  # the learning rate or the reward hangs on the end
    return {
        "model": config.model.name,
        "model_files": artifacts.folder_fingerprint(config.model.name),
        "prompt_style": config.prompt.style,
        "image": split.image_policy,
        "split": split.name,
        "split_fingerprint": split.fingerprint,
        "photos": len(split.photos),
        "lora": config.lora.model_dump(mode="json"),
        "reward": config.reward.model_dump(mode="json"),
        "completions_a_step": budget.completions_per_step(
            args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
        ),
        "trainer": fixed,
    }


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

    from geoguessr_rl.backends.monitor import COLUMNS
    from geoguessr_rl.backends.progress import show_table

    if "tensorboard" in args.report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(RUNS / Path(args.output_dir).name))
    os.environ.setdefault("WANDB_PROJECT", PROJECT)
    processor = models.load_processor(config.model.name)
    args.chat_template_kwargs = models.template_kwargs(processor)
    chosen = args.generation_kwargs or {}
    ours = stack.forbid_vision_tokens(processor.tokenizer, use_vllm=args.use_vllm)
    for key in ("seed", *ours):
        if key in chosen:
            raise UserError(
                f"trainer.generation_kwargs.{key} is not yours to set: a seed makes a group's "
                "completions identical, and the others keep vision tokens out; remove it"
            )
    args.generation_kwargs = {**chosen, **ours}
    generations = -(-args.max_steps // steps_a_generation(args))
    order = data.lay_out(photos, generations * prompts_a_generation(args), args.seed)
    columns = data.training_columns(order, config.prompt.style)
    dataset = Dataset.from_dict(columns).cast_column("image", Image())
    model = models.load_model(config.model, str(args.device))
    models.adapted_modules(model, config.lora)  # refuses before an engine takes minutes to start
    with stack.engine_like_trainer(model.dtype, on_cpu=on_cpu):
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
    show_table(trainer, COLUMNS)
    return trainer
