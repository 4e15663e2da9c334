"""Preflight: a few minutes of checks before hours of GPU, and the overfit test.

Every check prints one line: what was measured, what is wrong and what to do, or why it was skipped.
One that fails hides none after it, except those that need what it could not build. Config and data
are checked here, the machine by `backends/machine.py`, model and engine by `backends/probes.py`,
real steps by `backends/rehearsal.py`, on one trainer that `train` builds. It runs in one process,
nothing that it learns stays, and it writes one file. It is long because all checks, their order and
what they need of each other are read in one place.
"""

import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Literal

from PIL import Image

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.budget import ModelShape
from geoguessr_rl.config import GrpoConfig, ImagePolicy
from geoguessr_rl.images import VISUAL_TOKEN_PIXELS, fitted_size, visual_tokens
from geoguessr_rl.phases import train
from geoguessr_rl.records import Photo

RESULT = "preflight.json"
HASHED = 32  # photos whose bytes are compared with the manifest
LARGEST_PHOTO = ImagePolicy().max_pixels // VISUAL_TOKEN_PIXELS  # in tokens
PROBED = 4  # photos of different sizes that go through processor, trainer and engine

# The probe trainer is the run's, with its batches and its engine. It differs in what would hide the
# gradient (a learning rate that warms up from 0, a loss that leaves out cut completions, which all
# of an untrained model's are) and in what leaves traces.
PROBE: dict[str, Any] = {
    "max_steps": 2,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "mask_truncated_completions": False,
    "vllm_importance_sampling_correction": True,  # TRL scores the completions again only then
    "log_completions": False,
    "disable_tqdm": True,
}
UNSAVED: dict[str, Any] = {"save_strategy": "no", "report_to": "none"}

OVERFIT_STEPS = 100
OVERFIT_RATE = 1e-4
OVERFIT_REWARD, OVERFIT_GAIN = 0.9, 0.3
OVERFIT_LAST = 10  # generating steps whose mean reward is the end

