"""Times what runs often or long, and fails when it has become too slow.

`python scripts/benchmark.py` runs every task, `python scripts/benchmark.py reward` one. The exit
code is 1 when a task breaks its bound. To add a task, write a function and name it in `TASKS`. Run
it alone on the machine. `data` needs Linux, 10 GB of disk and about ten minutes; `eval` needs vLLM.
"""

import argparse
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import zipfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from geoguessr_rl.config import CONFIGS, ImagePolicy
from geoguessr_rl.countries import CODES
from geoguessr_rl.parsing import parse_answer
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.reward import components

REWARD_BOUND_US = 50.0

_CLUES = (
    "Cyrillic signs above a kiosk, a long straight road with a worn dashed centre line, dry steppe "
    "grass up to the horizon, low concrete poles with two insulators, a white plate with a blue "
    "band, and a pale dry sky. The people drive on the right. All of it fits Central Asia, and the "
    "letters on the second sign are Kazakh, not Russian."
)


def _microseconds(call: Callable[[], object], calls: int = 2000, repeats: int = 7) -> float:
    """Returns the least time of one call: what disturbs a measurement only ever adds to it."""
    return min(timeit.repeat(call, number=calls, repeat=repeats)) / calls * 1e6


def reward() -> bool:
    """Times the scoring of a usual completion: GRPO scores 64 of them between two steps."""
    text = format_completion("Kazakhstan", 49.8, 73.1, clues=_CLUES, style="think")
    parsing = _microseconds(lambda: parse_answer(text))
    # `components` parses once more itself; the sum is the bound's own way to count.
    scoring = _microseconds(lambda: components(text, 43.2, 76.9, "KZ"))
    total = parsing + scoring
    print(f"reward: a completion of {len(text)} characters")
    print(f"  parse_answer {parsing:.1f} us + components {scoring:.1f} us = {total:.1f} us")
    print(f"  bound {REWARD_BOUND_US:.0f} us: {'kept' if total < REWARD_BOUND_US else 'BROKEN'}")
    return total < REWARD_BOUND_US


DATA_BOUND_SECONDS = 60.0
DATA_BOUND_BYTES = 1.5e9
DATA_BOUND_SPEEDUP = 4.0
CSV_ROWS = 4_900_000
ZIP_PHOTOS = 50_000
WORKERS = 2


def _csv_rows(ids: np.ndarray, rng: np.random.Generator) -> pl.DataFrame:
    """Returns rows about as wide as OSV-5M's, with countries as unevenly spread."""
    from geoguessr_rl.embedded import OSV5M_COLUMNS

    n = len(ids)
    codes = np.array(sorted(CODES))[:222]
    share = np.random.default_rng(1).pareto(1.0, len(codes)) + 0.1
    country = pl.Series(rng.choice(codes, n, p=share / share.sum()))
    frame = pl.DataFrame({name: rng.integers(0, 9999, n) for name in OSV5M_COLUMNS})
    place = pl.col("city").cast(pl.String)
    return frame.with_columns(
        pl.Series("id", ids).cast(pl.String),
        country.alias("country"),
        pl.Series("latitude", np.degrees(np.arcsin(rng.uniform(-0.9, 0.95, n)))),
        pl.Series("longitude", rng.uniform(-180, 180, n)),
        pl.lit("thumbnail" * 20).alias("thumb_original_url"),
        pl.lit("(0, 8)").alias("cell"),
        (pl.lit("sequence-") + pl.Series(rng.integers(0, 3_000_000, n)).cast(pl.String)).alias(
            "sequence"
        ),
        *((pl.lit(f"{name} ") + place).alias(name) for name in ("region", "sub-region", "city")),
        *((pl.lit(f"{name} ") + place).alias(name) for name in OSV5M_COLUMNS if "unique" in name),
        (pl.lit("mapper ") + pl.col("creator_id").cast(pl.String)).alias("creator_username"),
    ).select(OSV5M_COLUMNS)


