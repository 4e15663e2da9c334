"""Pushes to a Hub on the loopback, with the real client: main is whole after every fault."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_upload_server import INITIAL, TOKEN, Repo, UploadServer

from geoguessr_rl import upload

ROOT = Path(__file__).parents[1]
REPO = "me/model"
CARD = b"---\ntags:\n- geoguessr-rl\n---\n\n# A card\n"
FILES = {
    "README.md": CARD,
    "config.json": b'{"a": "/no/such/path"}',
    "model-1.safetensors": random.Random(1).randbytes(300_000),
    "model-2.safetensors": random.Random(2).randbytes(300_000),
    "examples/1.jpg": random.Random(3).randbytes(5_000),
}
PROCESS = """
import sys
from pathlib import Path
from geoguessr_rl import config, hub, upload
hub.BACKOFF_SECONDS, upload.SILENCE_SECONDS = 0.01, 1
repo, private, folder = sys.argv[1], sys.argv[2] == "private", Path(sys.argv[3])
files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
def main():
    upload.check_access(repo, private=private)
    print(upload.push(repo, files, "A model"))
config.run_script(main)
"""


@pytest.fixture
def server() -> Iterator[UploadServer]:
    with UploadServer() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "files"


def start(server: UploadServer, folder: Path, repo: str, visibility: str, **more: str) -> Any:
    command = [sys.executable, "-c", PROCESS, repo, visibility, str(folder)]
    environment = server.environment(folder.parent / "cache", **more)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT)


def push(
    server: UploadServer, folder: Path, repo: str = REPO, visibility: str = "private", **more: str
) -> tuple[int, str, str]:
    """Pushes a folder; the token is in nothing that the process says."""
    with start(server, folder, repo, visibility, **more) as process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()  # a failed test does not wait for it
    assert TOKEN not in out + err
    return process.returncode, out, err


def whole(server: UploadServer, repo: str = REPO) -> None:
    """Main held nothing, then everything, and never anything else."""
    assert server.repos[repo].commits == [INITIAL, INITIAL | FILES]


def test_all_files_arrive_in_one_commit_in_a_private_repository(
    server: UploadServer, folder: Path
) -> None:
    code, out, err = push(server, folder)
    assert code == 0, err
    assert out == f"{server.endpoint}/me/model (private)\n"
    assert server.repos[REPO].private
    whole(server)
    routes = [route for route, _ in server.log]
    assert max(i for i, route in enumerate(routes) if route == "put") < routes.index("commit")


def test_an_organisation_that_one_may_write_to_is_a_namespace_of_ones_own(
    server: UploadServer, folder: Path
) -> None:
    code, out, err = push(server, folder, "team/model", "public")
    assert code == 0 and out.endswith("(public)\n"), err
    whole(server, "team/model")


def hold(server: UploadServer, files: dict[str, bytes] | None = None, **flags: Any) -> None:
    server.repos[REPO] = Repo(flags.pop("private", True), [INITIAL | (files or {})])
    for name, value in flags.items():
        setattr(server, name, value)


REFUSALS: dict[str, tuple[Callable[[UploadServer], Any], str, str]] = {
    "a token that the Hub does not know": (
        lambda s: s.faults.update(whoami=[401]), REPO, r"does not accept your token .*status 401",
    ),
    "a name without an owner": (lambda s: None, "model", "give it as owner/name"),
    "a name that cannot be": (lambda s: None, "me/a b", "'me/a b' cannot be the name"),
    "a stranger's namespace": (
        lambda s: None, "other/model", r"may write as me, team; set repo_id to me/model",
    ),
    "an organisation that one only reads": (lambda s: None, "readers/m", "may write as me, team"),
    "a token that may not create": (
        lambda s: setattr(s, "read_only", {REPO}), REPO, r"may not write to me/model \(status 403",
    ),
    "a repository that one only reads": (
        lambda s: hold(s, read_only={REPO}), REPO,
        r"may not write to me/model \(status 403 at write access: You have no write access\)",
    ),
    "a public repository for a private push": (
        lambda s: hold(s, private=False), REPO, "me/model is public, and this push is private",
    ),
    "somebody's own files": (
        lambda s: hold(s, {"thesis.pdf": b"x"}), REPO, r"holds files .*\(thesis.pdf\)",
    ),
    "a card of somebody else": (
        lambda s: hold(s, {"README.md": b"---\ntags:\n- other\n---\n"}), REPO, "holds files",
    ),
    "a token that may no longer write": (
        lambda s: s.faults.update(commit=[403]), REPO,
        r"may not write .*status 403 at the push: the server's own words\)",
    ),
    "a token that expires": (lambda s: s.faults.update(preupload=[401]), REPO, "status 401 at the"),
    "a repository that is deleted": (
        lambda s: s.faults.update(commit=[404]), REPO, r"there is no model repository me/model",
    ),
    "somebody else's commit": (
        lambda s: s.faults.update(commit=[409]), REPO, "was changed by somebody else meanwhile",
    ),
    "a commit after another parent": (lambda s: s.faults.update(commit=[412]), REPO, "changed by"),
    "a file that the Hub refuses": (
        lambda s: s.faults.update(preupload=[422]), REPO, r"the Hub refuses me/model \(status 422",
    ),
    "a Hub that stays broken": (
        lambda s: s.faults.update(commit=[503] * 6), REPO,
        r"did not succeed .*status 503.*sends only what is missing",
    ),
    "a file that arrives damaged": (
        lambda s: setattr(s, "spoil", "config.json"), REPO,
        r"main of me/model is not what was pushed \(it differs in config.json\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_sentence_and_leaves_main_alone(
    server: UploadServer, folder: Path, case: str
) -> None:
    prepare, repo, sentence = REFUSALS[case]
    prepare(server)
    before = {name: list(there.commits) for name, there in server.repos.items()}
    code, out, err = push(server, folder, repo)
    last = err.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and not out, err
    assert re.search(sentence, last), last
    assert "Traceback" not in err
    if not server.spoil:
        after = {name: there.commits for name, there in server.repos.items()}
        assert after in (before, {REPO: [INITIAL]})


def test_without_a_token_or_offline_nothing_is_asked(server: UploadServer, folder: Path) -> None:
    for more, sentence in (
        ({"HF_TOKEN": ""}, "there is no token to push with; run `hf auth login`"),
        ({"HF_HUB_OFFLINE": "1"}, "unset it to push"),
    ):
        code, _, err = push(server, folder, **more)
        assert code == 2 and sentence in err, err
    assert not server.log


ROUTES = ("whoami", "info", "create", "auth", "validate", "preupload", "batch", "put", "verify")


@pytest.mark.parametrize("route", [*ROUTES, "commit"])
def test_every_request_survives_500_a_dropped_or_silent_connection_and_a_lost_answer(
    server: UploadServer, folder: Path, route: str
) -> None:
    # The client itself tries these two again, and waits longer each time.
    patient = route in ("preupload", "batch")
    server.faults[route] = [500, "hang"] if patient else [500, "drop", "hang", "lose"]
    code, _, err = push(server, folder)
    assert code == 0, err
    assert not server.faults[route]
    whole(server)


def test_a_reset_amid_an_object_and_an_expired_address_are_tried_again(
    server: UploadServer, folder: Path
) -> None:
    server.faults["put"] = ["reset", 403]
    code, _, err = push(server, folder)
    assert code == 0, err
    whole(server)


@pytest.mark.parametrize("tells_checksums", [True, False])
def test_a_commit_whose_answer_was_lost_is_not_done_twice(
    server: UploadServer, folder: Path, tells_checksums: bool
) -> None:
    server.tells_checksums = tells_checksums
    server.faults["commit"] = ["lose"]
    code, _, err = push(server, folder)
    assert code == 0 and "next try in" in err
    assert server.count("commit") == {0: 1}
    whole(server)


def test_killed_amid_the_upload_the_rerun_sends_only_what_is_missing(
    server: UploadServer, folder: Path
) -> None:
    server.stall = 1
    with start(server, folder, REPO, "private") as process:
        assert server.stalled.wait(30)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert server.repos[REPO].commits == [INITIAL] and len(server.objects) == 1
    server.stall = None
    assert server.count("put") == {200: 1}
    code, _, err = push(server, folder)
    assert code == 0, err
    assert server.count("put") == {200: 3}
    whole(server)


def test_a_later_push_replaces_the_model_in_one_commit_and_an_equal_one_does_nothing(
    server: UploadServer, folder: Path
) -> None:
    push(server, folder)
    push(server, folder)
    whole(server)
    assert server.count("commit") == {200: 1}
    (folder / "model-2.safetensors").unlink()
    (folder / "config.json").write_text("{}")
    code, _, err = push(server, folder)
    assert code == 0, err
    _, second, third = server.repos[REPO].commits
    kept = {name: content for name, content in FILES.items() if name != "model-2.safetensors"}
    assert second == INITIAL | FILES and third == INITIAL | kept | {"config.json": b"{}"}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", f'{{"a": "{TOKEN}"}}', "holds your token"),
        ("README.md", CARD.decode() + TOKEN, "holds your token"),
        ("config.json", '{"a": [{"b": "FOLDER"}]}', "a path of this machine"),
        ("optimizer.pt", "x", "is no file to push"),
    ],
)
def test_secrets_paths_and_pickles_never_leave_the_machine(
    server: UploadServer, folder: Path, name: str, content: str, sentence: str
) -> None:
    (folder / name).write_text(content.replace("FOLDER", str(folder)))
    code, _, err = push(server, folder)
    assert code != 0 and sentence in err
    assert server.history(REPO) == [set(INITIAL)] and not server.objects


def test_a_base_has_to_hold_the_weights_that_the_adapter_was_trained_on(
    server: UploadServer, folder: Path
) -> None:
    push(server, folder)
    ask = (
        "from geoguessr_rl import config, upload; from pathlib import Path; import sys; "
        "config.run_script(lambda: print(upload.check_base(sys.argv[1], Path(sys.argv[2]))))"
    )

    def check(repo: str) -> str:
        command = [sys.executable, "-c", ask, repo, str(folder)]
        environment = server.environment(folder.parent / "cache")
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        return done.stdout + done.stderr

    assert check(REPO) == "None\n"
    server.repos[REPO].main["README.md"] = b"---\nlicense: apache-2.0\n---\n"
    assert check(REPO) == "apache-2.0\n"
    assert "there is no model repository me/other" in check("me/other")
    (folder / "model-2.safetensors").write_bytes(b"other")
    assert "does not hold the weights that stand in" in check(REPO)


def test_a_failure_of_xet_is_tried_again_and_a_bug_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("geoguessr_rl.hub.BACKOFF_SECONDS", 0.0)
    bug = RuntimeError("Error while uploading")
    bug.__cause__ = KeyError("x")
    outcomes: list[Any] = [RuntimeError("CAS service error"), ConnectionError(), "done", bug]

    def attempt() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    assert upload._ask(REPO, "the push", attempt) == "done"
    with pytest.raises(RuntimeError, match="Error while uploading"):
        upload._ask(REPO, "the push", attempt)


def test_the_tag_of_the_cards_is_the_one_that_a_later_push_looks_for() -> None:
    assert upload.TAG in CARD.decode()
