"""Any server that speaks OpenAI's chat completions as a backend: a hosted model, or vLLM's own.

A transport failure is never an answer: an error page, a timeout or half a reply is asked for again,
and in the end recorded as `error`, so that no score is made of it. A refusal or a cut answer is the
model's word and is kept. Nothing is sent to any host but the one that OPENAI_BASE_URL names.

What this file does not cover: what an answer costs, and what to do about missing ones (the
caller's work, which can ask again for those alone).
"""

import asyncio
import base64
import json
import math
import mimetypes
import os
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from geoguessr_rl.artifacts import UserError, seed_for
from geoguessr_rl.backends import chat_messages, open_photo
from geoguessr_rl.config import Generation, Model
from geoguessr_rl.prompt import PromptStyle
from geoguessr_rl.records import Completion, FinishReason, Photo, Sampling

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

BACKOFF_SECONDS = 0.5
"""Wait before the second try; it doubles with each further one, up to `LONGEST_BACKOFF_SECONDS`."""
LONGEST_BACKOFF_SECONDS = 30.0
LONGEST_RETRY_AFTER_SECONDS = 120.0
"""A server that asks for a longer pause is tried again after this one all the same."""
CONNECT_SECONDS = 10.0
DEAD_AFTER = 8
"""Requests in a row that used up their tries, after which nothing more is sent."""

RETRIED_4XX = (408, 409, 425, 429)
REFUSAL_CODES = ("content_filter", "content_policy_violation")
"""Codes of a status 400 that is about this photo and not about the request: a refusal."""
UNFINISHED = ("error", "abort")
"""Finish reasons of an answer that the server broke off (OpenRouter's and vLLM's words)."""

FAILED = Completion("", 0, "error")

_jitter = random.Random()  # not the global generator, which others seed


class _TransportError(Exception):
    """One try brought no answer; `pause` is how many seconds the server asked to wait."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class OpenAIBackend:
    """A client of one server, with its own retries and pacing.

    Attributes:
        last_failure: The latest transport failure in words, for a message that says what is
            missing; None while there was none.
    """

    def __init__(self, generation: Generation, model: Model, style: PromptStyle) -> None:
        """Reads where the server is; raises UserError when nobody said, or without the package."""
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"the openai backend needs the openai package ({error}); install it with "
                "uv pip install -e '.[api]'"
            ) from None
        self._base_url = os.environ.get("OPENAI_BASE_URL", "").strip()
        if urlsplit(self._base_url).scheme not in ("http", "https"):
            raise UserError(
                f"OPENAI_BASE_URL is {self._base_url!r} and must be the server's address; set it, "
                "for example to http://127.0.0.1:8000/v1"
            )
        # A server of one's own asks for no key, and the client insists on one.
        self._key = os.environ.get("OPENAI_API_KEY", "").strip() or "EMPTY"
        self._api = generation.api
        self._model = server_model(model)
        self._style = style
        self._next_start = 0.0
        self._failed_in_a_row = 0
        self.last_failure: str | None = None

    def generate(self, photos: Sequence[Photo], sampling: Sampling) -> list[list[Completion]]:
        """Returns `sampling.n` completions a photo; those without an answer read `error`.

        Raises:
            UserError: A photo's file is gone or damaged, or the server refuses what every request
                has in common: the key, the model's name, an image, a setting.
        """
        for photo in photos:  # before a request is paid for
            open_photo(photo)
        return asyncio.run(self._generate(photos, sampling))

    def logprobs(
        self, photos: Sequence[Photo], texts: Sequence[str], *, adapter: bool = True
    ) -> list[list[float]]:
        """Raises UserError: servers give log-probabilities of their own answers alone."""
        raise UserError("the openai backend has no log-probabilities; choose another backend")

    async def _generate(
        self, photos: Sequence[Photo], sampling: Sampling
    ) -> list[list[Completion]]:
        """Answers all photos, `concurrency` requests at a time."""
        from openai import AsyncOpenAI, Timeout

        answers = [[FAILED] * sampling.n for _ in photos]
        jobs = ((i, k) for i in range(len(photos)) for k in range(sampling.n))

        async def work(client: AsyncOpenAI) -> None:
            for i, k in jobs:
                answers[i][k] = await self._answer(client, photos[i], k, sampling)

        seconds = self._api.timeout_seconds
        async with AsyncOpenAI(
            base_url=self._base_url,
            api_key=self._key,
            max_retries=0,
            timeout=Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
        ) as client:
            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(self._api.concurrency):
                        workers.create_task(work(client))
            except BaseExceptionGroup as group:  # the first one stopped the others
                raise group.exceptions[0] from None
        return answers

    async def _answer(
        self, client: "AsyncOpenAI", photo: Photo, sample: int, sampling: Sampling
    ) -> Completion:
        """Tries one request until there is an answer or the tries are used up."""
        request = self._request(photo, sample, sampling)
        for attempt in range(self._api.tries):
            if self._failed_in_a_row >= DEAD_AFTER:
                return FAILED
            await self._wait_for_turn()
            try:
                completion = await self._try(client, request)
            except _TransportError as error:
                self.last_failure = str(error)
                if attempt + 1 < self._api.tries:
                    await asyncio.sleep(max(backoff(attempt), error.pause))
            else:
                self._failed_in_a_row = 0
                return completion
        self._failed_in_a_row += 1
        return FAILED

    def _request(self, photo: Photo, sample: int, sampling: Sampling) -> dict[str, Any]:
        """Returns the arguments of one chat completion, the photo's own bytes included."""
        kind = mimetypes.guess_type(photo.path.name)[0] or "image/jpeg"
        data = base64.b64encode(photo.path.read_bytes()).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        messages = chat_messages(self._style)
        for message in messages:
            message["content"] = [
                image if block["type"] == "image" else block for block in message["content"]
            ]
        # One request a sample, each with its own seed: servers differ in what `n` does.
        key = photo.id if sampling.n == 1 else f"{photo.id}:{sample}"
        return {
            "model": self._model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature > 0 else 1.0,
            "max_tokens": sampling.max_tokens,
            "seed": seed_for(sampling.seed, key),
        }

    async def _wait_for_turn(self) -> None:
        """Spaces the starts of all tries evenly over the minute."""
        if self._api.requests_per_minute is None:
            return
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60 / self._api.requests_per_minute
        await asyncio.sleep(start - now)

    async def _try(self, client: "AsyncOpenAI", request: dict[str, Any]) -> Completion:
        """Sends one request; raises _TransportError or UserError when there is no answer."""
        import openai

        try:
            # The client's timeout is for each read: a server that trickles would never meet it.
            async with asyncio.timeout(self._api.timeout_seconds):
                raw = await client.chat.completions.with_raw_response.create(**request)
        except (openai.APITimeoutError, TimeoutError):
            raise _TransportError(f"no answer in {self._api.timeout_seconds:g} s") from None
        except openai.APIConnectionError as error:
            raise _TransportError(f"no connection ({error.__cause__ or error})") from None
        except openai.APIStatusError as error:
            if error.status_code == 400 and error.code in REFUSAL_CODES:
                return Completion("", 0, "refusal")
            if 400 <= error.status_code < 500 and error.status_code not in RETRIED_4XX:
                raise self._refusal(error) from None
            pause = retry_after(error.response.headers.get("retry-after"))
            raise _TransportError(f"status {error.status_code}", pause) from None
        try:
            return read_completion(json.loads(raw.http_response.content))
        except ValueError as error:
            kind = raw.headers.get("content-type", "no content type")
            raise _TransportError(f"no chat completion but {kind} ({error})") from None

    def _refusal(self, error: "APIStatusError") -> UserError:
        """Turns a status that every request would get into a sentence."""
        address = urlsplit(self._base_url)
        place = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
        remedies = {
            401: "check OPENAI_API_KEY",
            403: "check that OPENAI_API_KEY may use this model",
            404: "check --model or OPENAI_MODEL, and OPENAI_BASE_URL",
        }
        remedy = remedies.get(
            error.status_code, "check that the model takes images, and the generation settings"
        )
        words = said(error.body, error.response.text).replace(self._key, "(key)")
        return UserError(
            f"{place} refuses {self._model!r} with status {error.status_code} ({words}); {remedy}"
        )