def _photos(count: int, rng: np.random.Generator) -> list[bytes]:
    """Returns JPEGs of about 50 kB; every third has a size that the image policy changes."""
    from PIL import Image

    photos = []
    for n in range(count):
        size = (800, 600) if n % 3 == 0 else (640, 480)
        blobs = Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
        photo = np.asarray(blobs.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.integers(-5, 6, (size[1], size[0], 1))
        out = io.BytesIO()
        Image.fromarray((photo + grain).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=75)
        photos.append(out.getvalue())
    return photos


def _draw_osv5m(root: Path) -> None:
    """Writes a synthetic OSV-5M at full scale: a CSV of 2 GB and three zips."""
    rng = np.random.default_rng(0)
    total = CSV_ROWS + ZIP_PHOTOS // 10
    ids = rng.permutation(total).astype(np.int64) * 17 + 10**15
    zips = {
        "test/00": ids[CSV_ROWS:],
        "train/00": ids[:ZIP_PHOTOS],
        "train/01": ids[ZIP_PHOTOS : 2 * ZIP_PHOTOS],
    }
    for name, members in zips.items():
        path = root / "images" / f"{name}.zip"
        path.parent.mkdir(parents=True, exist_ok=True)
        photos = _photos(1000, rng)
        with zipfile.ZipFile(path, "w") as file:
            for n, member in enumerate(members):
                file.writestr(f"{path.stem}/{member}.jpg", photos[n % len(photos)])
    _csv_rows(ids[CSV_ROWS:], rng).write_csv(root / "test.csv")
    shuffled = rng.permutation(ids[:CSV_ROWS])
    with (root / "train.csv").open("wb") as file:
        for start in range(0, CSV_ROWS, 700_000):
            part = _csv_rows(shuffled[start : start + 700_000], rng)
            part.write_csv(file, include_header=start == 0)


def _tree_bytes(pid: int) -> int:
    """Returns the memory of a process and its children; shared pages count once."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
            todo += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except OSError:  # it has just ended
            continue
        total += sum(
            1024 * int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total


def _run(*command: object) -> None:
    """Runs a script of the project, and raises with what it printed when it fails."""
    root = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, *map(str, command)], cwd=root, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(ended.stdout + ended.stderr)


def _watch(folder: Path, *command: object) -> tuple[float, int]:
    """Runs a script of the project; returns its seconds and its peak memory in bytes."""
    log = folder / "watched.log"
    start, peak = time.perf_counter(), 0
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=output, stderr=output, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(0.05)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(log.read_text())
    return seconds, peak


def _prepare(root: Path, *settings: str) -> tuple[float, int, int]:
    """Prepares from local files in a fresh folder; returns seconds, peak bytes and train rows."""
    with tempfile.TemporaryDirectory(dir=root) as out:
        flags = [part for setting in settings for part in ("--set", setting)]
        places = ("--source", root, "--output_dir", out, "--workers", WORKERS)
        seconds, peak = _watch(root, "scripts/prepare_data.py", *places, *flags)
        return seconds, peak, pl.read_parquet(Path(out) / "train_pool.parquet").height


def _encode_all(names: Sequence[str], archive: Path) -> int:
    """Reads, decodes and re-encodes photos as a pipeline without selection does."""
    from geoguessr_rl.images import fit, open_upright
    from geoguessr_rl.sources import read_photo

    policy = ImagePolicy()
    for name in names:
        image = fit(open_upright(read_photo(str(archive), name)), policy)
        image.save(io.BytesIO(), "JPEG", quality=policy.jpeg_quality)
    return len(names)


def data() -> bool:
    """Prepares a synthetic OSV-5M at full scale, against re-encoding every photo of it."""
    from geoguessr_rl.photos import in_parallel

    kept = []

    def bound(text: str, holds: bool) -> None:
        kept.append(holds)
        print(f"  {text}: {'kept' if holds else 'BROKEN'}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print(
            f"data: drawing {CSV_ROWS:,} CSV rows and {2 * ZIP_PHOTOS:,} train photos", flush=True
        )
        _draw_osv5m(root)
        sizes = [path.stat().st_size / 1e9 for path in (root / "train.csv", *root.rglob("0?.zip"))]
        print(f"  train.csv {sizes[0]:.1f} GB, zips {sum(sizes[1:]):.1f} GB")
        seconds, peak, rows = _prepare(root)
        print(f"  phase 1 takes {rows} train photos in {seconds:.1f} s with {WORKERS} processes")
        bound(f"at most {DATA_BOUND_SECONDS:.0f} s", seconds <= DATA_BOUND_SECONDS)
        bound(f"peak {peak / 1e9:.2f} GB, under 1.5 GB", peak < DATA_BOUND_BYTES)

        start, photos = time.perf_counter(), 0
        for archive in sorted(root.rglob("0?.zip")):
            names = zipfile.ZipFile(archive).namelist()
            photos += sum(in_parallel(partial(_encode_all, archive=archive), names, WORKERS))
        naive = time.perf_counter() - start
        print(f"  reading, decoding and re-encoding all {photos} photos: {naive:.1f} s")
        bound(f"{naive / seconds:.1f} times faster, at least 4", naive >= 4 * seconds)

        times = {}
        for size in (4000, 8000, 16000):
            times[size] = _prepare(root, "train.sampling=uniform", f"train.size={size}")[0]
            print(f"  {size} photos drawn: {times[size]:.1f} s")
        slope = (times[16000] - times[8000]) / (2 * (times[8000] - times[4000]))
        bound(
            f"the next 8,000 cost {slope:.2f} times twice the first 4,000, 0.6 to 1.5",
            0.6 <= slope <= 1.5,
        )
        one = _prepare(root, "train.sampling=uniform", "train.size=8000", "source.train=[0]")[0]
        ratio = times[8000] / one
        bound(
            f"8,000 photos of two zips cost {ratio:.2f} times those of one, at most 1.3",
            ratio <= 1.3,
        )
    return all(kept)


SCORE_ROWS = 210_122  # OSV-5M's whole test set
SCORE_BOUND_SECONDS = 20.0
EVAL_BOUND_RATIO = 1.05
EVAL_BOUND_BYTES = 600e6
EVAL_PAIRS = 9


def _truth(rows: int, rng: np.random.Generator) -> pl.DataFrame:
    """Returns the table of a split with labels as OSV-5M has them."""
    from geoguessr_rl.places import nearest_places
    from geoguessr_rl.records import PHOTO_SCHEMA

    points = list(zip(rng.uniform(-60, 75, rows), rng.uniform(-180, 180, rows), strict=True))
    return pl.DataFrame(
        [
            {
                "image_path": f"images/{n + 10**15}.jpg",
                "latitude": latitude,
                "longitude": longitude,
                "country_iso2": place.country_iso2,
                "region": place.region or None,
                "sub_region": place.sub_region or None,
                "city": place.city,
            }
            for n, ((latitude, longitude), place) in enumerate(
                zip(points, nearest_places(points), strict=True)
            )
        ],
        schema=PHOTO_SCHEMA,
    )


def score() -> bool:
    """Scores predictions for the whole OSV-5M test set, completions of a usual length."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        truth = _truth(SCORE_ROWS, rng)
        truth.write_parquet(root / "truth.parquet")
        with (root / "predictions.jsonl").open("w") as file:
            for row in truth.iter_rows(named=True):
                latitude = min(90.0, row["latitude"] + rng.normal(0, 5))
                text = format_completion(
                    "France", latitude, row["longitude"], clues=_CLUES, style="think"
                )
                identifier = Path(row["image_path"]).stem
                file.write(json.dumps({"id": identifier, "completion": text}) + "\n")
        files = (root / "predictions.jsonl", "--truth", root / "truth.parquet")
        seconds, peak = _watch(root, "scripts/score_predictions.py", *files)
    kept = seconds <= SCORE_BOUND_SECONDS
    print(f"score: {SCORE_ROWS:,} predictions in {seconds:.1f} s, peak {peak / 1e9:.2f} GB")
    print(f"  bound {SCORE_BOUND_SECONDS:.0f} s: {'kept' if kept else 'BROKEN'}")
    return kept


def evaluation() -> bool:
    """Times evaluation against the engine alone, and watches its memory over 10,000 photos."""
    from geoguessr_rl import artifacts
    from geoguessr_rl import data as splits
    from geoguessr_rl.backends import open_backend, open_photo
    from geoguessr_rl.backends.predictions import generate, sampling_of
    from geoguessr_rl.config import EvalConfig, load

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _run("scripts/draw_embedded.py", root / "embedded")
        _run(
            "scripts/prepare_data.py", "--config", CONFIGS / "embedded/data.yaml",
            "--source", root / "embedded/world", "--output_dir", root / "data",
        )  # fmt: skip
        flags = {
            "model.name": str(root / "embedded/tiny"),
            "data_dir": root / "data",
            "generation.backend": "vllm",
            "generation.block_size": 100,
            "generation.max_tokens": 64,
        }
        config = load(EvalConfig, CONFIGS / "embedded/eval.yaml", flags=flags)
        photos = splits.load_split(root / "data", "eval_osv").photos
        sampling = sampling_of(config.generation, 1)
        backend: Any = open_backend(config.generation, config.model, config.prompt.style)

        def bare() -> None:
            for block in artifacts.blocks(photos, config.generation.block_size):
                params = backend._sampling_params(
                    temperature=0.0, max_tokens=sampling.max_tokens, seed=0
                )
                prompts = [
                    {
                        "prompt_token_ids": backend._prompt_ids,
                        "multi_modal_data": {"image": open_photo(photo)},
                    }
                    for photo in block
                ]
                backend._llm.generate(prompts, params, use_tqdm=False)

        def whole(n: int) -> None:
            path = root / f"{n}.jsonl"
            parts = (config.generation, config.model, config.prompt, sampling)
            rows = generate(path, photos, *parts, engine=lambda: backend)
            assert len(rows) == len(photos)

        def seconds(call: Callable[[], None]) -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        bare()  # what the first call alone pays for
        ratios = []
        for n in range(EVAL_PAIRS):
            pair = [lambda n=n: whole(n), bare]
            times = {call is bare: seconds(call) for call in (pair if n % 2 else pair[::-1])}
            ratios.append(times[False] / times[True])
        ratio = float(np.median(ratios))
        cheap = ratio <= EVAL_BOUND_RATIO
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"eval: {len(photos)} photos, {EVAL_PAIRS} pairs, {spread}")
        print(f"  median {ratio:.3f} times the engine alone, at most {EVAL_BOUND_RATIO}: "
              f"{'kept' if cheap else 'BROKEN'}")  # fmt: skip

        table = _truth(10_000, rng)
        hashes = {Path(name).stem: "0" for name in table["image_path"]}
        manifest = splits.build_manifest(
            "eval_osv", "evaluation", table, hashes, image_policy={}, dataset={}
        )
        artifacts.write_parquet(root / "many/eval_osv.parquet", table)
        artifacts.write_json(splits.manifest_path(root / "many", "eval_osv"), manifest)
        flags = ["--backend", "scripted", "--set", "generation.script=random_land"]
        command = ("scripts/run_eval.py", "--data_dir", root / "many", *flags)
        _, peak = _watch(root, *command, "--output_dir", root / "eval")
        small = peak < EVAL_BOUND_BYTES
        verdict = "kept" if small else "BROKEN"
        print(f"  10,000 photos: peak {peak / 1e6:.0f} MB, under 600 MB: {verdict}")
    return cheap and small


