"""Artifacts: files that are whole or not there, one owner a folder, blocks that survive kills."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
from conftest import make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError


class Killed(BaseException):
    """Stands for whatever ends a process."""


@dataclass(frozen=True)
class Line:
    """A row of a JSON Lines file."""

    id: int
    text: str
    country: str | None = None


def test_a_write_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a file.json"
    artifacts.write_text(path, "old")
    with pytest.raises(Killed), artifacts.replacing(path) as partial:
        partial.write_text("half of the n")
        assert path.read_text() == "old"
        raise Killed
    assert path.read_text() == "old"
    artifacts.write_text(path, "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_first_write_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.parquet"
    with pytest.raises(Killed), artifacts.replacing(path) as partial:
        partial.write_bytes(b"PAR1")
        raise Killed
    assert not path.exists()
    assert not list(path.parent.glob("*.parquet"))  # what is left has another suffix


def test_every_writer_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts.os, "fsync", lambda _: (_ for _ in ()).throw(Killed()))
    writers: dict[str, Callable[[Path], None]] = {
        "text": lambda path: artifacts.write_text(path, "x"),
        "bytes": lambda path: artifacts.write_bytes(path, b"x"),
        "json": lambda path: artifacts.write_json(path, {"x": 1}),
        "parquet": lambda path: artifacts.write_parquet(path, pl.DataFrame({"x": [1]})),
    }
    for name, write in writers.items():
        with pytest.raises(Killed):
            write(tmp_path / name)
        assert not (tmp_path / name).exists(), name


def test_json_holds_no_nan(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            artifacts.write_json(tmp_path / "m.json", {"median_km": [value]})
    assert not (tmp_path / "m.json").exists()


def test_a_missing_or_damaged_json_file_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with pytest.raises(UserError, match=r"m\.json does not exist; run prepare"):
        artifacts.read_json(path, remedy="run prepare")
    for damaged in (b"", b'{"a": 1', b"\xff\xfe"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"m\.json is not valid JSON.*; run prepare"):
            artifacts.read_json(path, remedy="run prepare")


def test_a_fingerprint_goes_by_content_and_not_by_order_or_container() -> None:
    one = artifacts.fingerprint({"a": (1, 2), "b": Path("x")})
    assert one == artifacts.fingerprint({"b": "x", "a": [1, 2]})
    assert one != artifacts.fingerprint({"b": "x", "a": [2, 1]})
    assert len(one) == 16 and int(one, 16) >= 0


def test_a_photo_s_seed_depends_on_the_run_and_the_photo_alone() -> None:
    seeds = {artifacts.seed_for(seed, key) for seed in range(20) for key in ("1", "2", "12", "")}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert artifacts.seed_for(42, "122139043211931") == 1450299961


HOLD = """
import sys, time
from pathlib import Path
from geoguessr_rl import artifacts
with artifacts.run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
ONE_MORE = """
import sys
from pathlib import Path
from geoguessr_rl import artifacts
try:
    with artifacts.run_lock(Path(sys.argv[1])):
        print("entered")
except artifacts.UserError as error:
    print(error)
"""


@contextmanager
def holder(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    with holder(folder) as first, pytest.raises(UserError) as refused, artifacts.run_lock(folder):
        pytest.fail("two owners")
    message = str(refused.value)
    assert f"process {first.pid} " in message and str(folder) in message


def test_the_lock_of_a_killed_owner_is_free_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert (tmp_path / ".owner").exists()
        with artifacts.run_lock(tmp_path):
            assert f"process {os.getpid()} " in (tmp_path / ".owner").read_text()
    assert not (tmp_path / ".owner").exists()


def test_this_process_keeps_others_out_until_it_is_done(tmp_path: Path) -> None:
    def other() -> str:
        command = [sys.executable, "-c", ONE_MORE, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with artifacts.run_lock(tmp_path):
        assert f"process {os.getpid()} " in other()
    assert other() == "entered\n"
    with pytest.raises(ZeroDivisionError), artifacts.run_lock(tmp_path):
        _ = 1 / 0
    assert other() == "entered\n"


def test_a_claim_names_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = {"model": "4B", "sampling": {"n": 1, "seed": 3}, "lora": None, "data": Path("d")}
    artifacts.claim(path, run)
    artifacts.claim(path, dict(reversed(run.items())))
    for changed, named in (
        ({**run, "model": "8B"}, "model was '4B' and is now '8B'"),
        ({**run, "sampling": {"n": 2, "seed": 3}}, "sampling.n was 1 and is now 2"),
        ({**run, "sampling": {"n": 1, "seed": 4}}, "sampling.seed was 3 and is now 4"),
        ({key: run[key] for key in run if key != "model"}, "model was '4B' and is now None"),
        ({**run, "more": 1}, "more was None and is now 1"),
    ):
        with pytest.raises(UserError) as refused:
            artifacts.claim(path, changed)
        assert str(tmp_path) in str(refused.value) and named in str(refused.value)
    artifacts.claim(path, run)


def test_a_claim_of_a_start_that_left_no_work_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    artifacts.claim(path, {"model": "4B"}, holds_work=False)
    artifacts.claim(path, {"model": "8B"}, holds_work=False)
    with pytest.raises(UserError, match="model was '8B'"):
        artifacts.claim(path, {"model": "4B"})


def test_a_file_holds_rows_when_one_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert not artifacts.holds_rows(path)
    for content, holds in ((b"", False), (b'{"id', False), (b"{}\n", True), (b"{}\n{", True)):
        path.write_bytes(content)
        assert artifacts.holds_rows(path) is holds


def test_a_folder_s_fingerprint_goes_by_the_bytes_of_what_a_model_is(tmp_path: Path) -> None:
    assert artifacts.folder_fingerprint("Qwen/Qwen3-VL-4B-Instruct") is None
    (tmp_path / "config.json").write_text("{}")
    one = artifacts.folder_fingerprint(str(tmp_path))
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"seconds": 1.5}]}')
    assert one == artifacts.folder_fingerprint(str(tmp_path)) is not None
    (tmp_path / "model.safetensors").write_bytes(b"1")
    two = artifacts.folder_fingerprint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert len({one, two, artifacts.folder_fingerprint(str(tmp_path))}) == 3


