"""A progress bar for TRL's trainers whose log lines fit a terminal.

The whole log goes to TensorBoard or Weights & Biases and to `trainer_state.json`.
"""

from collections.abc import Sequence
from typing import Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback


class CompactProgress(ProgressCallback):
    """Writes a few chosen figures a log call instead of the whole dictionary."""

    def __init__(self, shown: Sequence[tuple[str, str, int]]) -> None:
        """Takes (name to print, the log's key, digits) for each figure."""
        super().__init__()
        self._shown = shown

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Writes one line above the bar; logs without any of the figures write none."""
        found = [
            f"{name} {float(logs[key]):.{digits}f}"
            for name, key, digits in self._shown
            if key in (logs or {})
        ]
        if found and self.training_bar is not None:
            self.training_bar.write(f"step {state.global_step:4d}  " + "  ".join(found))


def show_compactly(trainer: Any, shown: Sequence[tuple[str, str, int]]) -> None:
    """Replaces a trainer's own progress output."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(CompactProgress(shown))
