"""When a training run looks wrong, in words: what is seen, and what to do.

An alarm is a reading of the run's log and ends nothing by itself: runs that looked alarming have
been the best ones, so that the first advice is always to evaluate. `stop.on` in the config makes
one end the run. This module only reads figures; `backends/monitor.py` collects and prints them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from geoguessr_rl.config import AlarmName
from geoguessr_rl.tables import country_name

WINDOW = 5
"""Rollouts that an alarm looks at; a single one is noise."""
SETTLED = 10
"""Rollouts after which a model should have found the answer format."""

MIN_FORMAT = 0.5
MAX_ZERO_SPREAD = 0.8
MIN_ENTROPY_SHARE = 0.1  # of the entropy that the run began with
MAX_COUNTRY_SHARE = 0.5
MAX_COUNTRY_EXCESS = 2.0  # times the country's share among the photos
MAX_LOGP_GAP = 0.1  # nats a token; an engine in bfloat16 is some 0.01 to 0.03 off

FIRST = "first evaluate the last checkpoint, since runs that look alarming have been the best ones"


@dataclass(frozen=True, slots=True)
class Rollout:
    """What the alarms see of one generation batch, and of the update after it.

    Attributes:
        step: The optimizer step that learned from it.
        figures: The step's log by TRL's names.
        answered: Completions by answered country; those without an answer are left out.
        photos: Completions by their photo's country.
    """

    step: int
    figures: Mapping[str, float]
    answered: Counter[str]
    photos: Counter[str]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that looks wrong: its name, what is seen, and what to do."""

    name: AlarmName
    seen: str
    advice: str

    def __str__(self) -> str:
        """Writes it as one sentence."""
        return f"{self.seen}: {FIRST}; {self.advice}"


def check(history: Sequence[Rollout]) -> list[Alarm]:
    """Returns what looks wrong at the end of a run's history, oldest rollout first."""
    recent = history[-WINDOW:]
    if len(recent) < WINDOW:
        return []
    found = (
        _format(recent, len(history)),
        _zero_spread(recent),
        _entropy(history),
        _one_country(recent),
        _drift(recent),
    )
    return [alarm for alarm in found if alarm is not None]


def _mean(rollouts: Sequence[Rollout], key: str) -> float | None:
    """Returns a figure's mean over rollouts; None where none has it."""
    values = [r.figures[key] for r in rollouts if r.figures.get(key) is not None]
    return fmean(values) if values else None


def _format(recent: Sequence[Rollout], rollouts: int) -> Alarm | None:
    rate = _mean(recent, "rewards/reward_format/mean")
    if rate is None or rate >= MIN_FORMAT or rollouts < SETTLED:
        return None
    return Alarm(
        "format_collapse",
        f"only {rate:.0%} of the last completions hold an answer",
        "then read raw completions in samples.html: look for a thinking block that the template "
        "opens, an ignored tag, or answers cut at max_completion_length",
    )


def _zero_spread(recent: Sequence[Rollout]) -> Alarm | None:
    share = _mean(recent, "frac_reward_zero_std")
    if share is None or share <= MAX_ZERO_SPREAD:
        return None
    return Alarm(
        "zero_spread",
        f"{share:.0%} of the groups have no spread in reward, and teach nothing",
        "then filter the photos again with the current adapter, or compare the shapes in "
        "scripts/reward_lab.py",
    )


def _entropy(history: Sequence[Rollout]) -> Alarm | None:
    # 0 is what TRL logs for a step whose completions were all cut off and masked.
    known = [rollout for rollout in history if rollout.figures.get("entropy")]
    first, now = _mean(known[:WINDOW], "entropy"), _mean(known[-WINDOW:], "entropy")
    if not first or now is None or now >= MIN_ENTROPY_SHARE * first:
        return None
    return Alarm(
        "entropy_collapse",
        f"the entropy fell from {first:.3f} to {now:.3f} nats a token, so that groups answer alike",
        "then lower trainer.learning_rate, or set trainer.beta to 0.001",
    )


def _one_country(recent: Sequence[Rollout]) -> Alarm | None:
    answered = sum((r.answered for r in recent), Counter[str]())
    photos = sum((r.photos for r in recent), Counter[str]())
    if not answered:
        return None
    ((country, count),) = answered.most_common(1)
    said, true = count / answered.total(), photos[country] / photos.total()
    if said <= MAX_COUNTRY_SHARE or said <= MAX_COUNTRY_EXCESS * true:
        return None
    return Alarm(
        "one_country",
        f"{said:.0%} of the last answers name {country_name(country)}, and {true:.0%} of the "
        "photos are from there",
        "then lower the cap a country in the data, or raise reward.parameters.country_weight",
    )


def _drift(recent: Sequence[Rollout]) -> Alarm | None:
    gap = _mean(recent, "sampling/sampling_logp_difference/mean")
    if gap is None or gap <= MAX_LOGP_GAP:
        return None
    return Alarm(
        "drift",
        f"sampler and trainer are {gap:.2f} nats a token apart, so that the update corrects for "
        "another policy than the one that is trained",
        "then run scripts/preflight.py, which finds out whether weights, prompts or photos differ",
    )
