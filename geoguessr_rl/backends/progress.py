"""A progress bar for TRL's trainers, and above it a table with one row a logged step.

The whole log goes to TensorBoard, Weights & Biases or Trackio, and to `trainer_state.json`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback

ROWS_A_HEAD = 20


class Column(NamedTuple):
    """One figure of the table: its head, its key in the log, and how it is written."""

    head: str
    key: str
    write: Callable[[float], str]


def row(columns: Sequence[Column], step: int, logs: Mapping[str, Any]) -> str | None:
    """Returns a table row; figures that the step has not are blank, and None when it has none."""
    cells = [
        column.write(logs[column.key]) if logs.get(column.key) is not None else ""
        for column in columns
    ]
    if not any(cells):
        return None
    return f"{step:5d}" + "".join(
        f"  {cell:>{len(column.head)}}" for column, cell in zip(columns, cells, strict=True)
    )


class StepTable(ProgressCallback):
    """Writes a row of chosen figures a log call instead of the whole dictionary."""

    def __init__(self, columns: Sequence[Column]) -> None:
        """Takes the table's columns."""
        super().__init__()
        self._columns = columns
        self._rows = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Writes one row above the bar, and every now and then the head."""
        if not state.is_world_process_zero:
            return
        text = row(self._columns, state.global_step, logs or {})
        if text is None:
            return
        if self._rows % ROWS_A_HEAD == 0:
            tqdm.write(" step" + "".join(f"  {column.head}" for column in self._columns))
        self._rows += 1
        tqdm.write(text)


def show_table(trainer: Any, columns: Sequence[Column]) -> None:
    """Replaces a trainer's own progress output."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(StepTable(columns))
