"""Loopback stand-ins for an API: a scripted OpenAI-compatible server, and a faulty proxy.

Both record every request that reached them. A rule turns a request into a reply, so that a test
says in one line what goes wrong and when.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    """One request as it arrived.

    `number` counts from 0, header names are in lower case, `at` is a monotonic time in seconds.
    """

    number: int
    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    at: float

    @property
    def body(self) -> Any:
        return json.loads(self.content)


@dataclass(frozen=True)
class Reply:
    """What goes back.

    `length` may promise more bytes than come, `delay` holds the reply back, and `trickle` is a
    pause after each byte.
    """

    content: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    length: int | None = None
    delay: float = 0.0
    trickle: float = 0.0


Rule = Callable[[Request], Reply | None]
"""A request's reply; None closes the connection without one."""

PAGE = Reply(
    b"<!DOCTYPE html><html><body><h1>Sign in to continue</h1></body></html>",
    headers={"Content-Type": "text/html; charset=utf-8"},
)
"""What a proxy says in a server's place, with status 200."""


def as_json(value: Any, status: int = 200, *, delay: float = 0.0, **headers: str) -> Reply:
    """A JSON reply; header names are written with underscores."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    content_type = {"Content-Type": "application/json"}
    return Reply(json.dumps(value).encode(), status, content_type | named, delay=delay)


def chat(
    text: str | None,
    finish_reason: str | None = "stop",
    *,
    usage: Any = (120, 7),
    delay: float = 0.0,
    **message: Any,
) -> Reply:
    """A chat completion; `usage` is (prompt tokens, completion tokens), or what stands there."""
    if isinstance(usage, tuple):
        usage = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    said = {"role": "assistant", "content": text, **message}
    choice = {"index": 0, "message": said, "finish_reason": finish_reason}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return as_json({**body, "choices": [choice], "usage": usage}, delay=delay)


def error(status: int, message: str, code: str | None = None, **headers: str) -> Reply:
    """An error as OpenAI's API words it."""
    return as_json({"error": {"message": message, "type": "t", "code": code}}, status, **headers)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 resets connections that come at once


class ApiServer:
    """A server on a free loopback port that replies by a rule; use it in a `with` block.

    Attributes:
        rule: May be exchanged while the server runs.
        requests: What arrived so far, in order.
        most_at_once: The largest number of requests that were being answered at one time.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.requests: list[Request] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or each reply waits 40 ms for an acknowledgement

            def _answer(self) -> None:
                server._answer(self)

            do_GET = do_POST = _answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = _HttpServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        """The value for OPENAI_BASE_URL."""
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        headers = {name.lower(): text for name, text in handler.headers.items()}
        with self._lock:
            request = Request(
                len(self.requests), handler.command, handler.path, headers, content,
                time.monotonic(),
            )  # fmt: skip
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            reply = self.rule(request)
            if reply is not None and reply.delay:
                time.sleep(reply.delay)
        finally:
            with self._lock:
                self._at_once -= 1
        if reply is None:
            handler.close_connection = True
            return
        # The client of a reply that came too late is gone.
        with suppress(ConnectionError):
            handler.send_response(reply.status)
            for name, value in reply.headers.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(reply.length or len(reply.content)))
            handler.end_headers()
            step = 1 if reply.trickle else len(reply.content) or 1
            for start in range(0, len(reply.content), step):
                handler.wfile.write(reply.content[start : start + step])
                time.sleep(reply.trickle)
        handler.close_connection = reply.length is not None


def proxy(upstream: str, interfere: Rule) -> ApiServer:
    """A server that passes requests on to another one's base URL, unless `interfere` replies."""
    target = urlsplit(upstream)

    def pass_on(request: Request) -> Reply | None:
        if (reply := interfere(request)) is not None:
            return reply
        dropped = ("host", "connection", "content-length", "accept-encoding")
        kept = {name: text for name, text in request.headers.items() if name not in dropped}
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        try:
            connection.request(request.method, request.path, request.content, kept)
            answer = connection.getresponse()
            content_type = answer.headers.get("Content-Type", "application/json")
            return Reply(answer.read(), answer.status, {"Content-Type": content_type})
        except (OSError, http.client.HTTPException):
            return Reply(b"bad gateway", 502, {"Content-Type": "text/plain"})
        finally:
            connection.close()

    return ApiServer(pass_on)


def now_and_then(share: float, reply: Reply, seed: int = 0) -> Rule:
    """Interferes with a share of the requests, drawn by number so that it is the same each time."""

    def interfere(request: Request) -> Reply | None:
        drawn = random.Random(f"{seed}:{request.number}").random() < share
        return reply if drawn else None

    return interfere
