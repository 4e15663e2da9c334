"""Exactly named files of a dataset repository on the Hub, in the Hub's own cache, resumable.

The Hub's client starts a file anew in every process and after most broken connections; files of
3 GB over a home line may then never end. Here a file grows in `<checksum>.part` beside its later
place, by ranged requests, until its checksum fits; the client then finds it as if it had fetched
it. Which files to fetch, and what they hold, is the callers' business. It is long because each way
in which a transfer breaks has an answer of its own here.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import filelock
from tqdm import tqdm

from geoguessr_rl.artifacts import UserError, file_sha256

T = TypeVar("T")

TRIES = 6  # in a row that bring nothing
BACKOFF_SECONDS = 2.0  # doubles from try to try: a minute in all, what a router needs to restart
LONGEST_WAIT_SECONDS = 600.0  # the Hub counts requests in windows of five minutes
TIMEOUT_SECONDS = 30  # of silence
BUFFER_BYTES = 1 << 20  # what a kill loses at most

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")  # the ETag of a large file
GIT_SHA1 = re.compile(r"[0-9a-f]{40}")  # the ETag of a file that git itself holds
CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
# A full disk, a quota, a file system's limit, and folders that one may not or cannot write.
WRITE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR,
    errno.EEXIST, errno.EIO,
}  # fmt: skip


class _Broken(Exception):
    """An answer that is not what was asked for; the next try can bring the right one."""


@dataclass(frozen=True)
class _File:
    """A file that the cache lacks, as the Hub describes it.

    Attributes:
        name: Its path in the repository.
        url: Where every try begins; it leads on to a signed address that expires.
        checksum: SHA-256, or git's SHA-1 of a small file; the name of its blob.
        size: In bytes.
        blob: Where it will stand.
    """

    name: str
    url: str
    checksum: str
    size: int
    blob: Path

    @property
    def part(self) -> Path:
        """Where its first bytes are gathered."""
        return self.blob.with_name(f"{self.checksum}.part")

    def held(self) -> int:
        """Returns how many bytes have arrived."""
        try:
            return self.part.stat().st_size
        except FileNotFoundError:  # not begun, or another process has just made a blob of it
            return 0


def resolve(repo: str, revision: str) -> str:
    """Returns the commit hash of a branch or tag; a commit hash is returned as it is.

    With HF_HUB_OFFLINE=1 it is the commit that the cache holds for the name.

    Raises:
        UserError: There is no such repository or revision, or the Hub cannot be asked.
    """
    if COMMIT.fullmatch(revision):
        return revision
    ref = _folder(repo) / "refs" / revision
    if _is_offline():
        if ref.is_file():
            return ref.read_text(encoding="utf-8").strip()
        raise UserError(_offline(repo, f"the commit of revision {revision!r}"))
    commit = _dataset_info(repo, revision).sha or ""
    if not COMMIT.fullmatch(commit):
        raise UserError(_stranger(f"revision {revision!r} of {repo}"))
    # Written only when it is news: a cache that holds all may be read-only.
    if not ref.is_file() or ref.read_text(encoding="utf-8").strip() != commit:
        with _writing(ref.parent):
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            fresh.write_text(commit, encoding="utf-8")
            fresh.replace(ref)
    return commit


def list_files(repo: str, revision: str, suffix: str) -> list[str]:
    """Returns the sorted names of a repository's files that end with `suffix`.

    With HF_HUB_OFFLINE=1 these are the files that the cache holds for the commit, which are all of
    them only where all were downloaded.

    Raises:
        UserError: There is no such repository or revision, the Hub cannot be asked, or offline the
            cache holds no such file.
    """
    commit = resolve(repo, revision)
    if _is_offline():
        snapshot = _folder(repo) / "snapshots" / commit
        found = (path for path in snapshot.rglob("*") if path.is_file())
        names = [path.relative_to(snapshot).as_posix() for path in found]
    else:
        # Complete up to 50,000 files; unlike a listing page by page it has a time limit.
        names = [file.rfilename for file in _dataset_info(repo, commit).siblings or ()]
    chosen = sorted(name for name in names if name.endswith(suffix))
    if not chosen and _is_offline():
        raise UserError(_offline(repo, f"any *{suffix} file of commit {commit[:10]}"))
    return chosen


def missing_bytes(repo: str, revision: str, names: Sequence[str]) -> int:
    """Returns how many bytes `download` has to fetch.

    Raises:
        UserError: As `download`.
    """
    return sum(_needed(_plan(repo, resolve(repo, revision), names)[1]).values())


def download(repo: str, revision: str, names: Sequence[str]) -> list[Path]:
    """Returns the paths of files in the Hub's cache, in order, fetching those that it lacks.

    A file that an earlier process left unfinished is continued. Files of a commit hash that are
    all in the cache cost no request.

    Args:
        repo: `owner/name` of the dataset repository.
        revision: A commit hash, branch or tag.
        names: Paths in the repository.

    Raises:
        UserError: A file is missing, may not be read, does not fit on the disk, arrived damaged or
            stopped arriving; or with HF_HUB_OFFLINE=1 the cache lacks one.
    """
    commit = resolve(repo, revision)
    found, files = _plan(repo, commit, names)
    needed = _needed(files)
    require_space(_folder(repo), sum(needed.values()), f"{len(needed)} file(s) of {repo}")
    for file in files:
        with _writing(file.blob.parent):
            _fetch(repo, file)
            found[file.name] = _persist(repo, file.name, partial(_link, repo, commit, file.name))
    return [path for name in names if (path := found[name]) is not None]


def cache_folder() -> Path:
    """Returns where the Hub's cache is."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raises UserError when `needed` bytes of `what` do not fit on the disk of `folder`.

    Args:
        folder: Where they will be written; it may not exist yet.
        needed: Bytes.
        what: Their name in the sentence.
    """
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{folder} has no room for {what}: {_gigabytes(needed)} are needed and "
            f"{_gigabytes(free)} are free; free some, or choose a folder on a larger disk "
            "(HF_HUB_CACHE moves the Hub's cache)"
        )


def _gigabytes(number: int) -> str:
    """Returns bytes as text; below 0.1 GB in megabytes."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"


