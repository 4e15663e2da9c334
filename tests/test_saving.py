"""Which checkpoint a run continues from, and how it ends before one is lost."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_checkpoint

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import saving


def test_only_whole_checkpoints_of_generating_steps_are_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 3)
    make_checkpoint(tmp_path, 10, '{"log_hi')
    assert saving.choose_checkpoint(tmp_path, "auto", 2) == good
    said = capsys.readouterr().out
    assert "set aside checkpoint-3" in said and "its step does not generate" in said
    assert "set aside checkpoint-10" in said and "it is not complete" in said
    assert sorted(path.name for path in (tmp_path / "set_aside").iterdir()) == [
        "checkpoint-10",
        "checkpoint-3",
    ]
    assert saving.choose_checkpoint(tmp_path, "auto", 2) == good
    assert capsys.readouterr().out == ""


def test_a_name_that_was_set_aside_before_keeps_its_files(tmp_path: Path) -> None:
    for number in range(3):
        (make_checkpoint(tmp_path, 5, "") / "note").write_text(str(number))
        assert saving.choose_checkpoint(tmp_path, "auto", 1) is None
    notes = {path.parent.name: path.read_text() for path in tmp_path.glob("set_aside/*/note")}
    assert notes == {"checkpoint-5": "0", "checkpoint-5-1": "1", "checkpoint-5-2": "2"}


def test_an_empty_and_a_fresh_folder_begin_anew(tmp_path: Path) -> None:
    assert saving.choose_checkpoint(tmp_path / "none", "auto", 2) is None
    assert saving.choose_checkpoint(tmp_path, "auto", 2) is None
    assert saving.choose_checkpoint(tmp_path, None, 2) is None


def test_a_half_written_checkpoint_alone_is_a_fresh_start(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, "")
    assert saving.choose_checkpoint(tmp_path, None, 2) is None
    assert not (tmp_path / "checkpoint-2").exists()


def test_a_named_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    early, _ = make_checkpoint(tmp_path, 2), make_checkpoint(tmp_path, 4)
    assert saving.choose_checkpoint(tmp_path, str(early), 2) == early
    assert (tmp_path / "set_aside/checkpoint-4").is_dir()
    with pytest.raises(UserError, match="usable are checkpoint-2"):
        saving.choose_checkpoint(tmp_path, str(tmp_path / "checkpoint-3"), 2)


def test_a_folder_that_holds_a_run_is_not_trained_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    with pytest.raises(UserError, match="--resume_from_checkpoint auto"):
        saving.choose_checkpoint(tmp_path, None, 2)


@pytest.fixture
def end(tmp_path: Path) -> Iterator[saving.OrderlyEnd]:
    """A run's end whose training has begun: two steps a generation."""
    end = saving.OrderlyEnd(tmp_path, 2, saves=True)
    end.on_train_begin(ARGS, None, None, model=torch.nn.Linear(2, 2))
    yield end
    end.close()


ARGS: Any = SimpleNamespace(should_save=True)


def step(end: saving.OrderlyEnd, number: int, *, save: bool = False) -> Any:
    """Ends one step as the trainer does, and saves where the control says so."""
    control = SimpleNamespace(should_training_stop=False, should_save=save)
    end.on_step_end(ARGS, SimpleNamespace(global_step=number), control)
    if control.should_save:
        end.on_save(ARGS, None, control)
    return control


def test_a_run_that_is_asked_to_end_does_so_at_a_step_that_generates(
    end: saving.OrderlyEnd,
) -> None:
    assert not step(end, 2).should_training_stop
    os.kill(os.getpid(), signal.SIGTERM)
    assert not step(end, 3).should_training_stop
    control = step(end, 4)
    assert control.should_training_stop and control.should_save
    assert end.reason == "SIGTERM" and end.error is None


def test_room_for_the_next_checkpoint_is_held_until_it_is_written(
    end: saving.OrderlyEnd, tmp_path: Path
) -> None:
    held = tmp_path / saving.RESERVE
    assert held.stat().st_size == 6 * saving.CHECKPOINT_BYTES + saving.MARGIN_BYTES
    control = SimpleNamespace(should_training_stop=False, should_save=True)
    end.on_step_end(ARGS, SimpleNamespace(global_step=2), control)
    assert not held.exists()
    end.on_save(ARGS, None, control)
    assert held.exists()
    end.close()
    assert not held.exists()


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


def test_a_disk_that_is_full_after_a_checkpoint_ends_the_run_with_it(
    end: saving.OrderlyEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    control = step(end, 2, save=True)
    assert control.should_training_stop
    assert "GB left for another checkpoint; free some" in str(end.error)


def test_a_disk_that_fills_up_between_two_checkpoints_ends_the_run_with_another(
    end: saving.OrderlyEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert not step(end, 1).should_training_stop
    control = step(end, 2)
    assert control.should_training_stop and control.should_save
    assert "GB left" in str(end.error)


def test_a_disk_without_room_for_the_first_checkpoint_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    end = saving.OrderlyEnd(tmp_path, 2, saves=True)
    try:
        with pytest.raises(UserError, match="GB left for another checkpoint"):
            end.on_train_begin(ARGS, None, None, model=torch.nn.Linear(2, 2))
    finally:
        end.close()


def test_another_fault_of_the_disk_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output error"):
        saving.reserve(tmp_path, 1)


def test_a_run_without_checkpoints_holds_no_room_and_saves_nothing_when_ended(
    tmp_path: Path,
) -> None:
    end = saving.OrderlyEnd(tmp_path, 2, saves=False)
    end.on_train_begin(ARGS, None, None, model=torch.nn.Linear(2, 2))
    try:
        end.ask("alarm")
        control = step(end, 2)
        assert control.should_training_stop and not control.should_save
        assert list(tmp_path.iterdir()) == []
    finally:
        end.close()
