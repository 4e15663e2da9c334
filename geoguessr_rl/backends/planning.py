"""Shapes for the cost planner: what `budget` needs to know of a model and of a run.

They come from the model's config, whose modules are built on the meta device, and from TRL's
`GRPOConfig`, so that a plan needs no GPU, no weights and no data.
"""

from collections.abc import Mapping
from typing import Any

from geoguessr_rl import prompt
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import models
from geoguessr_rl.budget import ModelShape, RunShape
from geoguessr_rl.config import GrpoConfig, Lora
from geoguessr_rl.images import visual_tokens

CHARS_A_TOKEN = 4  # of English text, roughly; a plan loads no tokenizer
_CHECKPOINT_BYTES = 12  # a trained parameter: float32, and Adam's two moments


def trainer_args(trainer: Mapping[str, Any]) -> Any:
    """Builds TRL's `GRPOConfig` for a plan, on any machine.

    Raises:
        UserError: TRL refuses the section.
    """
    from trl import GRPOConfig

    try:
        return GRPOConfig(**{**trainer, "use_cpu": True, "report_to": "none"})
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the trainer section is refused by TRL: {error}; mend it, and see "
            "train_grpo.py --dry_run"
        ) from None


def model_shape(name: str, lora: Lora) -> ModelShape:
    """Returns a model's shape, by Hub name or folder, with the adapter that would be trained.

    Raises:
        UserError: The model is missing, or the adapter matches none of its modules.
    """
    model = models.meta_model(name)
    modules = models.adapted_modules(model, lora)
    text = model.config.get_text_config()
    vision = (part for key, part in model.named_parameters() if ".visual." in f".{key}")
    return ModelShape(
        parameters=sum(part.numel() for part in model.parameters()),
        vision_parameters=sum(part.numel() for part in vision),
        trained_parameters=models.lora_parameters(modules, lora.r),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        mlp=text.intermediate_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        vocabulary=text.vocab_size,
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        adapted_inputs=sum(fan_in for fan_in, _ in modules.values()) // text.num_hidden_layers,
    )


def run_shape(
    config: GrpoConfig, args: Any, photo: tuple[int, int] | int, processes: int | None = None
) -> RunShape:
    """Returns a training run's shape.

    Args:
        config: The training config.
        args: The `GRPOConfig` built from its trainer section.
        photo: A photo's (width, height) in pixels, or its visual tokens.
        processes: GPUs; by default as many as this process belongs to.

    Raises:
        UserError: The engine is on another GPU, or the batch does not divide among the GPUs.
    """
    processes = processes or args.world_size
    if args.use_vllm and args.vllm_mode != "colocate":
        raise UserError(
            f"trainer.vllm_mode is {args.vllm_mode}; a plan knows an engine on the trainer's own "
            "GPU only, so set it to colocate"
        )
    micro_batches = args.generation_batch_size / (args.per_device_train_batch_size * processes)
    if micro_batches % args.gradient_accumulation_steps:
        raise UserError(
            f"trainer.generation_batch_size {args.generation_batch_size} is no multiple of the "
            f"completions a step ({args.per_device_train_batch_size} x "
            f"{args.gradient_accumulation_steps} x {processes} processes); mend one of them"
        )
    corrects = args.use_vllm and args.vllm_importance_sampling_correction
    # As TRL decides: completions of a policy that a step has changed since are scored again.
    stale = args.gradient_accumulation_steps % (micro_batches * args.num_iterations) != 0
    messages = prompt.build_messages(config.prompt.style)
    text = sum(len(message["content"]) for message in messages)
    visual = photo if isinstance(photo, int) else visual_tokens(photo)
    return RunShape(
        micro_batch=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        processes=processes,
        generations=args.num_generations,
        generation_batch=args.generation_batch_size,
        prompt_tokens=visual + text // CHARS_A_TOKEN,
        visual_tokens=visual,
        completion_tokens=args.max_completion_length,
        gradient_checkpointing=args.gradient_checkpointing,
        scoring_passes=int(corrects or stale) + int(args.beta != 0),
        vllm_share=args.vllm_gpu_memory_utilization if args.use_vllm else None,
        sleep=args.vllm_enable_sleep_mode,
        max_model_length=args.vllm_max_model_length or 0,
        weight_bytes=4 if config.model.dtype == "float32" else 2,
    )


def checkpoint_gib(model: ModelShape) -> float:
    """Returns what one checkpoint takes on the disk: the adapter in float32, and its optimizer."""
    return model.trained_parameters * _CHECKPOINT_BYTES / 2**30
