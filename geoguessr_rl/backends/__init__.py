"""Photos -> completions behind one interface.

Every phase that needs a model's answers opens a backend here: vLLM, transformers, a server, or
scripted answers. A backend gets photos and a `Sampling`, and gives completions in the photos'
order, `n` for each. It does not parse, score, cut into blocks or write files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import Generation, Model
from geoguessr_rl.images import BadImageError, open_upright
from geoguessr_rl.prompt import ANSWER_CLOSE, PromptStyle, build_messages
from geoguessr_rl.records import Completion, Photo, Sampling

PROBE_MIN_GAP = 1e-6
PROBE_NOISE = 3.0
"""An adapter shows that it is in use when it moves log-probabilities by more than `PROBE_MIN_GAP`
and by `PROBE_NOISE` times what the base's own answers move from one request to the next."""


class Backend(Protocol):
    """What every backend offers."""

    def generate(self, photos: Sequence[Photo], sampling: Sampling) -> list[list[Completion]]:
        """Returns `sampling.n` completions a photo, in the photos' order.

        A transport failure is a completion with the finish reason `error`.
        """
        ...

    def logprobs(
        self, photos: Sequence[Photo], texts: Sequence[str], *, adapter: bool = True
    ) -> list[list[float]]:
        """Returns the log-probability of each token of `texts[i]` as an answer to `photos[i]`.

        With `adapter=False` the base model answers, where an adapter is loaded.
        """
        ...


def open_photo(photo: Photo) -> Image.Image:
    """Returns a prepared photo; raises UserError when its file is gone or damaged."""
    try:
        return open_upright(photo.path)
    except (OSError, BadImageError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{photo.path}: {reason}; run scripts/prepare_data.py again") from None


def chat_messages(style: PromptStyle) -> list[dict[str, Any]]:
    """Returns the prompt in block form, with the photo before the user's text, as TRL puts it."""
    blocks: list[dict[str, Any]] = []
    for message in build_messages(style):
        image = [{"type": "image"}] if message["role"] == "user" else []
        text = {"type": "text", "text": message["content"]}
        blocks.append({"role": message["role"], "content": [*image, text]})
    return blocks


def open_backend(
    generation: Generation,
    model: Model,
    style: PromptStyle,
    *,
    data_dir: Path = Path("data"),
    lora: Path | None = None,
    others: Sequence[Path] = (),
    allow_base_mismatch: bool = False,
) -> Backend:
    """Loads the backend that a config names, with its adapter checked (see `probe_adapter` too).

    Args:
        generation: Which backend, on what device.
        model: The base model.
        style: The prompt style.
        data_dir: Where the splits are, for a baseline that goes by the train pool.
        lora: The adapter's folder, or None.
        others: Adapters to which the backend's `use` will change.
        allow_base_mismatch: Accept an adapter that was trained on a base of another name.

    Raises:
        UserError: The model or the adapter cannot be loaded, or they do not fit each other.
    """
    if generation.backend == "scripted":
        from geoguessr_rl.backends.scripted import ScriptedBackend

        if lora is not None:
            raise UserError("the scripted backend has no model, so --lora has no meaning with it")
        return ScriptedBackend(generation.script, data_dir)

    if generation.backend == "openai":
        from geoguessr_rl.backends.openai import OpenAIBackend

        if lora is not None:
            raise UserError(
                "the openai backend cannot load --lora; serve the adapter, and name it with --model"
            )
        return OpenAIBackend(generation, model, style)

    from geoguessr_rl.backends import models

    for adapter in [*([] if lora is None else [lora]), *others]:
        models.check_adapter(adapter, model.name, allow_base_mismatch=allow_base_mismatch)
    if generation.backend == "vllm":
        from geoguessr_rl.backends.vllm import VllmBackend

        return VllmBackend(generation, model, style, lora, others)
    from geoguessr_rl.backends.transformers import TransformersBackend

    return TransformersBackend(generation, model, style, lora)


def probe_adapter(backend: Backend, photo: Photo) -> float:
    """Checks that a loaded adapter changes what the model says; returns the mean change.

    vLLM and PEFT both serve the base model without a word when an adapter's keys match no module
    or its weights are all zero.

    Raises:
        UserError: The log-probabilities of a fixed answer are those of the base model.
    """
    text = '<answer>{"country": "Chile", "lat": -33.4, "lon": -70.6}' + ANSWER_CLOSE
    tuned, base, again = (
        backend.logprobs([photo], [text], adapter=adapter)[0] for adapter in (True, False, False)
    )

    def gap(left: Sequence[float], right: Sequence[float]) -> float:
        return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)

    change, noise = gap(tuned, base), gap(base, again)
    if change < max(PROBE_MIN_GAP, PROBE_NOISE * noise):
        raise UserError(
            "the adapter changes nothing: a fixed answer has the base model's log-probabilities; "
            "check that it was trained and that its keys match this base"
        )
    return change
