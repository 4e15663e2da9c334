"""A Hub on the loopback that takes pushes: model repositories with a history, and faults at will.

It answers what the Hub's client asks for when it creates, uploads, commits, lists and downloads,
with the headers of the real one as far as these need them. Used as a context manager:

    with UploadServer() as server:
        server.faults["commit"] = [500, "lose"]
        subprocess.run(command, env=server.environment(cache))
        assert server.history("me/model") == [{".gitattributes"}, {...}]
"""

import base64
import hashlib
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from hub_server import HubServer

TOKEN = "hf_" + "Secret" * 6
LARGE = (".safetensors", ".jpg")  # kept as objects; git itself holds the others
INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
Fault = int | str | None


@dataclass
class Repo:
    """One model repository: every state that main ever had, oldest first."""

    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [dict(INITIAL)])

    @property
    def sha(self) -> str:
        return f"{len(self.commits):040x}"

    @property
    def main(self) -> dict[str, bytes]:
        return self.commits[-1]


class UploadServer:
    """Keeps repositories and objects; every fault is an attribute that a test sets.

    Attributes:
        user: Whose token `TOKEN` is.
        orgs: Role by organisation.
        read_only: Repositories in which the token may not write.
        repos: By name.
        objects: Content by SHA-256, as it arrived.
        log: (route, status) of each request, in the order in which they came.
        faults: By route ("whoami", "create", "info", "auth", "validate", "preupload", "batch",
            "put", "verify", "commit", "resolve"), what happens to the next requests: a status,
            "drop" (the connection ends before anything is done), "lose" (the work is done and its
            answer lost), "reset" (the connection is reset halfway through the body), "hang" (it
            falls silent), or None.
        stall: Objects that may arrive before every further PUT waits for ever; None for no wait.
        stalled: Set when one waits.
        spoil: A file that every commit damages.
        tells_checksums: Whether the client is told, when it asks how to upload, what main holds;
            then it leaves out of a commit what is there already.
    """

    def __init__(self) -> None:
        self.user = "me"
        self.orgs = {"team": "write", "readers": "read"}
        self.read_only: set[str] = set()
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, int]] = []
        self.faults: dict[str, list[Fault]] = {}
        self.stall: int | None = None
        self.stalled = threading.Event()
        self.spoil = ""
        self.tells_checksums = True
        self._end = threading.Event()
        self.lock = threading.Lock()
        self._http = _Listener(("127.0.0.1", 0), _Handler)
        self._http.hub = self

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def storage(self) -> str:
        """Where objects go: another host name, as on the Hub."""
        return f"http://localhost:{self._http.server_port}"

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """The environment of a process that has this Hub, an own cache and the token."""
        settings = {"HF_TOKEN": TOKEN, **more}
        return HubServer.environment(self, cache, **settings)  # type: ignore[arg-type]

    def history(self, repo: str) -> list[set[str]]:
        """The names of the files in every state of main."""
        return [set(state) for state in self.repos[repo].commits]

    def count(self, route: str) -> Counter[int]:
        """How often a route was answered with each status; 0 stands for a lost connection."""
        return Counter(status for name, status in self.log if name == route)

    def wait(self) -> None:
        """Holds a request until the server ends."""
        self.stalled.set()
        self._end.wait(60)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: UploadServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def log_message(self, format: str, *args: object) -> None:
        """The log is `UploadServer.log`."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        hub = self.server.hub
        address = urlsplit(self.path)
        self.query = parse_qs(address.query)
        route, parts = _route(self.command, unquote(address.path).strip("/").split("/"))
        self.route = route
        queue = hub.faults.get(route, [])
        fault = queue.pop(0) if queue else None
        if fault == "reset":
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
        if fault in ("drop", "reset"):
            self._break(reset=fault == "reset")
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if isinstance(fault, int):
            said = "the server's own words"
            self._send(fault, {"error": said}, {"X-Error-Message": said, "Retry-After": "0"})
            return
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not known and (route in ("whoami", "create") or route not in OPEN):
            self._send(401, {"error": "Invalid credentials in Authorization header"})
            return
        if fault == "hang":
            hub.log.append((route, 0))
            hub.wait()
            return
        self.lose = fault == "lose"
        getattr(self, f"_{route}")(hub, parts, body)

    def _break(self, *, reset: bool) -> None:
        self.server.hub.log.append((self.route, 0))
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True

    def _send(
        self, status: int, value: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        if getattr(self, "lose", False):
            self.lose = False
            self._break(reset=False)
            return
        self.server.hub.log.append((self.route, status))
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in ({"Content-Length": str(len(body))} | dict(headers or {})).items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _repo(self, name: str) -> Repo | None:
        """The repository, or None after saying that there is none that the token can see."""
        repo = self.server.hub.repos.get(name)
        if repo is None:
            self._send(404, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        return repo

    def _may_write(self, name: str) -> bool:
        hub = self.server.hub
        owner = name.partition("/")[0]
        own = owner == hub.user or hub.orgs.get(owner) in ("write", "admin", "contributor")
        if own and name not in hub.read_only:
            return True
        said = "You have no write access"
        self._send(403, {"error": said}, {"X-Error-Message": said})
        return False

    def _whoami(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        orgs = [{"name": name, "roleInOrg": role} for name, role in hub.orgs.items()]
        self._send(200, {"name": hub.user, "orgs": orgs})

    def _create(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if self._may_write(name):
            there = name in hub.repos
            hub.repos.setdefault(name, Repo(asked.get("visibility") == "private"))
            self._send(409 if there else 200, {"url": f"{hub.endpoint}/{name}"})

    def _auth(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        if self._repo("/".join(parts)) and self._may_write("/".join(parts)):
            self._send(200, {})

    def _info(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        name = "/".join(parts)
        if (repo := self._repo(name)) is None:
            return
        siblings = [{"rfilename": path, **_described(path, repo.main[path])} for path in repo.main]
        card = _front_matter(repo.main.get("README.md", b""))
        value = {"id": name, "sha": repo.sha, "private": repo.private, "siblings": siblings}
        self._send(200, value | {"cardData": card, "tags": []})

    def _tree(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        owner, name, *folder = parts
        if (repo := self._repo(f"{owner}/{name}")) is None:
            return
        files = []
        for path, content in repo.main.items():
            if path.startswith("/".join([*folder, ""])):
                file = _described(path, content)
                if lfs := file.get("lfs"):
                    file["lfs"] = lfs | {"oid": lfs["sha256"]}
                files.append({"type": "file", "path": path, "oid": file["blobId"], **file})
        if files:
            self._send(200, files)
        else:
            self._send(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})

    def _validate(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        try:
            assert isinstance(_front_matter(json.loads(body)["content"].encode()), dict)
        except (yaml.YAMLError, AssertionError) as error:
            self._send(400, {"errors": [{"message": str(error)}]})
        else:
            self._send(200, {"warnings": [], "errors": []})

    def _preupload(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        if (repo := self._repo("/".join(parts))) is None or not self._may_write("/".join(parts)):
            return
        files = []
        for file in json.loads(body)["files"]:
            path, there = file["path"], repo.main.get(file["path"])
            entry = {"path": path, "shouldIgnore": False}
            entry["uploadMode"] = "lfs" if path.endswith(LARGE) else "regular"
            if there is not None and hub.tells_checksums:
                described = _described(path, there)
                entry["oid"] = described.get("lfs", {}).get("sha256") or described["blobId"]
            files.append(entry)
        self._send(200, {"files": files})

    def _batch(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            actions = {
                "upload": {"href": f"{hub.storage}/objects/{asked['oid']}?signature=1"},
                "verify": {"href": f"{hub.endpoint}/objects/{asked['oid']}/verify"},
            }
            there = asked["oid"] in hub.objects
            objects.append({**asked} if there else {**asked, "actions": actions})
        self._send(200, {"objects": objects, "transfer": "basic"})

    def _put(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == parts[0]
        with hub.lock:
            held = hub.stall is not None and len(hub.objects) >= hub.stall
            if not held:
                hub.objects[parts[0]] = body
        if held:
            hub.wait()
        else:
            self._send(200, {})

    def _verify(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        there = hub.objects.get(parts[0])
        fits = there is not None and len(there) == json.loads(body)["size"]
        self._send(200 if fits else 422, {})

    def _commit(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        name = "/".join(parts)
        if (repo := self._repo(name)) is None or not self._may_write(name):
            return
        state = dict(repo.main)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header" and value.get("parentCommit", repo.sha) != repo.sha:
                self._send(412, {"error": "no"}, {"X-Error-Message": "main has moved on"})
                return
            if item["key"] == "file":
                state[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                state[value["path"]] = hub.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del state[value["path"]]
        if hub.spoil in state:
            state[hub.spoil] += b" "
        repo.commits.append(state)
        answer = {"commitUrl": f"{hub.endpoint}/{name}/commit/{repo.sha}", "commitOid": repo.sha}
        self._send(200, answer)

    def _resolve(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        owner, name, path = parts[0], parts[1], "/".join(parts[2:])
        if (repo := self._repo(f"{owner}/{name}")) is None:
            return
        if path not in repo.main:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.sha}
            self._send(404, {"error": "no"}, headers)
            return
        described = _described(path, repo.main[path])
        etag = described.get("lfs", {}).get("sha256") or described["blobId"]
        self._send(200, repo.main[path], {"X-Repo-Commit": repo.sha, "ETag": f'"{etag}"'})

    def _other(self, hub: UploadServer, parts: list[str], body: bytes) -> None:
        self._send(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})


OPEN = ("validate", "put", "other")  # what needs no token


def _route(method: str, parts: list[str]) -> tuple[str, list[str]]:
    """Which of the Hub's routes a path is, and the names in it."""
    match parts:
        case ["api", "whoami-v2"]:
            return "whoami", []
        case ["api", "validate-yaml"]:
            return "validate", []
        case ["api", "repos", "create"]:
            return "create", []
        case ["api", "models", owner, name, "auth-check", "write"]:
            return "auth", [owner, name]
        case ["api", "models", owner, name, ("preupload" | "commit") as verb, "main"]:
            return verb, [owner, name]
        case ["api", "models", owner, name, "tree", _, *folder]:
            return "tree", [owner, name, *folder]
        case ["api", "models", owner, name] | ["api", "models", owner, name, "revision", _]:
            return "info", [owner, name]
        case [owner, name, "info", "lfs", "objects", "batch"]:
            return "batch", [owner, name.removesuffix(".git")]
        case ["objects", oid, "verify"]:
            return "verify", [oid]
        case ["objects", oid] if method == "PUT":
            return "put", [oid]
        case [owner, name, "resolve", _, *path]:
            return "resolve", [owner, name, *path]
    return "other", []


def _described(path: str, content: bytes) -> dict[str, Any]:
    """A file's size and checksums, as the Hub lists them."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    described: dict[str, Any] = {"size": len(content), "blobId": blob}
    if path.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
    return described


def _front_matter(readme: bytes) -> dict[str, Any] | None:
    """A card's metadata."""
    head = readme.decode().split("---\n")
    return yaml.safe_load(head[1]) if len(head) > 2 else None
