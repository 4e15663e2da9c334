"""What preflight asks of a built GRPO trainer: do processor, trainer and engine hold one model?

Each probe puts a few real photos through the very objects that a run will use, returns one sentence
that says what was measured, and raises with a sentence where the run would go wrong. A probe leaves
the adapter, the engine and the trainer's settings as it found them. What a step learns from is in
`rehearsal.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from transformers import GenerationConfig
from trl.data_utils import prepare_multimodal_messages

from geoguessr_rl import prompt
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import chat_messages, open_photo, stack
from geoguessr_rl.parsing import parse_answer
from geoguessr_rl.prompt import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    PromptStyle,
)  # fmt: skip
from geoguessr_rl.records import Photo
from geoguessr_rl.reward import haversine_km

MAX_GAP, MAX_GAP_FLOAT32 = 0.05, 0.01
"""Nats a token that sampler and trainer may be apart on average. In bfloat16 other kernels round
otherwise, which is some 0.01 to 0.03; a missing adapter, another photo or another temperature costs
tenths. In float32 only the order of sums differs, and the vision tokens that the sampler may not
draw, to which an untrained model gives some weight."""

PERTURBATION = 0.2
"""Nats a token by which a perturbed adapter has to move the model's own answers, ten times what
rounding does; the noise is doubled until it does, since nobody knows a model's sensitivity
beforehand."""
FIRST_STD, DOUBLINGS = 0.005, 10
ANSWER_TOKENS = 32

Conversation = list[dict[str, Any]]


def rendered_prompt(processor: Any, style: PromptStyle, settings: dict[str, Any]) -> str:
    """Checks the chat prompt as TRL renders it: one photo, and no thinking that the model is in.

    Args:
        processor: The model's processor.
        style: The prompt style.
        settings: What the run passes to the chat template.

    Raises:
        UserError: Another number of placeholders, or an opened thinking block.
    """
    text = processor.apply_chat_template(
        chat_messages(style), add_generation_prompt=True, tokenize=False, **settings
    )
    if (count := text.count(processor.image_token)) != 1:
        raise UserError(
            f"the chat template puts {count} image placeholders into a prompt with one photo; take "
            "the model's own chat template"
        )
    unasked = processor.apply_chat_template(chat_messages(style), tokenize=False, **settings)
    if text == unasked or not text.startswith(unasked):
        raise UserError(
            "the chat template does not hand the turn to the assistant (no generation prompt); "
            "take the model's own chat template"
        )
    for message in prompt.build_messages(style):
        if message["content"].strip() not in text:
            raise UserError(
                f"the chat template leaves out what the {message['role']} says; take the model's "
                "own chat template"
            )
    # The prompt's own words name both tags, always in pairs.
    if text.rfind(ANSWER_OPEN) > text.rfind(ANSWER_CLOSE):
        raise UserError(
            f"the chat template opens an answer block (the prompt ends with {text[-30:]!r}), so "
            "that no completion holds a whole one; take the model's own chat template"
        )
    if text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE):
        remedy = f"take {THINK_OPEN} out of its chat_template.jinja, or take another model"
        if "enable_thinking" in str(processor.chat_template) and "enable_thinking" not in settings:
            remedy = "set trainer.chat_template_kwargs: {enable_thinking: false}"
        raise UserError(
            f"the chat template opens a thinking block (the prompt ends with {text[-30:]!r}), "
            f"which swallows the clues and the answer; {remedy}"
        )
    return f"one image placeholder, {len(text)} characters, ends with {text[-30:]!r}"


def conversations(photos: Sequence[Photo], style: PromptStyle) -> list[Conversation]:
    """Returns each photo's prompt in TRL's block form, with the photo in it."""
    return [
        prepare_multimodal_messages(prompt.build_messages(style), images=[open_photo(photo)])
        for photo in photos
    ]


@contextmanager
def holding(target: Any, **values: Any) -> Iterator[None]:
    """Sets attributes for the length of a block."""
    kept = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(target, name, value)


@contextmanager
def answering(trainer: Any) -> Iterator[Any]:
    """Yields the model without dropout, gradient checkpointing and gradients."""
    model, was_training = trainer.model, trainer.model.training
    model.eval()  # checkpointing is for training mode alone
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            yield model
    finally:
        model.train(was_training)


def model_inputs(trainer: Any, prompts: Sequence[Conversation]) -> Any:
    """Returns the trainer's model inputs for prompts, padded on the left."""
    processor = trainer.processing_class
    texts = processor.apply_chat_template(
        list(prompts), add_generation_prompt=True, tokenize=False, **trainer.chat_template_kwargs
    )
    images = [part["image"] for turns in prompts for part in turns[-1]["content"][:1]]
    inputs = processor(
        text=texts, images=images, padding=True, padding_side="left", return_tensors="pt"
    )
    return inputs.to(trainer.accelerator.device)


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """What the engine did with a few prompts: the prompts' ids as it saw them, answers, scores."""

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float]]


