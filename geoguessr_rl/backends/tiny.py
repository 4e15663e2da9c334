"""The tiny Qwen3-VL that stands in for the real one on a CPU.

It has the real classes, file layout, module names and chat format, and random weights of under two
million parameters, so that whatever runs on it runs on Qwen3-VL-4B too. It says nothing about how
well the real model learns. Heavy libraries are imported inside the function.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geoguessr_rl import prompt

_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TAGS = (prompt.THINK_OPEN, prompt.THINK_CLOSE, prompt.ANSWER_OPEN, prompt.ANSWER_CLOSE)

# A token never crosses the end of a clause, so that sentences of the constant prompt merge into
# few tokens while the clues, the country and the coordinates of an answer stay separate decisions.
_CLAUSE = r"[^,.:;\n]*(?:[,.:;]|\n+|$)"

# Qwen3-VL's turn format. A block counts by its `type` alone: in messages that were read from a
# dataset, text blocks carry a null `image` key.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for block in message.content -%}
{%- if block.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif block.type == 'text' -%}
{{- block.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# From one visual token up to the image policy's upper bound: photos whose sides are multiples of
# 32 are never resized, neither here nor in vLLM.
_MIN_PIXELS, _MAX_PIXELS = 32 * 32, 802_816


def build_tiny(out_dir: Path, seed: int, texts: Sequence[str]) -> None:
    """Writes a complete model folder: a random Qwen3-VL of about 0.7 million parameters.

    Args:
        out_dir: Where `AutoProcessor`, `AutoModelForImageTextToText` and vLLM load it from.
        seed: Seed of the weights; the same seed and texts give the same files.
        texts: What the tokenizer learns its merges from: the prompts and sample completions.
            Any other text still encodes, byte by byte.
    """
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    processor = _processor(_tokenizer(texts))
    config = _config(processor.tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    # It samples, as Qwen3-VL's does: a backend that forgets to say "greedy" shows here too.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        bos_token_id=config.text_config.bos_token_id,
        eos_token_id=[config.text_config.eos_token_id, config.text_config.pad_token_id],
        pad_token_id=config.text_config.pad_token_id,
    )
    model.save_pretrained(out_dir)
    processor.save_pretrained(out_dir)
    # Older readers (vLLM among them) look for the image processor's own file.
    (out_dir / "preprocessor_config.json").write_text(
        json.dumps(processor.image_processor.to_dict(), indent=2, sort_keys=True) + "\n",
        encoding="utf-8",
    )


def _tokenizer(texts: Sequence[str]) -> Any:
    """Returns a byte-level BPE tokenizer with Qwen3-VL's special tokens, trained on the texts."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLAUSE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*texts, "system\n", "user\n", "assistant\n"]
    # Tags are no part of any other token, as in the encoder, which cuts at added tokens first.
    for tag in _TAGS:
        texts = [piece for text in texts for piece in text.split(tag)]
    bpe.train_from_iterator(texts, trainer)
    # Added, but not special: decoding with `skip_special_tokens` has to keep them.
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL_TOKENS[1:]),
        model_max_length=4096,
        padding_side="left",
    )


def _processor(tokenizer: Any) -> Any:
    """Returns Qwen3-VL's processor, which resizes no photo of the image policy."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    pixels = {
        "size": {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**pixels),
        chat_template=_CHAT_TEMPLATE,
    )


def _config(tokenizer: Any) -> Any:
    """Returns the shape: two layers each of vision and language."""
    from transformers import Qwen3VLConfig

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _SPECIAL_TOKENS}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],  # sums to half the head size
                "mrope_interleaved": True,
            },
            "initializer_range": 0.05,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 96,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.05,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