NAME_WIDTH = 15
UNMET = "did not pass"
Outcome = Literal["pass", "FAIL", "skip"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one check, as it is printed and written."""

    name: str
    outcome: Outcome
    detail: str
    seconds: float

    def __str__(self) -> str:
        """Writes it as one line."""
        return f"{self.outcome}  {self.name:<{NAME_WIDTH}}  {self.detail}"


class Subject:
    """What is checked. Each part is built when a check first asks, and later checks use it too."""

    def __init__(self, config: GrpoConfig, source: str, scratch: Path) -> None:
        """Takes the config, its file's name for messages, and a folder for the trainer's files."""
        self.config, self.source, self.scratch = config, source, scratch

    def section(self) -> dict[str, Any]:
        """Returns the checked trainer section."""
        return train.check_trainer_keys(self.config.trainer, self.source)

    @cached_property
    def args(self) -> Any:
        """The run's own `GRPOConfig`."""
        return build_args(self.section())

    @cached_property
    def output_dir(self) -> Path:
        """Where the run will write."""
        return Path(self.config.trainer.get("output_dir") or "trainer_output")

    @cached_property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        from geoguessr_rl.backends import planning

        return planning.model_shape(self.config.model.name, self.config.lora)

    @cached_property
    def split(self) -> data.Split:
        """The train photos."""
        return data.load_split(self.config.data_dir, self.config.split, limit=self.config.limit)

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """Each photo's size, in the split's order."""
        return [stored_size(photo) for photo in self.split.photos]

    @cached_property
    def trainer(self) -> Any:
        """The mended trainer that the model's checks share, with its engine where it has one."""
        from geoguessr_rl.backends.progress import StepTable

        probe = {**self.section(), **PROBE, **UNSAVED, "output_dir": str(self.scratch)}
        if no_engine(self):
            probe["use_vllm"] = False
        trainer = train.build_trainer(self.config, build_args(probe), self.split.photos)
        trainer.remove_callback(StepTable)
        return trainer

    @cached_property
    def prompts(self) -> Any:
        """The prompts of photos of the most different sizes, for the model's checks."""
        from geoguessr_rl.backends import probes

        photos = different_sizes(self.split.photos, self.sizes, PROBED)
        return probes.conversations(photos, self.config.prompt.style)

    @cached_property
    def rollouts(self) -> Any:
        """One real generation batch."""
        from geoguessr_rl.backends import rehearsal

        return rehearsal.roll_out(self.trainer)


def no_gpu(subject: Subject) -> str | None:
    """Returns why checks of the GPU have no meaning; None where there is one, even out of order."""
    import torch

    from geoguessr_rl.backends import machine

    there = torch.cuda.is_available() or machine.driver_version()
    return None if there and not subject.config.trainer.get("use_cpu") else "the run is on the CPU"


def no_engine(subject: Subject) -> str | None:
    """Returns why there is no engine in this process; None where there is one."""
    if not subject.args.use_vllm:
        return "trainer.use_vllm is false: the trainer's own model generates"
    if subject.args.vllm_mode != "colocate":
        return f"trainer.vllm_mode is {subject.args.vllm_mode}: the engine is another process"
    return None


def no_plan(subject: Subject) -> str | None:
    """Returns why this GPU's memory cannot be planned."""
    elsewhere = no_engine(subject) if subject.args.use_vllm else None
    return no_gpu(subject) or elsewhere


def build_args(section: Mapping[str, Any]) -> Any:
    """Returns the `GRPOConfig` of a checked section on this machine."""
    import torch

    return train.build_args(section, use_cpu=not torch.cuda.is_available())


def stored_size(photo: Photo) -> tuple[int, int]:
    """Returns a photo file's (width, height) without decoding it."""
    try:
        with Image.open(photo.path) as image:
            return image.size
    except OSError as error:
        raise UserError(f"{photo.path} is damaged ({error}); {data.PREPARE_REMEDY}") from None


def different_sizes(
    photos: Sequence[Photo], sizes: Sequence[tuple[int, int]], count: int
) -> list[Photo]:
    """Returns photos of different sizes, the smallest and the largest among them."""
    by_size = dict(zip(reversed(sizes), reversed(photos), strict=True))  # the first of each size
    ranked = sorted(by_size, key=lambda size: (visual_tokens(size), size))
    step = (len(ranked) - 1) / max(1, count - 1)
    chosen = dict.fromkeys(ranked[round(number * step)] for number in range(count))
    return [by_size[size] for size in chosen]


def config_keys(subject: Subject) -> str:
    """Checks the trainer section, and that its values fit each other."""
    from geoguessr_rl.backends import stack

    stack.require_token_level_correction(subject.section())
    args = subject.args
    return (
        f"{len(subject.section())} trainer keys; {train.prompts_a_generation(args)} photos x "
        f"{args.num_generations} completions every {train.steps_a_generation(args)} steps"
    )


def data_roles(subject: Subject) -> str:
    """Checks that the photos may be trained on and that none is measured on."""
    split, folder = subject.split, subject.config.data_dir
    data.require_train_role(split, folder)
    manifests = map(data.read_manifest, sorted(folder.glob("*.manifest.json")))
    kept = [manifest["split"] for manifest in manifests if manifest["role"] == "evaluation"]
    apart = f"none of them in {', '.join(kept)}" if kept else "and no evaluation split beside them"
    return f"{len(split.photos)} photos of {split.name}, {apart}"


def photos(subject: Subject) -> str:
    """Checks that the photo files are there, are the manifest's, and have the policy's sizes."""
    split, folder = subject.split, subject.config.data_dir
    gone = [photo.path for photo in split.photos if not photo.path.is_file()]
    if gone:
        raise UserError(f"{len(gone)} photos are missing, {gone[0]} first; {data.PREPARE_REMEDY}")
    manifest = data.read_manifest(data.manifest_path(folder, split.name))
    sha256 = {row["id"]: row["sha256"] for row in manifest["photos"]}
    sample = random.Random(0).sample(split.photos, min(HASHED, len(split.photos)))
    for photo in sample:
        if artifacts.file_sha256(photo.path) != sha256[photo.id]:
            raise UserError(
                f"{photo.path} is not the file that was prepared; {data.PREPARE_REMEDY}"
            )
    policy = ImagePolicy(**split.image_policy)
    for size in sorted(set(subject.sizes)):
        if fitted_size(*size, policy) != size:
            example = split.photos[subject.sizes.index(size)].path
            raise UserError(
                f"{example} has {size[0]} x {size[1]} pixels, which the image policy of its split "
                f"does not allow; {data.PREPARE_REMEDY}"
            )
    return f"{len(split.photos)} files of the policy's sizes, {len(sample)} hashes as prepared"


def chat_prompt(subject: Subject) -> str:
    """Checks the prompt that the chat template makes."""
    from geoguessr_rl.backends import models, probes

    processor = models.load_processor(subject.config.model.name)
    return probes.rendered_prompt(
        processor, subject.config.prompt.style, models.template_kwargs(processor)
    )


def built_trainer(subject: Subject) -> str:
    """Builds the trainer, and starts the engine in it."""
    trainer = subject.trainer
    engine = "no engine in this process" if no_engine(subject) else "a colocated engine"
    kind = str(trainer.model.dtype).removeprefix("torch.")
    return f"{kind} on {trainer.accelerator.device}, {engine}"


def adapter_reaches(subject: Subject) -> str:
    """Checks that a perturbed adapter is heard in the trainer and in the engine."""
    from geoguessr_rl.backends import probes

    measured, deaf = probes.adapter_reaches(subject.trainer, subject.prompts), no_engine(subject)
    return f"{measured}; skipped in the engine: {deaf}" if deaf else measured


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: As it is printed.
        work: Returns what was measured; raises UserError or StackFaultError with what is wrong.
        needs: Checks that must have passed.
        unless: Returns why the check has no meaning here, or None.
        hint: What takes long about it.
    """

    name: str
    work: Callable[[Subject], str]
    needs: tuple[str, ...] = ()
    unless: Callable[[Subject], str | None] = lambda subject: None
    hint: str = ""


def all_checks() -> tuple[Check, ...]:
    """Returns every check in its order: the cheap ones first."""
    from geoguessr_rl.backends import machine, planning, probes, rehearsal

    keys, trainer = ("config keys",), ("trainer",)
    return (
        Check(
            "versions",
            lambda s: machine.versions(use_vllm=bool(s.config.trainer.get("use_vllm"))),
        ),
        Check("config keys", config_keys),
        Check("driver", lambda s: machine.driver(), unless=no_gpu),
        Check(
            "GPU memory",
            lambda s: machine.gpu_memory(
                s.shape, planning.run_shape(s.config, s.args, LARGEST_PHOTO)
            ),
            ("driver", *keys),
            no_plan,
        ),
        Check(
            "flash attention",
            lambda s: machine.attention(s.config.model.dtype),
            ("driver",),
            no_gpu,
        ),
        Check(
            "system memory",
            lambda s: machine.system_memory(
                s.shape,
                s.config.model.dtype,
                on_cpu=s.args.use_cpu,
                with_engine=no_engine(s) is None,
            ),
            keys,
        ),
        Check("disk", lambda s: machine.disk(s.shape, s.args, s.output_dir), keys),
        Check("data roles", data_roles),
        Check("photos", photos, ("data roles",), hint="opens every file"),
        Check("chat prompt", chat_prompt),
        Check(
            "trainer",
            built_trainer,
            (*keys, "data roles", "photos"),
            hint="loads the model and starts the engine, minutes on a GPU",
        ),
        Check(
            "photo tokens",
            lambda s: probes.photo_tokens(s.trainer, s.prompts, len(set(s.sizes))),
            trainer,
        ),
        Check(
            "engine agrees",
            lambda s: probes.engine_agrees(s.trainer, s.prompts),
            trainer,
            no_engine,
            "answers with the engine and with transformers",
        ),
        Check(
            "adapter reaches",
            adapter_reaches,
            trainer,
            hint="perturbs the adapter until the answers change",
        ),
        Check("base weights", lambda s: probes.base_unchanged(s.trainer), trainer, no_engine),
        Check(
            "sampler gap",
            lambda s: rehearsal.sampler_gap(s.trainer, s.rollouts),
            trainer,
            no_engine,
            "generates and scores one real batch",
        ),
        Check(
            "reward spread",
            lambda s: rehearsal.reward_spread(s.rollouts),
            trainer,
            hint="reads one real batch",
        ),
        Check(
            "gradient",
            lambda s: rehearsal.gradient_flows(s.trainer),
            trainer,
            hint="trains two steps on made-up rewards",
        ),
    )


def attempt(check: Check, subject: Subject, before: Sequence[Result] = ()) -> Result:
    """Runs one check; whatever it raises is its result, so that it hides none after it."""
    from geoguessr_rl.backends.stack import StackFaultError

    started = time.monotonic()

    def result(outcome: Outcome, detail: str) -> Result:
        return Result(check.name, outcome, detail, round(time.monotonic() - started, 2))

    # A check that was skipped for a good reason stands in nobody's way.
    failed = [one.name for one in before if one.outcome == "FAIL" or one.detail.endswith(UNMET)]
    if unmet := [name for name in check.needs if name in failed]:
        return result("skip", f"{unmet[0]} {UNMET}")
    try:
        if reason := check.unless(subject):
            return result("skip", reason)
        if check.hint:
            print(f"      {check.name:<{NAME_WIDTH}}  {check.hint} ...", flush=True)
        return result("pass", check.work(subject))
    except (UserError, StackFaultError) as error:
        return result("FAIL", str(error))
    except Exception as error:  # a bug, or an engine out of memory: one line, and shown whole
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        return result("FAIL", f"{type(error).__name__}: {first}; see the traceback")


def run(config: GrpoConfig, source: str) -> bool:
    """Runs every check, prints and writes the results, and returns whether none failed.

    Args:
        config: The training config.
        source: Its file's name, for messages.

    Raises:
        UserError: It was launched in several processes, or the result cannot be written.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "preflight runs in one process; call python scripts/preflight.py without a "
            "launcher, and with CUDA_VISIBLE_DEVICES=0"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # their own lines would bury ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    results: list[Result] = []
    with TemporaryDirectory() as scratch:
        subject = Subject(config, source, Path(scratch))
        for check in all_checks():
            results.append(attempt(check, subject, results))
            print(results[-1], flush=True)
    out = subject.output_dir / RESULT
    try:
        artifacts.write_json(out, {"config": source, "checks": results})
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error}); mend trainer.output_dir") from None
    counts: Counter[str] = Counter(result.outcome for result in results)
    print(summary_line(counts, sum(result.seconds for result in results), out), flush=True)
    return not counts["FAIL"]