def engine_answers(trainer: Any, prompts: Sequence[Conversation], *, tokens: int) -> EngineAnswers:
    """Returns the colocated engine's greedy answers; raises StackFaultError on other prompts."""
    engine = trainer.vllm_generation
    ids, images, _ = trainer._tokenize_prompts(list(prompts))
    with holding(engine, temperature=0.0, max_completion_length=tokens):
        seen, completions, logprobs, _ = engine.generate(ids, images, 1)
    return EngineAnswers(
        [list(row) for row in seen],
        [list(row) for row in completions],
        [[token[0] for token in row] for row in logprobs],
    )


def trainer_answers(trainer: Any, prompts: Sequence[Conversation], tokens: int) -> list[list[int]]:
    """Returns the trainer's own greedy answers, each with its end token where it has one."""
    tokenizer, ends = trainer._tokenizer, set(trainer.eos_token_ids)
    config = GenerationConfig(  # explicit: the model's own one samples
        do_sample=False,
        repetition_penalty=trainer.args.repetition_penalty,
        max_new_tokens=tokens,
        eos_token_id=list(ends),
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=stack.forbidden_ids(tokenizer),
    )
    with answering(trainer) as model:
        inputs = model_inputs(trainer, prompts)
        rows = model.generate(**inputs, generation_config=config)
    answers = rows[:, inputs["input_ids"].shape[1] :].tolist()
    lengths = [next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in answers]
    return [row[:length] for row, length in zip(answers, lengths, strict=True)]


