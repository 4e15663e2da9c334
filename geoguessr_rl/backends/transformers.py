"""transformers as a backend: CPU, Mac and CUDA.

Sampling adds each photo's own Gumbel noise to the scaled log-probabilities and takes the largest,
which is sampling from the softmax exactly (Gumbel-max), so that one photo's draws depend on
nothing but its own seed. `generate()` alone would draw from one stream for the whole batch.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from geoguessr_rl.artifacts import seed_for
from geoguessr_rl.backends import chat_messages, models, open_photo
from geoguessr_rl.config import Generation, Model
from geoguessr_rl.prompt import PromptStyle
from geoguessr_rl.records import Completion, Photo, Sampling


class GumbelNoise(LogitsProcessor):
    """Turns greedy decoding into sampling with a generator a row."""

    def __init__(self, seeds: Sequence[int], temperature: float, top_p: float) -> None:
        """Takes one seed a row of the batch."""
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._temperature, self._top_p = temperature, top_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Maps scores of shape (batch, vocabulary) to perturbed scores of the same shape."""
        logprobs = (scores.float() / self._temperature).log_softmax(-1)
        if self._top_p < 1:
            ordered, index = logprobs.sort(-1, descending=True)
            before = ordered.exp().cumsum(-1) - ordered.exp()
            drop = torch.zeros_like(before, dtype=torch.bool)
            drop.scatter_(-1, index, before >= self._top_p)
            logprobs = logprobs.masked_fill(drop, -torch.inf)
        width = scores.shape[-1]
        uniform = torch.stack([torch.rand(width, generator=g) for g in self._generators])
        tiny = torch.finfo(torch.float32).tiny
        return logprobs - (-uniform.clamp_min(tiny).log()).log().to(logprobs.device)


class _Tokens(BaseStreamer):
    """Puts each step's tokens, one a row of the batch, into a queue."""

    def __init__(self, tokens: "queue.SimpleQueue[Any]") -> None:
        """Takes the queue."""
        self._tokens, self._prompt_seen = tokens, False

    def put(self, value: torch.Tensor) -> None:
        """Passes tokens on; the first to come are the prompt's."""
        if self._prompt_seen:
            self._tokens.put(value)
        self._prompt_seen = True

    def end(self) -> None:
        """Does nothing: who calls `generate` knows that it ended."""