TRAIN_BOUND_RATIO = 1.03
TRAIN_BOUND_REWARD = 0.005
TRAIN_PAIRS = 21


def _train(root: Path, ours: bool, pipe: Any) -> None:
    """Trains on the tiny model, one step whenever the pipe says so; completions of 64 tokens."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)

    from geoguessr_rl import data as splits
    from geoguessr_rl.backends.reference import bare_trainer, train_in_turns
    from geoguessr_rl.config import GrpoConfig, load
    from geoguessr_rl.phases import train as phase

    section = {
        "output_dir": str(root / f"ours-{ours}"),
        "max_steps": TRAIN_PAIRS + 2,
        "save_strategy": "no",
        "report_to": "none",
        "generation_kwargs": {"min_new_tokens": 64},
        "mask_truncated_completions": False,  # each completion is cut: all must count
    }
    overrides = [f"trainer.{key}={json.dumps(value)}" for key, value in section.items()]
    flags = {"model.name": str(root / "embedded/tiny"), "data_dir": root / "data"}
    config = load(GrpoConfig, CONFIGS / "embedded/grpo.yaml", overrides=overrides, flags=flags)
    args = phase.build_args(config.trainer, use_cpu=True)
    photos = splits.load_split(root / "data", "train_pool").photos
    if ours:
        trainer = phase.build_trainer(config, args, photos)
        phase.attend(trainer, config, photos, time.monotonic())
    else:
        trainer = bare_trainer(config, args, photos)
    train_in_turns(trainer, pipe)


def train() -> bool:
    """Times a step of ours against a bare `GRPOTrainer`, and the rewards' share of it."""
    from geoguessr_rl.reward import reward_functions

    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _run("scripts/draw_embedded.py", root / "embedded")
        _run(
            "scripts/prepare_data.py", "--config", CONFIGS / "embedded/data.yaml",
            "--source", root / "embedded/world", "--output_dir", root / "data",
        )  # fmt: skip
        turns, processes = {}, []
        for ours in (True, False):
            turns[ours], other = spawn.Pipe()
            processes.append(spawn.Process(target=_train, args=(root, ours, other), daemon=True))
            processes[-1].start()
            other.close()
            turns[ours].recv()

        def seconds(ours: bool) -> float:
            start = time.perf_counter()
            turns[ours].send("go")
            turns[ours].recv()
            return time.perf_counter() - start

        pairs = []
        for n in range(TRAIN_PAIRS + 1):
            order = (True, False) if n % 2 else (False, True)
            pairs.append({ours: seconds(ours) for ours in order})
        for process in processes:
            process.kill()
    del pairs[0]  # what the first step alone pays for
    ratios = [pair[True] / pair[False] for pair in pairs]
    ratio, step = float(np.median(ratios)), float(np.median([pair[True] for pair in pairs]))
    kept = ratio <= TRAIN_BOUND_RATIO
    print(f"train: a step of 128 completions of 64 tokens takes {step:.2f} s; {len(ratios)} pairs, "
          f"{min(ratios):.3f} to {max(ratios):.3f}")  # fmt: skip
    print(f"  median {ratio:.3f} times a bare GRPOTrainer, at most {TRAIN_BOUND_RATIO}: "
          f"{'kept' if kept else 'BROKEN'}")  # fmt: skip
    batch = {
        "completions": [
            format_completion("Kazakhstan", n % 90, 73.1, clues=_CLUES, style="think")
            for n in range(128)
        ],
        "latitude": [43.2] * 128,
        "longitude": [76.9] * 128,
        "country_iso2": ["KZ"] * 128,
    }
    # New functions each time: a batch is scored once, and here it stays the same.
    rewards = 1e-6 * _microseconds(
        lambda: [function(**batch) for function in reward_functions()], calls=20
    )
    cheap = rewards <= TRAIN_BOUND_REWARD * step
    print(f"  rewards of 128 usual completions: {rewards / step:.2%} of the step, at most "
          f"{TRAIN_BOUND_REWARD:.1%}: {'kept' if cheap else 'BROKEN'}")  # fmt: skip
    return kept and cheap