def server_model(model: Model) -> str:
    """Returns the model's name as the server knows it: OPENAI_MODEL, else the config's."""
    return os.environ.get("OPENAI_MODEL", "").strip() or model.name


def backoff(attempt: int) -> float:
    """Returns the seconds to wait after a failed try, with jitter so that clients spread out."""
    seconds = min(BACKOFF_SECONDS * 2.0 ** min(attempt, 16), LONGEST_BACKOFF_SECONDS)
    return seconds * _jitter.uniform(0.5, 1.0)


def retry_after(header: str | None) -> float:
    """Reads a Retry-After header, seconds or a date, as seconds; 0 where it says nothing."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_RETRY_AFTER_SECONDS)


def read_completion(body: Any) -> Completion:
    """Reads a chat completion's JSON; tokens are counted as words where no usage is given.

    Raises:
        ValueError: It is JSON of another shape, or of an answer that the server broke off.
    """
    try:
        choice = body["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        if not message:
            raise TypeError
        # The content is null or left out in a refusal, and where the cut came while reasoning.
        text = message["content"] if message.get("content") is not None else message.get("refusal")
        usage = dict(body.get("usage") or {})
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ValueError(f"JSON of another shape: {said(body, str(body))}") from None
    if not isinstance(finish, str) or finish in UNFINISHED:
        raise ValueError(f"an answer that ended with {finish!r}")
    if not isinstance(text, str | None):
        raise ValueError("an answer that is no text")
    text = text or ""
    tokens, prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
    refused = finish == "content_filter" or bool(message.get("refusal"))
    reason: FinishReason = "refusal" if refused else "length" if finish == "length" else "stop"
    return Completion(
        text,
        tokens if isinstance(tokens, int) else len(text.split()),
        reason,
        prompt_tokens if isinstance(prompt_tokens, int) else None,
    )


def said(body: Any, otherwise: str) -> str:
    """Returns a server's own words on a failure, on one line and short."""
    words: Any = body
    for key in ("error", "message"):
        if isinstance(words, dict):
            words = words.get(key, words)
    line = " ".join((words if isinstance(words, str) else otherwise).split())
    return (line if len(line) <= 160 else f"{line[:160]}…") or "no reason given"
