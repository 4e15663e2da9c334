"""Files -> the main revision of a model repository on the Hub, whole or not at all.

Large files go first, as objects that no revision names; then one commit puts all files on main, so
that main is the old model or the new one and never half of either. Objects that have arrived are
not sent again, so that a push that was killed continues. Which files to push is the callers'
business; what stands in their text is checked once more, since what has left cannot be called back.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from geoguessr_rl import hub
from geoguessr_rl.artifacts import UserError, file_sha256

T = TypeVar("T")

TAG = "geoguessr-rl"
"""In the front matter of every card of ours: what a later push may replace."""
KINDS = (".safetensors", ".json", ".jinja", ".txt", ".md", ".jpg")
TEXTS = (".json", ".jinja", ".txt", ".md")
SILENCE_SECONDS = 120.0  # after which a connection counts as broken; a large commit takes its time
THE_HUBS_OWN = ".gitattributes"  # which it writes when a repository is made
CHANGED = (409, 412)  # main is no longer what the commit was to follow


def check_access(repo: str, *, private: bool) -> None:
    """Checks, before anything expensive, that the files of a push may go into a repository.

    One that does not exist is created, empty: what a token may do in a namespace, the Hub tells by
    doing it alone.

    Args:
        repo: `owner/name`.
        private: Whether nobody else may see it.

    Raises:
        UserError: There is no valid token, the name is malformed or belongs to somebody else, the
            token may not write, or the repository is public or holds something else.
    """
    from huggingface_hub import constants, get_token

    _require_name(repo)
    if constants.is_offline_mode():
        raise UserError("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it to push")
    if get_token() is None:
        raise UserError("there is no token to push with; run `hf auth login`, or set HF_TOKEN")
    api = _client()
    account = _ask(repo, "your account", api.whoami)
    found = _look_up(repo)
    if found is None:
        _require_own_namespace(repo, account)
        _ask(repo, "creation", lambda: api.create_repo(repo, private=private, exist_ok=True))
        found = _ask(repo, "the list of files", lambda: _info(repo))
    _ask(repo, "write access", lambda: api.auth_check(repo, write=True))
    if private and not found.private:
        raise UserError(
            f"{repo} is public, and this push is private; choose another repo_id, make that "
            "repository private on its settings page, or pass --public"
        )
    there = {file.rfilename for file in found.siblings or ()} - {THE_HUBS_OWN}
    tags = found.card_data.get("tags", []) if found.card_data else []
    if there and TAG not in tags:
        raise UserError(
            f"{repo} holds files that no push from here has put there ({min(there)}); choose "
            "another repo_id, or delete that repository"
        )


def check_base(repo: str, folder: Path | None) -> str | None:
    """Returns the licence that the Hub names for a base model, and None where it names none.

    Args:
        repo: `owner/name` of the base.
        folder: The folder that the adapter was trained on, whose weights must be those on the Hub;
            None where the base came from the Hub itself.

    Raises:
        UserError: There is no such repository, or it holds other weights.
    """
    _require_name(repo)
    found = _ask(repo, "the list of files", lambda: _info(repo))
    there = {file.rfilename: file for file in found.siblings or ()}
    for path in sorted(folder.glob("*.safetensors")) if folder else ():
        if path.name not in there or not _equal(there[path.name], path):
            raise UserError(
                f"{repo} does not hold the weights that stand in {folder} ({path.name}); push that "
                f"folder with `hf upload {repo} {folder}`, or name another base_repo_id"
            )
    licence = found.card_data.get("license") if found.card_data else None
    return licence if isinstance(licence, str) else None


def push(repo: str, files: Mapping[str, Path], message: str) -> str:
    """Makes main hold exactly these files, in one commit, and returns the repository's address.

    Where main holds them already, nothing is committed: so a push whose last answer was lost is
    not done twice. What main held before stays in its history.

    Args:
        repo: `owner/name`, which `check_access` has accepted.
        files: Where each file lies, by its path in the repository.
        message: The commit's title.

    Raises:
        UserError: A file must not leave the machine, the Hub refuses, or the tries are used up.
    """
    for name, path in files.items():
        _refuse_private(name, path)
    api = _client()

    def attempt() -> str:
        before = _info(repo)
        if not _holds(before, files):
            _commit(api, repo, files, before, message)
            if difference := _difference(_info(repo), files):
                raise UserError(
                    f"main of {repo} is not what was pushed ({difference}); run the same command "
                    "again"
                )
        return f"{api.endpoint}/{repo} ({'private' if before.private else 'public'})"

    return _ask(repo, "the push", attempt)


def _commit(api: Any, repo: str, files: Mapping[str, Path], before: Any, message: str) -> None:
    """Sends the objects that the Hub lacks, and then the commit that names them."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.errors import HfHubHTTPError

    stale = {file.rfilename for file in before.siblings or ()} - files.keys() - {THE_HUBS_OWN}
    operations: list[Any] = [CommitOperationAdd(name, path) for name, path in files.items()]
    operations += [CommitOperationDelete(name) for name in sorted(stale)]
    try:
        api.create_commit(repo, operations, commit_message=message, parent_commit=before.sha)
    except HfHubHTTPError as error:
        # A commit of ours whose answer was lost has moved main, too: then it holds what it should.
        if error.response.status_code not in CHANGED or not _holds(_info(repo), files):
            raise