def answer_logprobs(
    trainer: Any, prompts: Sequence[Conversation], answers: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Returns the log-probability that the trainer's model gives each token of each answer."""
    scores = []
    with answering(trainer) as model:
        for conversation, answer in zip(prompts, answers, strict=True):  # whole logits are large
            inputs = model_inputs(trainer, [conversation])
            ids = torch.tensor([list(answer)], device=trainer.accelerator.device)
            fills = {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": torch.zeros_like(ids),  # text, where the model asks
            }
            for name in fills.keys() & inputs.keys():
                inputs[name] = torch.cat([inputs[name], fills[name]], dim=1)
            logits = model(**inputs, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
            logits[:, stack.forbidden_ids(trainer._tokenizer)] += stack.NEVER  # as in the engine
            scores.append(logits.log_softmax(-1).gather(1, ids[0, :, None])[:, 0].tolist())
    return scores


def mean_gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Returns the mean absolute difference a token."""
    pairs = [pair for rows in zip(left, right, strict=True) for pair in zip(*rows, strict=True)]
    return fmean(abs(a - b) for a, b in pairs)


def max_gap(trainer: Any) -> float:
    """Returns how far sampler and trainer may be apart; see `MAX_GAP`."""
    return MAX_GAP_FLOAT32 if trainer.model.dtype == torch.float32 else MAX_GAP


def photo_tokens(trainer: Any, prompts: Sequence[Conversation], sizes: int) -> str:
    """Compares what a photo costs in processor, trainer and engine, and the room that is left.

    Args:
        trainer: A mended `GRPOTrainer`; its own checks speak first.
        prompts: Photos of different sizes.
        sizes: How many sizes the split has, for the sentence.
    """
    pad = trainer._image_pad_token_id
    ids, images, _ = trainer._tokenize_prompts(list(prompts))
    pads = [row.count(pad) for row in ids]
    counts = {
        "processor": (model_inputs(trainer, prompts)["input_ids"] == pad).sum(1).tolist(),
        "trainer": pads,
    }
    if trainer.use_vllm:
        seen = engine_answers(trainer, prompts, tokens=1).prompts
        counts["engine"] = [row.count(pad) for row in seen]
    for place, found in counts.items():
        if found != pads:
            raise stack.StackFaultError(
                f"photos cost {found} tokens in the {place} and {pads} in the trainer; prepare the "
                "data again with sizes that every processor leaves alone"
            )
    longest = max(map(len, ids))
    room = trainer.args.vllm_max_model_length if trainer.use_vllm else None
    if room and longest + trainer.args.max_completion_length > room:
        raise UserError(
            f"a prompt of {longest} tokens and a completion of "
            f"{trainer.args.max_completion_length} exceed trainer.vllm_max_model_length {room}; "
            f"set it to {longest + trainer.args.max_completion_length} or more"
        )
    shown = ", ".join(
        f"{image.width}x{image.height}: {count}"
        for (image, *_), count in zip(images, pads, strict=True)
    )
    places = ", ".join(counts)
    return f"equal in {places} ({shown}); {sizes} sizes in the split; longest prompt {longest}"


def engine_agrees(trainer: Any, prompts: Sequence[Conversation]) -> str:
    """Compares the engine's greedy answers with those of transformers on the trainer's model."""
    trainer.vllm_generation.sync_weights()
    tokens = trainer.args.max_completion_length
    engine = engine_answers(trainer, prompts, tokens=tokens)
    own = trainer_answers(trainer, prompts, tokens)
    gap = mean_gap(engine.logprobs, answer_logprobs(trainer, prompts, engine.completions))
    equal = sum(left == right for left, right in zip(engine.completions, own, strict=True))
    parsed = [
        [parse_answer(trainer._tokenizer.decode(row, skip_special_tokens=True)) for row in pair]
        for pair in zip(engine.completions, own, strict=True)
    ]
    apart = [haversine_km(a.lat, a.lon, b.lat, b.lon) for a, b in parsed if a and b]
    measured = (
        f"token ids equal in {equal} of {len(own)} greedy answers, {gap:.5f} nats a token apart; "
        + (
            f"answers at most {max(apart):.1f} km apart ({len(apart)} of {len(own)} parse)"
            if apart
            else "no answer parses, so no distances"
        )
    )
    if gap > max_gap(trainer):
        raise stack.StackFaultError(
            f"{measured}; at most {max_gap(trainer)} is rounding: engine and trainer hold other "
            "weights, photos or settings; install from the lock file"
        )
    if trainer.model.dtype == torch.float32 and equal < len(own):
        raise stack.StackFaultError(
            f"{measured}; in float32 they must be equal; install from the lock file"
        )
    return measured


@contextmanager
def perturbed_adapter(trainer: Any, std: float, seed: int) -> Iterator[None]:
    """Adds noise to every LoRA B, and takes it away again, in the engine too."""
    weights = [value for name, value in trainer.model.named_parameters() if "lora_B" in name]
    kept = [weight.detach().clone() for weight in weights]
    generator = torch.Generator().manual_seed(seed)
    try:
        for weight in weights:
            noise = torch.randn(weight.shape, generator=generator) * std
            weight.data += noise.to(weight)
        yield
    finally:
        for weight, value in zip(weights, kept, strict=True):
            weight.data.copy_(value)
        if trainer.use_vllm:
            trainer.vllm_generation.sync_weights()


def perturbation(
    trainer: Any, prompts: Sequence[Conversation], answers: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Returns the noise on LoRA B that moves the answers by `PERTURBATION`, and the move.

    Raises:
        StackFaultError: No noise moves them.
    """
    before = answer_logprobs(trainer, prompts, answers)
    with holding(trainer, use_vllm=False):  # nothing for the engine yet
        for std in (FIRST_STD * 2**n for n in range(DOUBLINGS)):
            with perturbed_adapter(trainer, std, seed=0):
                change = mean_gap(before, answer_logprobs(trainer, prompts, answers))
            if change >= PERTURBATION:
                return std, change
    raise stack.StackFaultError(
        f"noise of {std:g} on every LoRA B moves the trainer's log-probabilities by {change:.5f} "
        "nats a token only: the adapter is disabled or sits where nothing is computed; mend lora"
    )


def adapter_reaches(trainer: Any, prompts: Sequence[Conversation]) -> str:
    """Checks that a perturbed adapter changes the trainer's model and, after a sync, the engine's.

    The engine's own answer is scored by the trainer with and without the noise: it has to be the
    perturbed policy's, by less than half of what the noise makes. Answers are short, since a
    perturbed model may fall into a loop, of which every policy is sure.
    """
    tokens = min(ANSWER_TOKENS, trainer.args.max_completion_length)
    std, change = perturbation(trainer, prompts, trainer_answers(trainer, prompts, tokens))
    measured = f"noise moves the model's own answers by {change:.2f} nats a token in the trainer"
    if not trainer.use_vllm:
        return measured
    with perturbed_adapter(trainer, std, seed=0):
        trainer.vllm_generation.sync_weights()
        engine = engine_answers(trainer, prompts, tokens=tokens)
        with_noise = answer_logprobs(trainer, prompts, engine.completions)
    without = answer_logprobs(trainer, prompts, engine.completions)
    near, far = mean_gap(engine.logprobs, with_noise), mean_gap(engine.logprobs, without)
    measured += f"; after a sync the engine is {near:.5f} from it, and {far:.2f} from the base"
    if near > min(far, mean_gap(with_noise, without)) / 2:
        raise stack.StackFaultError(
            f"{measured}: a trained adapter would not reach the rollouts; install TRL and vLLM "
            "from the lock file"
        )
    return measured


def base_unchanged(trainer: Any) -> str:
    """Checks that a sync of a perturbed adapter leaves the base weights as they are, to the bit."""
    before = stack.base_checksum(trainer.model)
    with perturbed_adapter(trainer, 0.05, seed=1):
        trainer.vllm_generation.sync_weights()
    stack.require_same_base(before, trainer.model)
    return f"{len(before)} base weights equal to the bit after the sync of a perturbed adapter"
