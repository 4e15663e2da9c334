"""Evaluation against the engine alone, and its memory over 10,000 photos. It needs vLLM."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import draw_embedded_world, truth
from benchmarks.measure import Figure, median_of, ratios, run_script, seconds
from geoguessr_rl.config import CONFIGS

BOUND_RATIO = 1.05
BOUND_MB = 600.0
PAIRS = 9
PHOTOS = 10_000  # of which the memory is watched


def _pairs(root: Path, scale: float) -> tuple[list[float], list[float]]:
    """Returns seconds of evaluation and of the engine alone, in turns, on the same photos."""
    from geoguessr_rl import artifacts
    from geoguessr_rl import data as splits
    from geoguessr_rl.backends import open_backend, open_photo
    from geoguessr_rl.backends.predictions import generate, sampling_of
    from geoguessr_rl.config import EvalConfig, load

    flags = {
        "model.name": str(root / "embedded/tiny"),
        "data_dir": root / "data",
        "generation.backend": "vllm",
        "generation.block_size": 100,
        "generation.max_tokens": 64,
    }
    config = load(EvalConfig, CONFIGS / "embedded/eval.yaml", flags=flags)
    photos = splits.load_split(root / "data", "eval_osv").photos
    photos = photos[: max(8, int(scale * len(photos)))]
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
        parts = (config.generation, config.model, config.prompt, sampling)
        rows = generate(root / f"{n}.jsonl", photos, *parts, engine=lambda: backend)
        assert len(rows) == len(photos)

    bare()  # what the first call alone pays for
    ours, alone = [], []
    pairs = max(3, int(scale * PAIRS))
    for n in range(pairs):
        if n % 2 == 0:
            alone.append(seconds(bare))
        ours.append(seconds(lambda n=n: whole(n)))
        if n % 2:
            alone.append(seconds(bare))
        print(f"  pair {n + 1} of {pairs}: {ours[-1] / alone[-1]:.3f}", flush=True)
    return ours, alone


def _peak_bytes(root: Path, photos: int) -> int:
    """Returns the memory of evaluating so many photos with scripted answers."""
    from geoguessr_rl import artifacts
    from geoguessr_rl import data as splits

    table = truth(photos, np.random.default_rng(0))
    hashes = {Path(name).stem: "0" for name in table["image_path"]}
    manifest = splits.build_manifest(
        "eval_osv", "evaluation", table, hashes, image_policy={}, dataset={}
    )
    artifacts.write_parquet(root / "many/eval_osv.parquet", table)
    artifacts.write_json(splits.manifest_path(root / "many", "eval_osv"), manifest)
    flags = ["--backend", "scripted", "--set", "generation.script=random_land"]
    command = ("scripts/run_eval.py", "--data_dir", root / "many", *flags)
    return run_script(*command, "--output_dir", root / "eval")[1]


def run(scale: float) -> list[Figure]:
    """Times evaluation, and watches its memory."""
    many = max(100, int(scale * PHOTOS))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        draw_embedded_world(root)
        print("  starting the engine", flush=True)
        ours, alone = _pairs(root, scale)
        print(f"  evaluating {many:,} photos", flush=True)
        peak = _peak_bytes(root, many)
    return [
        median_of(
            "evaluate", ratios(ours, alone), "times", "the bare engine on the same photos",
            at_most=BOUND_RATIO,
        ),
        Figure(
            f"evaluate {many:,} photos, peak memory beside the model", peak / 1e6, "MB",
            at_most=BOUND_MB,
        ),
    ]  # fmt: skip
