"""A Hub on the loopback: one dataset repository at one commit, a request log, faults at will.

It answers what the Hub's client and `geoguessr_rl.hub` ask for, with the headers of the real one,
as far as a download needs them. Used as a context manager:

    with HubServer({"images/00.zip": content}) as server:
        server.drop_after = [1000]
        subprocess.run(command, env=server.environment(cache))
        assert server.offsets("images/00.zip") == [0, 1000]
"""

import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

BLOCK = 1 << 16


@dataclass
class Request:
    """One request as it was answered."""

    origin: str  # "hub" or "cdn"
    method: str
    path: str
    start: int | None  # of the range that was asked for
    authorized: bool
    sent: int = 0  # bytes of the body that were written to the socket
    status: int = 0


@dataclass
class Answer:
    """A status that stands in for the right answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)


class HubServer:
    """Serves `files` of a dataset repository; every fault is an attribute that a test sets.

    Attributes:
        repo: Its name.
        commit: Its only commit.
        branch: The name that leads to that commit.
        files: Content by path; changing it is seen by the next request.
        in_git: Paths that git itself holds (their ETag is git's SHA-1); others are large files.
        log: Requests in the order in which they came.
        drop_after: Bytes of the body after which the next GETs are cut, one entry a GET; None in
            it lets one pass.
        drop_always: Bytes after which every GET is cut when `drop_after` is used up.
        without_length: Whether bodies end with their connection, so that a cut looks like the end.
        reset: Whether a cut is a reset, which also loses what is under way, or an early end.
        stall_after: Bytes after which a GET waits for `go_on`.
        go_on: Lets stalled GETs continue.
        seconds_a_block: Pause after every 64 KB.
        answers: Statuses for the next requests by kind ("HEAD", "GET", "API", "CDN"); None lets one
            pass.
        always: A status for every request by kind.
        ignore_range: Whether a ranged GET is answered with the whole file.
        shift_range: Bytes by which a ranged answer is off, in header and body.
        content: What GETs send in place of a file's right bytes.
        claimed_size: What is said to be a file's size.
        claimed_headers: Headers of a resolve answer that are replaced, or dropped when None.
        through_cdn: Whether large files are sent by another origin, as the Hub does.
        xet: Whether large files are said to be in Xet storage.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        repo: str = "owner/photos",
        commit: str = "c0ffee" + "0" * 34,
        branch: str = "main",
        in_git: Collection[str] = (),
    ) -> None:
        self.repo, self.commit, self.branch = repo, commit, branch
        self.files = dict(files)
        self.in_git = set(in_git)
        self.log: list[Request] = []
        self.drop_after: list[int | None] = []
        self.drop_always: int | None = None
        self.without_length = False
        self.reset = False
        self.stall_after: int | None = None
        self.go_on = threading.Event()
        self.seconds_a_block = 0.0
        self.answers: dict[str, list[Answer | None]] = {}
        self.always: dict[str, Answer] = {}
        self.ignore_range = False
        self.shift_range = 0
        self.content: dict[str, bytes] = {}
        self.claimed_size: dict[str, int] = {}
        self.claimed_headers: dict[str, str | None] = {}
        self.through_cdn = False
        self.xet = False
        self._servers = {name: _Listener(self, name) for name in ("hub", "cdn")}

    def __enter__(self) -> Self:
        for server in self._servers.values():
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.go_on.set()
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers['hub'].server_port}"

    @property
    def cdn(self) -> str:
        # Another host name: the client takes two ports of one host for one origin.
        return f"http://localhost:{self._servers['cdn'].server_port}"

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """The environment of a process that has this Hub, an own cache and no token."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return kept | {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache / "home"),
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "*",
            "no_proxy": "*",
            **more,
        }

    def checksum(self, path: str) -> str:
        """The ETag of a file."""
        content = self.files[path]
        if path in self.in_git:
            return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return hashlib.sha256(content).hexdigest()

    def gets(self, path: str) -> list[Request]:
        """The GETs of a file that were answered with a body."""
        return [
            request
            for request in self.log
            if request.method == "GET"
            and request.path.endswith("/" + path)
            and request.status in (200, 206)
        ]

    def offsets(self, path: str) -> list[int]:
        """Where each of them began."""
        return [request.start or 0 for request in self.gets(path)]

    def sent(self, path: str) -> int:
        """How many bytes of a file went out in all."""
        return sum(request.sent for request in self.gets(path))


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    # Closing does not wait for handlers that hold an idle connection open.
    block_on_close = False

    def __init__(self, hub: HubServer, origin: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.origin = origin

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def log_message(self, format: str, *args: object) -> None:
        """The log is `HubServer.log`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        ranged = self.headers.get("Range")
        start = int(ranged.removeprefix("bytes=").split("-")[0]) if ranged else None
        self.entry = Request(
            self.server.origin, self.command, path, start, "Authorization" in self.headers
        )
        hub.log.append(self.entry)
        kind = "API" if path.startswith("/api/") else self.command
        if self.server.origin == "cdn":
            kind = "CDN"
        queue = hub.answers.get(kind)
        stand_in = queue.pop(0) if queue else hub.always.get(kind)
        if stand_in is not None:
            self._send(stand_in.status, stand_in.headers)
        elif self.server.origin == "cdn":
            self._send_file(path.removeprefix("/"), {})
        elif path.startswith("/api/datasets/"):
            self._answer_api(path.removeprefix("/api/datasets/"))
        else:
            self._answer_resolve(path.removeprefix("/datasets/"))

    def _known(self, repo: str, revision: str) -> bool:
        hub = self.server.hub
        if repo != hub.repo:
            self._send(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in (hub.branch, hub.commit):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _answer_api(self, rest: str) -> None:
        hub = self.server.hub
        owner, name, kind, revision = [*rest.split("/", 3), "revision", hub.branch][:4]
        if not self._known(f"{owner}/{name}", revision):
            return
        value: Any
        if kind == "tree":
            value = []
            for path, content in hub.files.items():
                entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
                entry["oid"] = hub.checksum(path)[:40]
                if path not in hub.in_git:
                    size = len(content)
                    entry["lfs"] = {"oid": hub.checksum(path), "size": size, "pointerSize": 130}
                value.append(entry)
        else:
            siblings = [{"rfilename": path} for path in hub.files]
            value = {"id": hub.repo, "sha": hub.commit, "siblings": siblings}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _answer_resolve(self, rest: str) -> None:
        hub = self.server.hub
        owner, name, verb, revision, path = [*rest.split("/", 4), "", "", ""][:5]
        if verb != "resolve" or not self._known(f"{owner}/{name}", revision):
            if verb != "resolve":
                self._send(404, {})
            return
        if path not in hub.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit}
            self._send(404, headers)
            return
        headers = {"X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
        etag = f'"{hub.checksum(path)}"'
        if path in hub.in_git:
            headers["ETag"] = etag
        else:
            size = hub.claimed_size.get(path, len(hub.files[path]))
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(size), "ETag": '"cdn-etag"'}
            if hub.xet:
                headers["X-Xet-Hash"] = hub.checksum(path)
                headers["X-Xet-Refresh-Route"] = f"{hub.endpoint}/api/xet-token"
        for key, claimed in hub.claimed_headers.items():
            headers.pop(key, None)
            if claimed is not None:
                headers[key] = claimed
        if hub.through_cdn and path not in hub.in_git:
            self._send(302, headers | {"Location": f"{hub.cdn}/{path}?signature=1"})
        else:
            self._send_file(path, headers)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.entry.status = status
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.entry.sent = len(body)

    def _send_file(self, path: str, headers: Mapping[str, str]) -> None:
        hub = self.server.hub
        if path not in hub.files:
            self._send(404, {})
            return
        whole = memoryview(hub.content.get(path, hub.files[path]))
        start = self.entry.start
        if start is not None and not hub.ignore_range:
            if start >= len(whole):
                self._send(416, {"Content-Range": f"bytes */{len(whole)}"})
                return
            first = start + hub.shift_range
            body = whole[first:]
            status = 206
            last = f"bytes {first}-{len(whole) - 1}/{len(whole)}"
            headers = {**headers, "Content-Range": last}
        else:
            body, status = whole, 200
        self.entry.status = status
        self.send_response(status)
        if hub.without_length and self.command == "GET":
            headers = {**headers, "Connection": "close"}
        else:
            headers = {**headers, "Content-Length": str(len(body))}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self._send_body(body)

    def _send_body(self, body: memoryview) -> None:
        hub = self.server.hub
        cut = hub.drop_after.pop(0) if hub.drop_after else hub.drop_always
        end = len(body) if cut is None else min(cut, len(body))
        stall, hub.stall_after = hub.stall_after, None
        while self.entry.sent < end:
            if stall is not None and self.entry.sent >= stall:
                hub.go_on.wait(30)
                stall = None
            upto = min(self.entry.sent + BLOCK, end)
            if stall is not None and self.entry.sent < stall:
                upto = min(upto, stall)
            self.wfile.write(body[self.entry.sent : upto])
            self.entry.sent = upto
            if hub.seconds_a_block:
                time.sleep(hub.seconds_a_block)
        if end < len(body):
            if hub.reset:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