@given(st.lists(st.integers()), st.integers(1, 10))
def test_blocks_hold_every_item_once_in_order(items: list[int], size: int) -> None:
    cut = artifacts.blocks(items, size)
    assert [item for block in cut for item in block] == items
    assert all(len(block) == size for block in cut[:-1])
    assert all(0 < len(block) <= size for block in cut[-1:])


def test_rows_come_back_and_half_a_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert artifacts.read_rows(path, Line) == []
    rows = [Line(1, "a\u2028b\nc", "NA"), Line(2, "\ud800 é", None)]
    artifacts.run_blocks(path, rows, 10, 1, list)
    assert artifacts.read_rows(path, Line) == rows
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[1]) + 1):
        path.write_bytes(whole[:-cut])
        assert artifacts.read_rows(path, Line) == rows[:1]


@pytest.mark.parametrize(
    "damaged", [b'{"id": 1, "te', b"", b"3", b'{"id": 1}', b"\x00\xff\xfe", b"null"]
)
def test_a_damaged_line_in_the_middle_is_refused(damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = b'{"id": 1, "text": "a"}\n'
    path.write_bytes(good + damaged + b"\n" + good)
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2 is damaged"):
        artifacts.read_rows(path, Line)


def test_a_field_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "text": "a", "more": 5}\n')
    assert artifacts.read_rows(path, Line) == [Line(1, "a")]


class Worker:
    """Makes rows for numbers, and remembers for which ones, block by block."""

    def __init__(self, rows_an_item: int = 1, die_at: int | None = None) -> None:
        self.seen: list[list[int]] = []
        self.rows_an_item = rows_an_item
        self.die_at = die_at

    def __call__(self, block: Sequence[int]) -> list[Line]:
        if self.die_at in block:
            raise Killed
        self.seen.append(list(block))
        return [Line(n, f"row {k} of {n}") for n in block for k in range(self.rows_an_item)]


def test_a_finished_run_generates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "rows.jsonl"
    assert artifacts.run_blocks(path, range(10), 4, 1, Worker()) == 0
    before, stamp = path.read_bytes(), path.stat().st_mtime_ns
    again = Worker()
    assert artifacts.run_blocks(path, range(10), 4, 1, again) == 10
    assert again.seen == []
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, stamp)