def summary_line(counts: Mapping[str, int], seconds: float, out: Path) -> str:
    """Returns the one line at the end."""
    verdict = "do not start the run" if counts["FAIL"] else "ready to train"
    return (
        f"{verdict}: {counts['pass']} passed, {counts['FAIL']} failed, {counts['skip']} skipped in "
        f"{seconds:.0f} s; {out}"
    )


def mixed_countries(photos: Sequence[Photo], count: int) -> list[Photo]:
    """Returns the first photos of the split, one of every country before a second of any."""
    seen: Counter[str] = Counter()
    turns = []
    for photo in photos:
        turns.append(seen[photo.country_iso2])
        seen[photo.country_iso2] += 1
    order = sorted(range(len(photos)), key=lambda number: (turns[number], number))
    return [photos[number] for number in order[:count]]


def overfit(config: GrpoConfig, source: str, count: int) -> bool:
    """Trains on a few photos alone, and returns whether the command succeeds.

    A reward that does not rise on four photos will not on four thousand. The photos' reward is
    compared with its start, which says nothing about other photos. It is advice: only where
    `stop.on` names `overfit` does a failure fail the command.

    Raises:
        UserError: A key, the data or the model is unfit.
    """
    from geoguessr_rl.backends import stack

    if count < 1:
        raise UserError(f"--overfit {count} must be 1 or more; 4 is a good number")
    section = train.check_trainer_keys(config.trainer, source)
    stack.require_known_stack(use_vllm=bool(section.get("use_vllm")))
    stack.require_token_level_correction(section)
    split = data.load_split(config.data_dir, config.split, limit=config.limit)
    data.require_train_role(split, config.data_dir)
    chosen = mixed_countries(split.photos, count)
    countries = ", ".join(photo.country_iso2 for photo in chosen)
    print(f"overfit: {OVERFIT_STEPS} steps on {len(chosen)} photos ({countries})", flush=True)
    with TemporaryDirectory() as scratch:
        section |= {
            **UNSAVED,
            "output_dir": scratch,
            "max_steps": OVERFIT_STEPS,
            "learning_rate": OVERFIT_RATE,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
        }
        trainer = train.build_trainer(config, build_args(section), chosen)
        trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    start, end = rewards[0], fmean(rewards[-OVERFIT_LAST:])
    passed = end >= OVERFIT_REWARD or end - start >= OVERFIT_GAIN
    fails = not passed and "overfit" in config.stop.on
    print(overfit_line(start, end, passed=passed, advisory=not fails), flush=True)
    return not fails


def overfit_line(start: float, end: float, *, passed: bool, advisory: bool) -> str:
    """Returns the verdict in one line."""
    measured = f"reward {start:.3f} at the first step, {end:.3f} over the last {OVERFIT_LAST}"
    if passed:
        return f"pass  overfit  {measured}"
    note = "; advice only, unless stop.on names overfit" if advisory else ""
    return (
        f"FAIL  overfit  {measured}; it takes {OVERFIT_REWARD} or {OVERFIT_GAIN} more than the "
        f"start: read raw completions, and run scripts/preflight.py{note}"
    )