def _client() -> Any:
    """Returns the Hub's client, which by itself waits for ever on a connection that is silent."""
    import httpx
    from huggingface_hub import HfApi, set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def build() -> httpx.Client:
        client = default_client_factory()
        client.timeout = httpx.Timeout(SILENCE_SECONDS)
        return client

    set_client_factory(build)
    return HfApi()


def _info(repo: str) -> Any:
    """Returns what main of a model repository holds, with sizes and checksums."""
    return _client().model_info(repo, files_metadata=True, timeout=SILENCE_SECONDS)


def _look_up(repo: str) -> Any:
    """Returns what `_info` does, or None where there is no repository that the token can see."""
    from huggingface_hub.errors import RepositoryNotFoundError

    def attempt() -> Any:
        try:
            return _info(repo)
        except RepositoryNotFoundError as error:
            if error.response.status_code != 404:
                raise
            return None

    return _ask(repo, "the list of files", attempt)


def _difference(found: Any, files: Mapping[str, Path]) -> str:
    """Returns in what main differs from what it should hold; empty where it does not."""
    there = {file.rfilename: file for file in found.siblings or ()}
    there.pop(THE_HUBS_OWN, None)
    for name in sorted(there.keys() | files.keys()):
        if name not in there or name not in files or not _equal(there[name], files[name]):
            kind = (
                "lacks"
                if name not in there
                else "also holds"
                if name not in files
                else "differs in"
            )
            return f"it {kind} {name}"
    return ""


def _holds(found: Any, files: Mapping[str, Path]) -> bool:
    return not _difference(found, files)


def _equal(sibling: Any, path: Path) -> bool:
    """Whether a file on the Hub has the bytes of one here, by size and checksum."""
    if sibling.size != path.stat().st_size:
        return False
    if sibling.lfs is not None:
        return bool(sibling.lfs.sha256 == file_sha256(path))
    content = path.read_bytes()  # git itself holds small files only
    digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return bool(sibling.blob_id == digest.hexdigest())


def _refuse_private(name: str, path: Path) -> None:
    """Refuses what must not leave the machine: pickles and the like, a token, a path of its own."""
    from huggingface_hub import get_token

    if path.suffix not in KINDS:
        raise AssertionError(f"{name} is no file to push")
    if path.suffix not in TEXTS:
        return
    text = path.read_text(encoding="utf-8")
    if (token := get_token()) and token in text:
        raise UserError(f"{path} holds your token; remove it there, and make a new token")
    # A tokenizer's vocabulary may hold any text.
    if path.suffix == ".json" and path.name not in ("tokenizer.json", "vocab.json"):
        for value in _strings(json.loads(text)):
            if value.startswith("/") and Path(value).exists():
                raise UserError(
                    f"{path} names {value}, a path of this machine that means nothing elsewhere; "
                    "remove it and run the same command again"
                )