class TransformersBackend:
    """A model in this process, with an adapter by PEFT where one is given."""

    def __init__(
        self, generation: Generation, model: Model, style: PromptStyle, lora: Path | None
    ) -> None:
        """Loads model, processor and adapter."""
        self._device = models.pick_device(generation.device)
        self._batch_size = generation.batch_size
        self._processor = models.load_processor(model.name)
        self._model = models.load_model(model, self._device)
        self._has_adapters = False
        self.use(lora)
        self._prompt = self._processor.apply_chat_template(
            chat_messages(style),
            add_generation_prompt=True,
            tokenize=False,
            **models.template_kwargs(self._processor),
        )
        self._end_ids = models.end_token_ids(self._model, self._processor)

    def use(self, lora: Path | None) -> None:
        """Answers with another adapter from now on, or with the base."""
        self._lora = lora
        if lora is not None and not self._has_adapters:
            self._model = models.load_adapter(self._model, lora)
            self._has_adapters = True
        elif lora is not None:
            models.replace_adapter(self._model, lora)
        self._model.eval()

    def _inputs(self, images: Sequence[Image]) -> Any:
        """Returns the model's inputs for a batch, padded on the left."""
        inputs = self._processor(
            text=[self._prompt] * len(images),
            images=list(images),
            return_tensors="pt",
            padding=True,
            padding_side="left",
        )
        models.check_image_tokens(
            (inputs["input_ids"] == models.image_token_id(self._processor)).sum(1).tolist(),
            [image.size for image in images],
        )
        return inputs.to(self._device)

    def generate(self, photos: Sequence[Photo], sampling: Sampling) -> list[list[Completion]]:
        """Returns `sampling.n` completions a photo."""
        rows = [(photo, k) for photo in photos for k in range(sampling.n)]
        completions: list[Completion] = []
        with torch.inference_mode(), self._answering():
            for start in range(0, len(rows), self._batch_size):
                batch = rows[start : start + self._batch_size]
                images = [open_photo(photo) for photo, _ in batch]
                keys = [f"{photo.id}:{k}" for photo, k in batch]
                request = self._request(images, keys, sampling)
                ids = self._model.generate(**request)
                width = request["input_ids"].shape[1]
                completions += [self._completion(row) for row in ids[:, width:].tolist()]
        return [completions[i : i + sampling.n] for i in range(0, len(completions), sampling.n)]

    def stream(
        self, image: Image, key: str, sampling: Sampling, *, adapter: bool = True
    ) -> Iterator[list[Completion]]:
        """Yields what `sampling.n` completions of one photo hold so far, a token at a time.

        Closing the iterator ends the generation at its next token. One stream at a time may run.

        Args:
            image: An upright RGB photo at the policy's size.
            key: What the photo's own seeds are derived from, as its id.
            sampling: How to draw.
            adapter: Whether a loaded adapter takes part.
        """
        tokens: queue.SimpleQueue[torch.Tensor | BaseException | None] = queue.SimpleQueue()
        left = threading.Event()
        keys = [f"{key}:{k}" for k in range(sampling.n)]

        def generate() -> None:
            try:
                with torch.inference_mode(), self._answering(adapter):
                    self._model.generate(
                        **self._request([image] * sampling.n, keys, sampling),
                        streamer=_Tokens(tokens),
                        stopping_criteria=[
                            lambda ids, *_, **__: ids.new_full(ids.shape[:1], left.is_set()).bool()
                        ],
                    )
            except BaseException as error:  # raised where the stream is read
                tokens.put(error)
            else:
                tokens.put(None)

        worker = threading.Thread(target=generate)
        worker.start()
        try:
            rows: list[list[int]] = [[] for _ in keys]
            while (step := tokens.get()) is not None:
                if isinstance(step, BaseException):
                    raise step
                for row, token in zip(rows, step.tolist(), strict=True):
                    row.append(token)
                yield [self._completion(row) for row in rows]
        finally:
            left.set()
            worker.join()

    def _request(
        self, images: Sequence[Image], keys: Sequence[str], sampling: Sampling
    ) -> dict[str, Any]:
        """Returns the arguments of `generate` for a batch, each row with a seed of its own."""
        noise = LogitsProcessorList()
        if sampling.temperature > 0:
            seeds = [seed_for(sampling.seed, key) for key in keys]
            noise.append(GumbelNoise(seeds, sampling.temperature, sampling.top_p))
        # The config is explicit: the model's own one samples (temperature 0.7, top-k 20).
        config = GenerationConfig(
            do_sample=False,
            repetition_penalty=1.0,  # what stays unset comes from the model's own config
            no_repeat_ngram_size=0,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=self._end_ids,
            pad_token_id=self._processor.tokenizer.pad_token_id,
        )
        return {**self._inputs(images), "generation_config": config, "logits_processor": noise}

    def _completion(self, ids: list[int]) -> Completion:
        """Decodes one row, up to and without its end token."""
        ends = [ids.index(end) for end in self._end_ids if end in ids]
        length = min(ends, default=len(ids))
        text = self._processor.tokenizer.decode(ids[:length], skip_special_tokens=True)
        return Completion(text, min(length + 1, len(ids)), "stop" if ends else "length")

    def _answering(self, adapter: bool = True) -> Any:
        """Returns the context in which the model answers with or without its adapter."""
        if not self._has_adapters or (adapter and self._lora is not None):
            return nullcontext()
        return self._model.disable_adapter()

    def logprobs(
        self, photos: Sequence[Photo], texts: Sequence[str], *, adapter: bool = True
    ) -> list[list[float]]:
        """Returns the log-probability of each token of `texts[i]` as an answer to `photos[i]`."""
        return list(self._logprobs(photos, texts, adapter))

    def _logprobs(
        self, photos: Sequence[Photo], texts: Sequence[str], adapter: bool
    ) -> Iterator[list[float]]:
        with torch.inference_mode(), self._answering(adapter):
            for photo, text in zip(photos, texts, strict=True):
                inputs = self._inputs([open_photo(photo)])
                answer = torch.tensor(
                    self._processor.tokenizer(text, add_special_tokens=False)["input_ids"],
                    device=self._device,
                )[None]
                start = inputs["input_ids"].shape[1]
                for name, fill in (
                    ("input_ids", answer),
                    ("attention_mask", torch.ones_like(answer)),
                    ("mm_token_type_ids", torch.zeros_like(answer)),
                ):
                    inputs[name] = torch.cat([inputs[name], fill], dim=1)
                scores = self._model(**inputs).logits[0, start - 1 : -1].float().log_softmax(-1)
                yield scores.gather(1, answer[0, :, None])[:, 0].tolist()