def _folder(repo: str) -> Path:
    """Returns where the Hub's cache keeps a dataset repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        name = repo_folder_name(repo_id=repo, repo_type="dataset")
    except HFValidationError:
        raise UserError(
            f"{repo!r} cannot be the name of a dataset repository; give it as owner/name"
        ) from None
    return cache_folder() / name


def _plan(
    repo: str, commit: str, names: Sequence[str]
) -> tuple[dict[str, Path | None], list[_File]]:
    """Returns where the cache holds each file, and those that it lacks."""
    found = {name: _cached(repo, commit, name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing and _is_offline():
        raise UserError(_offline(repo, f"{missing[0]} of commit {commit[:10]}"))
    return found, [_describe(repo, commit, name) for name in missing]


def _needed(files: Sequence[_File]) -> dict[Path, int]:
    """Returns how many bytes each blob still needs."""
    return {file.blob: max(file.size - file.held(), 0) for file in files if not file.blob.exists()}


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def _offline(repo: str, lacks: str) -> str:
    """Returns the sentence about something that the cache lacks."""
    return (
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, and the Hub's cache "
        f"({_folder(repo)}) lacks {lacks}; unset it to download, or set HF_HUB_CACHE to a cache "
        "that holds it"
    )


def _stranger(what: str) -> str:
    """Returns the sentence about an answer that is not the Hub's."""
    from huggingface_hub import constants

    return (
        f"{constants.ENDPOINT} answers for {what} without the commit, size or checksum that the "
        "Hub gives; check HF_ENDPOINT and the proxy"
    )