def _strings(value: Any) -> list[str]:
    """Returns every text in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def _require_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
        fits = "/" in repo
    except HFValidationError:
        fits = False
    if not fits:
        raise UserError(
            f"{repo!r} cannot be the name of a repository on the Hub; give it as owner/name, in "
            "letters, digits, - _ and ."
        )


def _require_own_namespace(repo: str, account: Mapping[str, Any]) -> None:
    """Raises UserError where a repository that is to be created would be somebody else's."""
    own = [
        account["name"],
        *(org["name"] for org in account.get("orgs", ()) if org.get("roleInOrg") != "read"),
    ]
    owner, _, name = repo.partition("/")
    if owner.lower() not in (mine.lower() for mine in own):
        raise UserError(
            f"there is no {repo} that your token can see, and you cannot make it: you may write as "
            f"{', '.join(own)}; set repo_id to {own[0]}/{name}, for example"
        )


def _ask(repo: str, what: str, attempt: Callable[[], T]) -> T:
    """Calls `attempt` until it succeeds, or `hub.TRIES` calls in a row have failed.

    Raises:
        UserError: The Hub refuses, or the tries are used up.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    # The last three are what Xet, the Hub's other way to store objects, makes of its failures.
    failures: tuple[type[Exception], ...] = (
        httpx.RequestError, HfHubHTTPError, json.JSONDecodeError,
        RuntimeError, ConnectionError, TimeoutError,
    )  # fmt: skip
    tried = 0
    while True:
        try:
            return attempt()
        except failures as raised:
            # The client's threads wrap what went wrong with an object in a RuntimeError.
            wraps = type(raised) is RuntimeError and raised.__cause__ is not None
            error = raised.__cause__ if wraps else raised
            if not isinstance(error, failures):
                raise
            if refusal := _refusal(error, repo, what):
                raise UserError(refusal) from None
            tried += 1
            asked = hub.retry_after(error)
            wait = hub.BACKOFF_SECONDS * 2 ** (tried - 1) if asked is None else asked
            reason = hub.reason_of(error)
            if tried == hub.TRIES or wait > hub.LONGEST_WAIT_SECONDS:
                raise UserError(
                    f"{what} for {repo} did not succeed ({reason}); main is as it was or whole: "
                    "run the same command again later, which sends only what is missing"
                ) from None
        tqdm.write(f"{repo}, {what}: {reason}; next try in {wait:.0f} s", file=sys.stderr)
        time.sleep(wait)


def _refusal(error: Exception, repo: str, what: str) -> str | None:
    """Returns the sentence about a request that no further try can mend, or None."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, httpx.UnsupportedProtocol):
        return f"HF_ENDPOINT ({constants.ENDPOINT}) is not an http address; unset or correct it"
    if not isinstance(error, HfHubHTTPError):
        return None
    status = error.response.status_code
    if error.response.url.host != httpx.URL(constants.ENDPOINT).host:
        return None  # a signed address that expired; the next try gets a new one
    if status in (408, 429) or status >= 500:
        return None
    # The Hub's own words tell a full quota from a missing right.
    said = " ".join((error.server_message or "").split())[:200]
    where = f"(status {status} at {what}" + (f": {said})" if said else ")")
    if status == 401:
        return (
            f"the Hub does not accept your token for {repo} {where}; make one with write access, "
            "and log in with `hf auth login` or set HF_TOKEN"
        )
    if status == 403:
        return (
            f"your token may not write to {repo} {where}; give it write access there, or choose "
            "another repo_id"
        )
    if status == 404:
        return (
            f"there is no model repository {repo} that your token can see {where}; check the name, "
            "and that nobody has deleted it"
        )
    if status in CHANGED:
        return (
            f"main of {repo} was changed by somebody else meanwhile {where}; look at it, and run "
            "the same command again"
        )
    return f"the Hub refuses {repo} {where}; check the name and HF_ENDPOINT"
