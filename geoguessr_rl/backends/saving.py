"""Checkpoints that are never lost: which one a run continues from, and how it ends in time.

A trainer writes its checkpoints in place, and one that was written between two generations cannot
be continued exactly. A run stops in an orderly way when it is told to (SIGTERM), when an alarm that
the config names goes off, and while there is still room on the disk for the checkpoint that ends
it. With several processes, all of them stop at the same step.
"""

import errno
import os
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError, checkpoint_step

SET_ASIDE = "set_aside"
RESERVE = ".reserve"
MARGIN_BYTES = 64 * 2**20  # tokenizer, states and logs beside the weights
SPARE_BYTES = 16 * 2**20  # for the logs of the steps until the next checkpoint
CHECKPOINT_BYTES = 12  # a trained parameter in float32, and Adam's two moments


def choose_checkpoint(output_dir: Path, request: str | None, every: int) -> Path | None:
    """Returns the checkpoint to continue from, or None for a fresh start.

    Checkpoints that cannot be continued, and those after the chosen one, move to a folder of their
    own: the run writes anew under their names, and a half-written one must not look whole.

    Args:
        output_dir: The run's folder.
        request: `auto`, a checkpoint's folder, or None.
        every: Optimizer steps a generation; a run resumed between two generations diverges.

    Raises:
        UserError: The folder holds a run and no resume was asked for, or the checkpoint is unfit.
    """
    usable = artifacts.complete_checkpoints(output_dir)
    if request is None and usable:
        raise UserError(
            f"{output_dir} holds {usable[-1].name}; pass --resume_from_checkpoint auto to "
            "continue it, or choose another trainer.output_dir"
        )
    generating = [path for path in usable if checkpoint_step(path) % every == 0]
    chosen = generating[-1] if generating else None
    if request not in (None, "auto"):
        chosen = next((p for p in generating if p.resolve() == Path(str(request)).resolve()), None)
        if chosen is None:
            raise UserError(
                f"{request} is no complete checkpoint of {output_dir} at a multiple of {every} "
                f"steps; usable are {', '.join(path.name for path in generating) or 'none'}"
            )
    for path in sorted(output_dir.glob("checkpoint-*")):
        if path not in usable:
            _set_aside(path, "it is not complete")
        elif path not in generating:
            _set_aside(path, "its step does not generate")
        elif chosen is not None and checkpoint_step(path) > checkpoint_step(chosen):
            _set_aside(path, f"it comes after {chosen.name}")
    return chosen


def _set_aside(path: Path, why: str) -> None:
    """Moves a checkpoint out of the run's way, and says so."""
    folder = path.parent / SET_ASIDE
    folder.mkdir(exist_ok=True)
    taken = {other.name for other in folder.iterdir()}
    names = (path.name + (f"-{n}" if n else "") for n in range(len(taken) + 1))
    target = folder / next(name for name in names if name not in taken)
    path.rename(target)
    print(f"set aside {path.name}, now in {target}: {why}", flush=True)


def checkpoint_bytes(model: Any) -> int:
    """Returns how much room a checkpoint of the trained parameters takes, with a margin."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return trained * CHECKPOINT_BYTES + MARGIN_BYTES


def _no_room(folder: Path, size: int) -> UserError:
    return UserError(
        f"the disk of {folder} has no {size / 1e9:.2f} GB left for another checkpoint; free "
        "some, then pass --resume_from_checkpoint auto"
    )


def reserve(folder: Path, size: int) -> None:
    """Holds room on the disk for one checkpoint, in a file that is removed before it is written.

    Raises:
        UserError: There is no room.
    """
    path = folder / RESERVE
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                for _ in range(0, size, 2**20):
                    file.write(bytes(2**20))
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _no_room(folder, size) from None


def agreed(wanted: bool) -> bool:
    """Whether any process of the run wants something; all of them get the same answer."""
    if not torch.distributed.is_initialized():
        return wanted
    on_gpu = torch.distributed.get_backend() == "nccl"
    flag = torch.tensor(int(wanted), device="cuda" if on_gpu else "cpu")
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


class OrderlyEnd(TrainerCallback):
    """Ends a run at a step that it can be continued from, with a checkpoint.

    Add it last: it follows what the trainer's own callbacks decided about saving.

    Attributes:
        reason: Why the run was ended before its last step; None where it was not.
        error: What the user has to mend, where that is the reason.
    """

    def __init__(self, output_dir: Path, every: int, *, saves: bool) -> None:
        """Takes the run's folder, the steps a generation, and whether there are checkpoints."""
        self.reason: str | None = None
        self.error: UserError | None = None
        self._output_dir, self._every, self._saves = output_dir, every, saves
        self._wanted: str | None = None
        self._size = 0
        self._previous: Any = None

    def ask(self, reason: str) -> None:
        """Asks the run to end after the current generation's steps."""
        self._wanted = self._wanted or reason

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._wanted == "SIGTERM":  # the second one means now
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.ask("SIGTERM")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Holds room for the first checkpoint, and listens for SIGTERM."""
        self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._saves and args.should_save:
            self._size = checkpoint_bytes(kwargs["model"])
            reserve(self._output_dir, self._size)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the run, or makes room for the checkpoint that is about to be written."""
        if self._size and shutil.disk_usage(self._output_dir).free < SPARE_BYTES:
            self.error = _no_room(self._output_dir, SPARE_BYTES)
            self.ask("the disk is full")
        if state.global_step % self._every == 0 and agreed(self._wanted is not None):
            self.reason = self._wanted or "another process was asked to end"
            control.should_training_stop = True
            control.should_save = self._saves
        if control.should_save and args.should_save:
            (self._output_dir / RESERVE).unlink(missing_ok=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Holds room for the next checkpoint; without, the one just written is the last."""
        if not self._saves or control.should_training_stop:
            return
        if args.should_save:
            try:
                reserve(self._output_dir, self._size)
            except UserError as error:
                self.error = error
        if agreed(self.error is not None):
            self.reason = "the disk is full"
            control.should_training_stop = True

    def close(self) -> None:
        """Gives back the room and the signal."""
        (self._output_dir / RESERVE).unlink(missing_ok=True)
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
