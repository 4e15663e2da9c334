"""The transformers and scripted backends: order, seeds, greedy, log-probabilities, the probe."""

import json
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from geoguessr_rl import prompt
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import chat_messages, models, open_backend, open_photo, probe_adapter
from geoguessr_rl.backends.tiny import build_tiny
from geoguessr_rl.backends.transformers import GumbelNoise, TransformersBackend
from geoguessr_rl.config import Generation, Lora, Model
from geoguessr_rl.records import Completion, Photo, Sampling

SAMPLED = Sampling(n=2, temperature=1.0, top_p=0.95, max_tokens=10, seed=3)
GREEDY = Sampling(max_tokens=10)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    texts = [m["content"] for s in prompt.PROMPT_STYLES for m in prompt.build_messages(s)]
    build_tiny(folder, 0, texts)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Photo]:
    folder = tmp_path_factory.mktemp("photos")
    made = []
    for number, size in enumerate([(160, 96), (96, 160), (64, 64), (128, 64), (160, 96)]):
        path = folder / f"{number}.png"
        Image.effect_noise(size, 90).convert("RGB").save(path)
        made.append(Photo(str(number), path, 1.0, 2.0, "KE"))
    return made


def open_tiny(tiny: Path, batch_size: int = 2, lora: Path | None = None) -> TransformersBackend:
    generation = Generation(backend="transformers", device="cpu", batch_size=batch_size)
    backend = open_backend(generation, Model(name=str(tiny)), "think", lora=lora)
    assert isinstance(backend, TransformersBackend)
    return backend


def texts_of(backend: TransformersBackend, photos: Sequence[Photo], sampling: Sampling) -> dict:
    answers = backend.generate(photos, sampling)
    return {
        photo.id: [completion.text for completion in group]
        for photo, group in zip(photos, answers, strict=True)
    }


def test_sampling_depends_on_neither_order_nor_batch(tiny: Path, photos: list[Photo]) -> None:
    first = texts_of(open_tiny(tiny, 2), photos, SAMPLED)
    assert texts_of(open_tiny(tiny, 3), photos[::-1], SAMPLED) == first
    assert all(len(set(group)) == 2 for group in first.values())
    other_seed = Sampling(n=2, temperature=1.0, max_tokens=10, seed=4)
    assert texts_of(open_tiny(tiny, 2), photos, other_seed) != first


def test_greedy_ignores_the_models_own_sampling_defaults(tiny: Path, photos: list[Photo]) -> None:
    settings = json.loads((tiny / "generation_config.json").read_text())
    assert settings["do_sample"] is True  # as Qwen3-VL's own
    backend = open_tiny(tiny)
    assert texts_of(backend, photos, GREEDY) == texts_of(backend, photos, GREEDY)


def test_a_greedy_token_is_the_most_likely_one(tiny: Path, photos: list[Photo]) -> None:
    backend = open_tiny(tiny)
    inputs = backend._inputs([open_photo(photos[0])])
    with torch.inference_mode():
        best = backend._model(**inputs).logits[0, -1].argmax()
    text = backend.generate(photos[:1], Sampling(max_tokens=1))[0][0].text
    assert text == backend._processor.tokenizer.decode([best], skip_special_tokens=True)


def test_completions_say_why_they_ended(tiny: Path, photos: list[Photo]) -> None:
    completion = open_tiny(tiny).generate(photos[:1], GREEDY)[0][0]
    assert (completion.tokens, completion.finish_reason) == (10, "length")


def test_gumbel_noise_samples_the_softmax() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    noise = GumbelNoise(range(20_000), temperature=1.0, top_p=1.0)
    picked = noise(torch.zeros(1), logits.repeat(20_000, 1)).argmax(-1)
    shares = torch.bincount(picked, minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.015, rtol=0)


def test_top_p_drops_the_tail_and_never_the_head() -> None:
    logits = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    for top_p, kept in ((0.5, {0}), (0.7, {0, 1}), (0.95, {0, 1, 2})):
        noise = GumbelNoise(range(2000), temperature=1.0, top_p=top_p)
        picked = noise(torch.zeros(1), logits.repeat(2000, 1)).argmax(-1)
        assert set(picked.tolist()) == kept


def test_the_photo_stands_before_the_text_as_in_training(tiny: Path, photos: list[Photo]) -> None:
    from trl.data_utils import prepare_multimodal_messages

    image = Image.open(photos[0].path)
    theirs = prepare_multimodal_messages(
        prompt.build_messages("think"),  # type: ignore[arg-type]
        images=[image],
    )
    processor = models.load_processor(str(tiny))
    render = processor.apply_chat_template
    assert render(theirs, tokenize=False) == render(chat_messages("think"), tokenize=False)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(n=3, temperature=1.0, max_tokens=10)])
def test_a_stream_grows_token_by_token_into_what_generate_returns(
    sampling: Sampling, tiny: Path, photos: list[Photo]
) -> None:
    backend = open_tiny(tiny, batch_size=3)
    seen = list(backend.stream(open_photo(photos[0]), photos[0].id, sampling))
    assert seen[-1] == backend.generate(photos[:1], sampling)[0]
    assert [group[0].tokens for group in seen] == list(range(1, 11))


def test_a_stream_that_is_left_ends_its_generation(tiny: Path, photos: list[Photo]) -> None:
    backend, before = open_tiny(tiny), set(threading.enumerate())
    stream = backend.stream(open_photo(photos[0]), "", Sampling(max_tokens=2000))
    next(stream)
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < 2 and set(threading.enumerate()) <= before


