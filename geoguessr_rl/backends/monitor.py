"""What a person sees of a training run: a row a step, curves, sample completions, alarms.

Everything is read from what TRL collects over all processes after each generation, so that the main
process sees the whole batch. Nothing here changes what is trained.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

from tqdm import tqdm
from transformers import TrainerCallback

from geoguessr_rl import alarms, samples
from geoguessr_rl.alarms import Alarm, Rollout
from geoguessr_rl.artifacts import blocks
from geoguessr_rl.backends.progress import Column
from geoguessr_rl.backends.saving import OrderlyEnd
from geoguessr_rl.config import AlarmName
from geoguessr_rl.records import Photo
from geoguessr_rl.reward import completion_text

GENERATING = "frac_reward_zero_std"  # a figure that only the log of a generating step has


_INERT = str.maketrans("|\n", "/ ")  # in a Markdown table


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _time_left(hours: float) -> str:
    seconds = round(3600 * hours)
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


COLUMNS = (
    Column("reward", "reward", "{:.3f}".format),
    Column("format", "rewards/reward_format/mean", _percent),
    Column("country", "rewards/reward_country/mean", _percent),
    Column(" dist", "rewards/reward_dist/mean", "{:.3f}".format),
    Column("GeoScore", "geoscore", "{:,.0f}".format),
    Column("no spread", GENERATING, _percent),
    Column("entropy", "entropy", "{:.3f}".format),
    Column("tokens", "completions/mean_length", "{:.0f}".format),
    Column(" cut", "completions/clipped_ratio", _percent),
    Column("   sec", "seconds", "{:.1f}".format),
    Column("dollars", "dollars", "{:.2f}".format),
    Column("  left", "hours_left", _time_left),
)


class Monitor(TrainerCallback):
    """Adds its figures to each log before anybody reports it; prints, and asks a run to end."""

    def __init__(
        self,
        trainer: Any,
        photos: Sequence[Photo],
        *,
        samples_every: int,
        stop_on: Sequence[AlarmName],
        dollars_per_hour: float,
        every: int,
        started: float,
        end: OrderlyEnd,
    ) -> None:
        """Watches the trainer's generations, and reads its logs before its other callbacks do.

        Args:
            trainer: A `GRPOTrainer` with our reward functions.
            photos: The train photos.
            samples_every: Steps between two tables of samples.
            stop_on: Alarms that end the run.
            dollars_per_hour: The price of all GPUs together.
            every: Optimizer steps a generation.
            started: When the costs began, on `time.monotonic`'s clock.
            end: What ends the run.
        """
        self._trainer, self._end = trainer, end
        self._photos = {photo.id: photo for photo in photos}
        self._samples_every, self._stop_on = samples_every, stop_on
        self._dollars_per_hour, self._every = dollars_per_hour, every
        self._started = self._ended = started
        self._hours_before = 0.0
        self._seconds: deque[float] = deque(maxlen=8 * every)  # of the last steps
        self._unlogged: list[float] = []
        self._history: list[Rollout] = []
        self._seen: tuple[Counter[str], Counter[str]] | None = None
        self._active: set[AlarmName] = set()
        self._lines: list[str] = []  # what is said below the step's row
        generate = trainer._generate_and_score_completions

        def watched(inputs: Any) -> Any:
            outputs = generate(inputs)
            if trainer.accelerator.is_main_process and trainer.model.training:
                self._look_at_rollouts()
            return outputs

        trainer._generate_and_score_completions = watched
        trainer.callback_handler.callbacks.insert(0, self)

    def _look_at_rollouts(self) -> None:
        """Reads the generation batch that TRL has just scored."""
        logs = self._trainer._logs
        extra, rewards = logs["extra"], list(logs["rewards"]["reward_total"])
        truths = [self._photos[identifier].country_iso2 for identifier in extra["id"]]
        answered = Counter(country for country in extra["country"] if country)
        metrics = self._trainer._metrics["train"]
        groups = blocks(rewards, self._trainer.num_generations)
        metrics["group_std"].append(fmean(map(stdev, groups)))
        if answered:
            metrics["top_country_share"].append(max(answered.values()) / answered.total())
        self._seen = (answered, Counter(truths))
        step = self._trainer.state.global_step
        if step % self._samples_every < self._every:
            first = range(0, len(rewards), self._trainer.num_generations)
            self._show_samples(
                [
                    samples.Sample(
                        step,
                        extra["id"][i],
                        truths[i],
                        extra["country"][i],
                        None if math.isnan(extra["d_km"][i]) else extra["d_km"][i],
                        rewards[i],
                        completion_text(logs["completion"][i]),
                    )
                    for i in first[: samples.A_TABLE]
                ]
            )

    def _show_samples(self, table: Sequence[samples.Sample]) -> None:
        """Writes samples to the page, the terminal and the reporters; these get no photo."""
        samples.add(Path(self._trainer.args.output_dir), table, self._photos)
        self._lines += samples.lines(table[:2])
        cells = [list(samples.cells(sample)) for sample in table]
        step = table[0].step
        for callback in self._trainer.callback_handler.callbacks:
            if writer := getattr(callback, "tb_writer", None):
                rows = [samples.HEAD, ["---"] * len(samples.HEAD), *cells]
                plain = [[cell.translate(_INERT) for cell in row] for row in rows]
                writer.add_text("samples", "\n".join("|".join(row) for row in plain), step)
            for name in ("_wandb", "_trackio"):
                if reporter := getattr(callback, name, None):
                    table_there = reporter.Table(columns=list(samples.HEAD), data=cells)
                    reporter.log({"samples": table_there})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes up what a resumed run has cost and seen before."""
        self._hours_before = next(
            (log["hours"] for log in reversed(state.log_history) if "hours" in log), 0.0
        )
        self._history = [
            Rollout(log["step"], log, Counter(), Counter())
            for log in state.log_history
            if GENERATING in log
        ]
        self._ended = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Says what the step before gave rise to, below its row."""
        for line in self._lines:
            tqdm.write(line)
        self._lines = []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Says what the last step gave rise to."""
        self.on_step_begin(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the step's time, from the end of the one before."""
        now = time.monotonic()
        self._unlogged.append(now - self._ended)
        self._seconds.append(now - self._ended)
        self._ended = now

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds costs and alarms to the log that the other callbacks report and the state keeps."""
        if not self._unlogged or not state.is_world_process_zero:
            return  # the summary at the end
        logs |= self._costs(state)
        if self._seen is not None:
            self._history.append(Rollout(state.global_step, dict(logs), *self._seen))
            self._seen = None
            found = alarms.check(self._history)
            names = {alarm.name for alarm in found}
            logs |= {f"alarms/{name}": float(name in names) for name in get_args(AlarmName)[:-1]}
            self._raise([alarm for alarm in found if alarm.name not in self._active], state)
            self._active = names
        state.log_history[-1] |= logs

    def _costs(self, state: Any) -> Mapping[str, float]:
        """Returns what the run has taken and will take; also see `TrainerState`."""
        hours = self._hours_before + (time.monotonic() - self._started) / 3600
        seconds = fmean(self._unlogged)
        self._unlogged = []
        # Whole generations: their first step takes longer than the others.
        whole = len(self._seconds) // self._every * self._every or len(self._seconds)
        pace = fmean(list(self._seconds)[-whole:])
        return {
            "seconds": seconds,
            "hours": hours,
            "dollars": hours * self._dollars_per_hour,
            "hours_left": (state.max_steps - state.global_step) * pace / 3600,
        }

    def _raise(self, fresh: Sequence[Alarm], state: Any) -> None:
        """Says each alarm once as long as it lasts, and ends the run where the config says so."""
        for alarm in fresh:
            folder = self._trainer.args.output_dir
            command = f"scripts/run_eval.py --run_name check --lora {folder}"
            self._lines.append(
                f"ALARM {alarm.name} at step {state.global_step}: {alarm} ({command})"
            )
            if alarm.name in self._stop_on:
                self._end.ask(f"alarm {alarm.name}, which stop.on names")