def _cached(repo: str, commit: str, name: str) -> Path | None:
    """Returns where the cache holds a file of a commit."""
    from huggingface_hub import try_to_load_from_cache

    # The client marks files that a commit is known to lack with an object: no path either.
    found = try_to_load_from_cache(repo, name, revision=commit, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def _timeout() -> int:
    from huggingface_hub import constants

    return max(TIMEOUT_SECONDS, constants.HF_HUB_DOWNLOAD_TIMEOUT)


def _dataset_info(repo: str, revision: str) -> Any:
    """Asks the Hub what a revision is and holds."""
    from huggingface_hub import HfApi

    _folder(repo)  # refuses a malformed name
    return _persist(
        repo,
        f"revision {revision!r}",
        lambda: HfApi().dataset_info(repo, revision=revision, timeout=_timeout()),
    )


def _describe(repo: str, commit: str, name: str) -> _File:
    """Asks the Hub for a file's checksum and size."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name, repo_type="dataset", revision=commit)
    found = _persist(repo, name, lambda: get_hf_file_metadata(url, timeout=_timeout()))
    checksum = found.etag or ""
    known = SHA256.fullmatch(checksum) or GIT_SHA1.fullmatch(checksum)
    if found.commit_hash != commit or found.size is None or not known:
        raise UserError(_stranger(f"{name} of {repo}"))
    return _File(name, url, checksum, found.size, _folder(repo) / "blobs" / checksum)


def _link(repo: str, commit: str, name: str) -> Path:
    """Lets the client find the blob and name it in the commit's snapshot."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=commit))
    except LocalEntryNotFoundError as error:
        raise (error.__cause__ or error) from None  # the failed request, which it wraps


def _fetch(repo: str, file: _File) -> None:
    """Brings one file into the cache as a blob, unless it is there."""
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file):
        if file.blob.exists():
            return
        if file.held() > file.size:
            file.part.unlink()
        if file.held() < file.size or file.size == 0:
            with tqdm(
                total=file.size, initial=file.held(), desc=file.name, unit="B", unit_scale=True,
                mininterval=1,
            ) as bar:  # fmt: skip
                _persist(repo, file.name, lambda: _continue(file, bar), file.held)
        if _checksum(file) != file.checksum:
            file.part.unlink()
            raise UserError(f"{file.name} of {repo} arrived damaged; run the command again")
        with file.part.open("rb") as written:
            os.fsync(written.fileno())
        file.part.replace(file.blob)