def test_an_error_of_a_stream_is_raised_where_it_is_read(tiny: Path, photos: list[Photo]) -> None:
    backend = open_tiny(tiny)
    other = open_photo(photos[0]).resize((50, 50))  # a size that the processor changes
    with pytest.raises(Exception, match="image"):
        next(backend.stream(other, "", GREEDY))
    assert list(backend.stream(open_photo(photos[0]), "", GREEDY))


def test_a_stream_answers_with_and_without_the_adapter(
    tiny: Path, photos: list[Photo], adapters: dict[str, Path]
) -> None:
    backend = open_tiny(tiny, lora=adapters["trained"])
    image = open_photo(photos[0])
    with_it, without = (
        list(backend.stream(image, "", GREEDY, adapter=adapter))[-1] for adapter in (True, False)
    )
    assert with_it == backend.generate(photos[:1], GREEDY)[0] != without
    assert without == open_tiny(tiny).generate(photos[:1], GREEDY)[0]


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trained-looking adapter, and one that was saved before its first step."""
    from peft import get_peft_model

    root = tmp_path_factory.mktemp("adapters")
    model = get_peft_model(
        models.load_model(Model(name=str(tiny)), "cpu"), models.lora_config(Lora(r=4, alpha=8))
    )
    model.save_pretrained(root / "fresh")
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.5)
    model.save_pretrained(root / "trained")
    return {"fresh": root / "fresh", "trained": root / "trained"}


def test_an_adapter_changes_log_probabilities_and_can_be_switched_off(
    tiny: Path, photos: list[Photo], adapters: dict[str, Path]
) -> None:
    answer = ["<answer>{}</answer>"]
    plain = open_tiny(tiny).logprobs(photos[:1], answer)[0]
    backend = open_tiny(tiny, lora=adapters["trained"])
    assert backend.logprobs(photos[:1], answer)[0] != pytest.approx(plain, abs=1e-3)
    off = backend.logprobs(photos[:1], answer, adapter=False)[0]
    assert off == pytest.approx(plain, abs=1e-5)
    assert probe_adapter(backend, photos[0]) > 1e-3


def test_an_adapter_that_changes_nothing_stops_the_run(
    tiny: Path, photos: list[Photo], adapters: dict[str, Path]
) -> None:
    backend = open_tiny(tiny, lora=adapters["fresh"])
    with pytest.raises(UserError, match="changes nothing"):
        probe_adapter(backend, photos[0])


def test_log_probabilities_are_those_of_the_next_token(tiny: Path, photos: list[Photo]) -> None:
    backend = open_tiny(tiny)
    completion = backend.generate(photos[1:2], Sampling(max_tokens=4))[0][0]
    greedy = backend.logprobs(photos[1:2], [completion.text])[0]
    other = backend.logprobs(photos[1:2], ["zzzz"])[0]
    assert sum(greedy) / len(greedy) > sum(other) / len(other)
    assert all(value <= 0 for value in greedy)


def test_a_model_whose_processor_resizes_is_refused(
    tiny: Path, photos: list[Photo], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    shutil.copytree(tiny, small)
    for name in ("processor_config.json", "preprocessor_config.json"):
        text = (small / name).read_text().replace("802816", "4096")
        assert "4096" in text
        (small / name).write_text(text)
    with pytest.raises(UserError, match="visual tokens instead of 15"):
        open_tiny(small).generate(photos[:1], GREEDY)


def test_scripted_answers_follow_their_file(photos: list[Photo], tmp_path: Path) -> None:
    script = tmp_path / "answers.json"
    script.write_text(json.dumps({"0": ["a", "b"], "*": "c"}))
    backend = open_backend(Generation(backend="scripted", script=script), Model(), "think")
    answers = backend.generate(photos[:2], Sampling(n=3))
    assert [[c.text for c in group] for group in answers] == [["a", "b", "a"], ["c", "c", "c"]]


def test_the_random_baseline_is_seeded_by_photo(photos: list[Photo]) -> None:
    backend = open_backend(Generation(backend="scripted", script="random_land"), Model(), "think")
    forward = backend.generate(photos, Sampling(seed=1))
    assert backend.generate(photos[::-1], Sampling(seed=1))[::-1] == forward
    assert backend.generate(photos, Sampling(seed=2)) != forward


def test_a_photo_that_is_gone_or_damaged_is_one_sentence(
    tiny: Path, photos: list[Photo], tmp_path: Path
) -> None:
    backend = open_tiny(tiny)
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(b"text")
    for path, reason in ((tmp_path / "gone.jpg", "No such file"), (cut, "not an image")):
        with pytest.raises(UserError, match=f"{reason}.*prepare_data.py again"):
            backend.generate([Photo("x", path, 0.0, 0.0, "KE")], GREEDY)


class Noisy:
    """A backend whose answers move by chance from one request to the next, as a GPU's may."""

    def __init__(self, noise: float, change: float) -> None:
        self._noise, self._change, self._requests = noise, change, 0

    def generate(self, photos: Sequence[Photo], sampling: Sampling) -> list[list[Completion]]:
        raise AssertionError("the probe generates nothing")

    def logprobs(
        self, photos: Sequence[Photo], texts: Sequence[str], *, adapter: bool = True
    ) -> list[list[float]]:
        self._requests += 1
        return [[-1.0 - self._noise * self._requests - (self._change if adapter else 0.0)]]


def test_chance_is_not_taken_for_an_adapter(photos: list[Photo]) -> None:
    assert probe_adapter(Noisy(noise=0.01, change=0.5), photos[0]) > 0.4
    with pytest.raises(UserError, match="changes nothing"):
        probe_adapter(Noisy(noise=0.01, change=0.0), photos[0])