def test_a_killed_run_goes_on_at_the_block_that_was_cut(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    artifacts.run_blocks(whole, range(10), 4, 2, Worker(2))
    with pytest.raises(Killed):
        artifacts.run_blocks(cut, range(10), 4, 2, Worker(2, die_at=6))
    assert len(cut.read_bytes().splitlines()) == 8
    rest = Worker(2)
    assert artifacts.run_blocks(cut, range(10), 4, 2, rest) == 4
    assert rest.seen == [[4, 5, 6, 7], [8, 9]]
    assert cut.read_bytes() == whole.read_bytes()


@settings(max_examples=80, deadline=None)
@given(
    items=st.integers(0, 12),
    size=st.integers(1, 5),
    each=st.integers(1, 3),
    where=st.floats(0, 1),
)
def test_a_run_has_the_same_bytes_wherever_it_was_cut(
    items: int, size: int, each: int, where: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        artifacts.run_blocks(path, range(items), size, each, Worker(each))
        whole = path.read_bytes() if items else b""
        kept = whole[: round(where * len(whole))]
        path.write_bytes(kept)
        rest = Worker(each)
        done = artifacts.run_blocks(path, range(items), size, each, rest)
        assert path.read_bytes() == whole
        finished = kept.count(b"\n") // each
        assert done == (items if finished == items else finished // size * size)
        assert [n for block in rest.seen for n in block] == list(range(done, items))


def test_a_shorter_last_block_is_done_again_whole_when_the_run_is_extended(
    tmp_path: Path,
) -> None:
    path, straight = tmp_path / "rows.jsonl", tmp_path / "straight.jsonl"
    artifacts.run_blocks(path, range(6), 4, 1, Worker())
    more = Worker()
    assert artifacts.run_blocks(path, range(11), 4, 1, more) == 4
    assert more.seen == [[4, 5, 6, 7], [8, 9, 10]]
    artifacts.run_blocks(straight, range(11), 4, 1, Worker())
    assert path.read_bytes() == straight.read_bytes()


def test_a_smaller_limit_later_keeps_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    artifacts.run_blocks(path, range(10), 4, 1, Worker())
    before = path.read_bytes()
    for fewer in (9, 4, 3, 0):
        idle = Worker()
        assert artifacts.run_blocks(path, range(fewer), 4, 1, idle) == fewer
        assert idle.seen == [] and path.read_bytes() == before


def test_work_that_gives_too_few_rows_is_a_bug_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(AssertionError):
        artifacts.run_blocks(path, range(4), 4, 2, Worker(1))
    assert not path.exists()


def test_whole_checkpoints_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (1000, 200, 30):
        make_checkpoint(tmp_path, step)
    for name in ("checkpoint-final", "checkpoint-", "checkpoint-²", "other-5"):
        make_checkpoint(tmp_path, 7).rename(tmp_path / name)
    found = [path.name for path in artifacts.complete_checkpoints(tmp_path)]
    assert found == ["checkpoint-30", "checkpoint-200", "checkpoint-1000"]
    assert artifacts.complete_checkpoints(tmp_path / "gone") == []


def test_a_step_is_read_from_the_folder() -> None:
    assert artifacts.checkpoint_step(Path("a/checkpoint-120")) == 120


FILES = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.mark.parametrize("gone", FILES)
@pytest.mark.parametrize("keep", [None, 0, 9])
def test_a_checkpoint_without_a_whole_file_is_not_whole(
    gone: str, keep: int | None, tmp_path: Path
) -> None:
    kept = make_checkpoint(tmp_path, 1)
    file = make_checkpoint(tmp_path, 2) / gone
    assert len(artifacts.complete_checkpoints(tmp_path)) == 2
    if keep is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:keep])
    assert artifacts.complete_checkpoints(tmp_path) == [kept]


def test_weights_that_were_cut_behind_their_header_are_not_whole(tmp_path: Path) -> None:
    weights = make_checkpoint(tmp_path, 1) / "adapter_model.safetensors"
    header = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert artifacts.complete_checkpoints(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-1])
    assert artifacts.complete_checkpoints(tmp_path) == []


def test_a_checkpoint_of_several_processes_is_whole(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 1)
    (path / "rng_state.pth").rename(path / "rng_state_0.pth")
    assert artifacts.complete_checkpoints(tmp_path) == [path]


@pytest.mark.parametrize("state", ["", '{"log_history": [', "\x00"])
def test_a_checkpoint_whose_state_was_not_written_out_is_not_whole(
    state: str, tmp_path: Path
) -> None:
    kept = make_checkpoint(tmp_path, 1, '{"log_history": [{"step": 1}]}')
    make_checkpoint(tmp_path, 2, state)
    (make_checkpoint(tmp_path, 3) / "trainer_state.json").unlink()
    assert artifacts.complete_checkpoints(tmp_path) == [kept]
    assert artifacts.read_training_log(tmp_path) == [{"step": 1}]


def test_without_a_whole_checkpoint_there_is_no_training_log(tmp_path: Path) -> None:
    assert artifacts.read_training_log(tmp_path) == []


def test_values_become_plain_json() -> None:
    value = {"p": Path("a/b"), 3: (1, [Line(1, "x")])}
    wanted = {"p": "a/b", "3": [1, [{"id": 1, "text": "x", "country": None}]]}
    assert json.loads(json.dumps(artifacts.plain(value))) == wanted


def test_a_start_that_failed_does_not_lock_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    artifacts.claim(path, {"model": "typo"})
    artifacts.claim(path, {"model": "right"}, holds_work=False)
    with pytest.raises(UserError, match=r"sampling\.n was None and is now 4"):
        artifacts.claim(path, {"model": "right", "sampling": {"n": 4}})


def test_an_output_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(UserError, match="cannot be written"),
        artifacts.run_lock(tmp_path / "file/out"),
    ):
        pytest.fail("locked")