@contextmanager
def _locked(file: _File) -> Iterator[None]:
    """Keeps a second process from writing the same part; it waits, and then finds the blob."""
    path = file.blob.with_name(f"{file.checksum}.lock")
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        tqdm.write(f"{file.name}: waiting for another process that fetches it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        # Whoever gets a lock looks for the blob first, so that with a blob no lock is needed.
        if file.blob.exists():
            path.unlink(missing_ok=True)
        lock.release()


def _checksum(file: _File) -> str:
    """Returns what the checksum of the part is, in the kind that the Hub names."""
    if SHA256.fullmatch(file.checksum):
        return file_sha256(file.part)
    digest = hashlib.sha1(b"blob %d\0" % file.held(), usedforsecurity=False)
    with file.part.open("rb") as content:
        while chunk := content.read(BUFFER_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _continue(file: _File, bar: Any) -> None:
    """Asks for the bytes that the part lacks, and appends them as they arrive."""
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    start = file.held()
    # A compressed answer would have ranges of its own.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream("GET", file.url, headers=headers, timeout=_timeout()) as response:
        if start and response.status_code == 416:
            file.part.unlink()
            raise _Broken("the server does not have the range that is missing")
        hf_raise_for_status(response)
        if response.status_code == 206:
            answered = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if (
                not answered
                or int(answered[1]) != start
                or answered[2] not in ("*", str(file.size))
            ):
                file.part.unlink(missing_ok=True)
                raise _Broken("the server sent another range than the one that is missing")
        else:
            start = 0  # the whole file, whatever was asked
        held = bar.n = start
        with file.part.open("ab" if start else "wb", buffering=BUFFER_BYTES) as out:
            # Chunks of any size, as they come: the client would drop a broken one of a fixed size.
            for chunk in response.iter_bytes():
                out.write(chunk)
                bar.update(len(chunk))
                held += len(chunk)
                if held > file.size:
                    break  # not this file; the checksum will say so
    if file.held() < file.size:
        raise _Broken("the connection was closed early")


def _persist(
    repo: str, what: str, attempt: Callable[[], T], held: Callable[[], int] = lambda: 0
) -> T:
    """Calls `attempt` until it succeeds, or `TRIES` calls in a row bring nothing.

    Args:
        repo: The repository.
        what: What is asked for.
        attempt: Asks the Hub.
        held: How many bytes have arrived; whenever they are more than ever, tries count anew.

    Raises:
        UserError: The Hub refuses, or the tries are used up.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    fruitless, most = 0, held()
    while True:
        try:
            return attempt()
        except (httpx.RequestError, HfHubHTTPError, _Broken, json.JSONDecodeError) as error:
            if refusal := _refusal(error, repo, what):
                raise UserError(refusal) from None
            fruitless = 1 if held() > most else fruitless + 1
            most = max(most, held())
            reason = reason_of(error)
            asked = retry_after(error)
            wait = BACKOFF_SECONDS * 2 ** (fruitless - 1) if asked is None else asked
            if fruitless == TRIES or wait > LONGEST_WAIT_SECONDS:
                raise UserError(_given_up(error, repo, what)) from None
        tqdm.write(f"{what}: {reason}; next try in {wait:.0f} s", file=sys.stderr)
        time.sleep(wait)


def reason_of(error: Exception) -> str:
    """Returns in a few words what went wrong with a request."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered with status {response.status_code}"
    if isinstance(error, json.JSONDecodeError):
        return "the answer is not the Hub's"
    return " ".join(str(error).split()) or type(error).__name__


def _refusal(error: Exception, repo: str, what: str) -> str | None:
    """Returns the sentence about a request that no further try can mend, or None."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RemoteEntryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, httpx.UnsupportedProtocol):
        return f"HF_ENDPOINT ({constants.ENDPOINT}) is not an http address; unset or correct it"
    if not isinstance(error, HfHubHTTPError):
        return None
    status = error.response.status_code
    if isinstance(error, RevisionNotFoundError):
        return f"dataset {repo} has no such revision on the Hub ({what}); check the revision"
    if isinstance(error, RemoteEntryNotFoundError):
        return f"dataset {repo} has no file {what} at this revision; check the name and revision"
    if error.response.url.host != httpx.URL(constants.ENDPOINT).host:
        return None  # a signed address that expired; the next try gets a new one
    if status == 404:
        return f"there is no dataset {repo} on the Hub; check the name"
    if status in (401, 403):
        return (
            f"the Hub does not let you read {what} of dataset {repo} (status {status}); check the "
            "name, log in with `hf auth login` or HF_TOKEN, and accept the terms on the dataset's "
            "page"
        )
    if status in (408, 429) or status >= 500:
        return None
    return f"the Hub refuses {what} of dataset {repo} (status {status}); check HF_ENDPOINT"


def _given_up(error: Exception, repo: str, what: str) -> str:
    """Returns the sentence about the last of the fruitless tries."""
    import httpx
    from huggingface_hub import constants

    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return (
            f"the Hub ({constants.ENDPOINT}) cannot be reached for {what} of {repo} "
            f"({reason_of(error)}); check the network and run the same command again, which "
            "continues where it stopped, or set HF_HUB_OFFLINE=1 to use only what is in the cache"
        )
    return (
        f"{what} of {repo} did not arrive ({reason_of(error)}); run the same command again later: "
        "it continues where it stopped"
    )


def retry_after(error: Exception) -> float | None:
    """Returns how many seconds the server asks to wait, or None."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    response = getattr(error, "response", None)
    headers: Mapping[str, str] = response.headers if response is not None else {}
    limit = parse_ratelimit_headers(headers)
    if response is not None and response.status_code == 429 and limit and not limit.remaining:
        return limit.reset_in_seconds + 1.0
    asked = headers.get("Retry-After", "").strip()
    if asked.isdecimal():
        return float(asked)
    try:
        return max(parsedate_to_datetime(asked).timestamp() - time.time(), 0)
    except ValueError:
        return None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns a full disk or a folder that cannot be written into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in WRITE_ERRORS:
            raise
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); make room there or set HF_HUB_CACHE "
            "to another folder, and run the same command again: it continues where it stopped"
        ) from None
