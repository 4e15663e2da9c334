"""The embedded run improves with each reward shape and both prompt styles.

Slow: two bases are warmed up, and six adapters trained and evaluated, in about six minutes.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geoguessr_rl import artifacts
from geoguessr_rl.bootstrap import paired_bootstrap
from geoguessr_rl.config import (
    CONFIGS,
    DataConfig,
    EvalConfig,
    GrpoConfig,
    WarmupConfig,
    load,
)  # fmt: skip
from geoguessr_rl.prompt import PROMPT_STYLES
from geoguessr_rl.records import Prediction
from geoguessr_rl.reward import SHAPE_NAMES

pytestmark = pytest.mark.slow
STEPS = 25


def embedded_config(cls: type, name: str, **flags: Any) -> Any:
    return load(cls, CONFIGS / f"embedded/{name}.yaml", flags=flags)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded world as the quickstart draws it, prepared."""
    from geoguessr_rl import embedded
    from geoguessr_rl.backends.tiny import build_tiny
    from geoguessr_rl.phases import prepare

    root = tmp_path_factory.mktemp("shapes")
    embedded.draw_world(root / "world", train=2000, test=400, seed=0)
    build_tiny(root / "tiny", 0, embedded.sample_texts())
    keys = {"source.root": root / "world", "output_dir": root / "data"}
    prepare.run(embedded_config(DataConfig, "data", **keys))
    return root


def warm_up(root: Path, style: str) -> Path:
    """The base of a prompt style, with the hot spot."""
    from geoguessr_rl.phases import warmup

    base = root / f"base-{style}"
    if not (base / "config.json").is_file():
        keys = {"data_dir": root / "data", "output_dir": base, "clues": root / "world/clues.json"}
        keys |= {"model.name": str(root / "tiny"), "prompt.style": style}
        warmup.run(embedded_config(WarmupConfig, "warmup", **keys))
    return base


def geoscores(root: Path, style: str, name: str, lora: Path | None = None) -> list[float]:
    """The greedy GeoScores of a base, or of an adapter on it."""
    from geoguessr_rl.phases import evaluate

    keys = {"data_dir": root / "data", "output_dir": root / "eval", "lora": lora}
    keys |= {"model.name": str(root / f"base-{style}"), "prompt.style": style, "run_name": name}
    evaluate.run(embedded_config(EvalConfig, "eval", **keys))
    path = root / "eval" / name / "eval_osv" / artifacts.PREDICTIONS
    return [row.geoscore for row in artifacts.read_rows(path, Prediction)]


@pytest.mark.parametrize(
    ("shape", "style"),
    [
        *((shape, PROMPT_STYLES[0]) for shape in SHAPE_NAMES),
        *((SHAPE_NAMES[0], style) for style in PROMPT_STYLES[1:]),
    ],
)
def test_the_embedded_run_improves(root: Path, shape: str, style: str) -> None:
    from geoguessr_rl.phases import train

    base = warm_up(root, style)
    before = geoscores(root, style, f"base-{style}")
    out = root / f"grpo-{shape}-{style}"
    keys = {"data_dir": root / "data", "split": "train_pool", "prompt.style": style}
    keys |= {"model.name": str(base), "reward.shape": shape, "trainer.output_dir": str(out)}
    keys |= {"trainer.max_steps": STEPS, "trainer.save_steps": STEPS, "trainer.report_to": "none"}
    train.run(embedded_config(GrpoConfig, "grpo", **keys))
    after = geoscores(root, style, f"{shape}-{style}", out)
    interval = paired_bootstrap(before, after)
    print(f"{shape} {style}: {np.mean(before):.0f} to {np.mean(after):.0f}, {interval}")
    assert interval.low > 0
    scales = [log.get("reward_scale_km") for log in artifacts.read_training_log(out)]
    if shape == "curriculum":  # its schedule is in the log: a constant factor a step
        assert scales[0] == pytest.approx(2000)
        ratios = [b / a for a, b in pairwise(scales)]
        assert ratios == pytest.approx([(25 / 2000) ** (1 / STEPS)] * (STEPS - 1))
    else:
        assert set(scales) == {None}