RAY_BOUND_RATIO = 1.5
RAY_BOUND_MEMORY = 1.1
RAY_PHOTOS = (2_000, 20_000)  # prepared by both engines; what both counts share is start-up
RAY_ANSWERS = (64, 640)  # photos that the tiny model answers


def _worker_bytes() -> list[int]:
    """Returns the memory of each of this machine's Ray Data workers, shared pages left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not (process / "cmdline").read_bytes().startswith(b"ray::MapWorker"):
                continue
            status = (process / "status").read_text()
        except OSError:  # it has just ended
            continue
        found += [1024 * int(row.split()[1]) for row in status.splitlines() if "RssAnon" in row]
    return found


def _timed(call: Callable[[], object]) -> tuple[float, int]:
    """Calls, and returns the seconds and the largest memory of a Ray worker meanwhile."""
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.2):
            peak = max(peak, *_worker_bytes(), 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    try:
        with redirect_stdout(io.StringIO()):
            call()
    finally:
        over.set()
        watcher.join()
    return time.perf_counter() - start, peak


def _draw_test_set(root: Path, count: int) -> None:
    """Writes the test half of a synthetic OSV-5M."""
    rng = np.random.default_rng(0)
    ids, photos = rng.permutation(count).astype(np.int64) + 10**15, _photos(1000, rng)
    (root / "images/test").mkdir(parents=True)
    with zipfile.ZipFile(root / "images/test/00.zip", "w") as file:
        for n, identifier in enumerate(ids):
            file.writestr(f"00/{identifier}.jpg", photos[n % len(photos)])
    _csv_rows(ids, rng).write_csv(root / "test.csv")


def ray(scale: float = 1.0) -> bool:
    """Times `--engine ray` against `local` on two workers, and watches what a worker holds."""
    from geoguessr_rl import config as configs
    from geoguessr_rl.backends import models, ray_engine
    from geoguessr_rl.embedded import sample_texts
    from geoguessr_rl.phases import evaluate, prepare

    cluster = configs.Ray(workers=WORKERS)
    few, many = (max(64, int(scale * photos)) for photos in RAY_PHOTOS)
    start, kept = time.perf_counter(), []

    def bound(text: str, holds: bool) -> None:
        kept.append(holds)
        print(f"  {text}: {'kept' if holds else 'BROKEN'}", flush=True)

    def compare(what: str, counts: tuple[int, int], run: Callable[[str, int], object]) -> None:
        taken, peaks = {}, {}
        for count in counts:
            for engine in ("local", "ray"):
                seconds = _timed(partial(run, engine, count))
                taken[engine, count], peaks[engine, count] = seconds
                print(f"  {what}, {count:,} photos, {engine}: {seconds[0]:.1f} s", flush=True)
        local, on_ray = (taken[e, counts[1]] - taken[e, counts[0]] for e in ("local", "ray"))
        ratio = on_ray / local
        bound(
            f"{what}: {ratio:.2f} times local, at most {RAY_BOUND_RATIO}", ratio <= RAY_BOUND_RATIO
        )
        if what == "prepare":
            small, large = (peaks["ray", count] for count in counts)
            bound(
                f"a worker holds {large / 1e6:.0f} MB, {large / small:.2f} times what it held for "
                f"{counts[0]:,} photos, at most {RAY_BOUND_MEMORY}",
                large <= RAY_BOUND_MEMORY * small,
            )

    with tempfile.TemporaryDirectory() as folder, ray_engine.session("ray", cluster):
        root = Path(folder)
        _draw_test_set(root / "osv5m", many)
        models.build_tiny(root / "tiny", 0, sample_texts())
        print(f"ray: {WORKERS} workers; drawn in {time.perf_counter() - start:.0f} s", flush=True)

        def prepared(engine: str, count: int) -> None:
            settings = {
                "source": configs.Source(root=root / "osv5m"),
                "output_dir": root / f"{engine}-{count}",
                "eval": configs.EvalDraw(size=count),
                "workers": WORKERS,
                "limit": count,  # the test half alone
                "engine": engine,
                "ray": cluster,
            }
            prepare.run(configs.DataConfig(**settings))

        def evaluated(engine: str, count: int) -> None:
            flags = {
                "model.name": str(root / "tiny"),
                "data_dir": root / f"local-{few}",
                "output_dir": root / f"runs-{engine}-{count}",
                "limit": count,
                "engine": engine,
                "ray.workers": WORKERS,
                "generation.block_size": 64,
                "generation.batch_size": 16,
            }
            evaluate.run(
                configs.load(configs.EvalConfig, CONFIGS / "embedded/eval.yaml", flags=flags)
            )

        compare("prepare", (few, many), prepared)
        answers = (RAY_ANSWERS[0], max(2 * RAY_ANSWERS[0], int(scale * RAY_ANSWERS[1])))
        compare("evaluate", answers, evaluated)
    return all(kept)


TASKS: dict[str, Callable[[], bool]] = {
    "reward": reward,
    "data": data,
    "score": score,
    "eval": evaluation,
    "train": train,
    "ray": ray,
}


def main() -> int:
    """Runs the chosen tasks, and returns 1 when one breaks its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"any of: {', '.join(TASKS)}")
    names = parser.parse_args().tasks or [*TASKS]
    if unknown := [name for name in names if name not in TASKS]:
        parser.error(f"no task {unknown[0]!r}; there are: {', '.join(TASKS)}")
    kept = [TASKS[name]() for name in names]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
