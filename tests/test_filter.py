"""The learnability filter through its real script: arithmetic of sets A and B, cache, refusals."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from geoguessr_rl import artifacts, data
from geoguessr_rl.backends.scripted import ScriptedBackend
from geoguessr_rl.eval_metrics import make_prediction
from geoguessr_rl.phases import filter as learnable
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Completion, Prediction
from geoguessr_rl.reward import components

Script = Callable[..., Any]
Split = Callable[..., Path]
TRUTH = (10.0, 20.0, "TD")


def answer(country: str, lat: float, lon: float) -> str:
    return format_completion(country, lat, lon, style="direct")


RIGHT = answer("Chad", 10.0, 20.0)
NEAR = answer("Chad", 10.0, 22.0)  # 219 km off, the right country
WRONG = answer("Niger", 10.0, 20.0)  # the right place, the wrong country
FAR = answer("Chile", -33.4, -70.6)
FAR_TOO = answer("Chile", -33.5, -70.6)
SILENT = "I cannot tell."

# Group -> four completions, and whether a group is learnable at the default thresholds.
GROUPS: dict[str, tuple[list[str], bool]] = {
    "hit": ([RIGHT] * 4, False),
    "miss": ([FAR] * 4, False),
    "silent": ([SILENT] * 4, False),
    "one": ([RIGHT, FAR, FAR, FAR], True),
    "three": ([RIGHT, RIGHT, RIGHT, WRONG], True),  # disagree in country alone
    "format": ([FAR, FAR, SILENT, SILENT], False),  # std 0.05: they deviate by the format alone
    "spread": ([RIGHT, RIGHT, NEAR, NEAR], True),  # four hits, std over 0.08
    "alike": ([FAR, FAR_TOO, FAR, FAR_TOO], False),
}
A = {name for name, (_, kept) in GROUPS.items() if kept}


def photo(name: str) -> tuple[str, float, float, str]:
    return (name, *TRUTH)


@pytest.fixture
def folder(tmp_path: Path, make_split: Split) -> Path:
    """A folder with spaces that holds a pool of the eight groups, and their answers."""
    root = tmp_path / "a folder with spaces"
    make_split(root / "data", [photo(name) for name in GROUPS], name="train_pool", role="train")
    texts = {name: completions for name, (completions, _) in GROUPS.items()}
    (root / "answers.json").write_text(json.dumps(texts))
    return root


def flags(folder: Path, *more: str) -> list[object]:
    settings = {
        "generation.script": folder / "answers.json",
        "generation.block_size": 3,
        "min_rows": 0,
    }
    return [
        *("--data_dir", folder / "data", "--output_dir", folder / "filter"),
        *("--backend", "scripted"),
        *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
        *(part for text in more for part in ("--set", text)),
    ]


def stats_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "filter" / learnable.STATS).read_text())
    return found


def kept_ids(folder: Path) -> list[str]:
    split = data.load_split(folder / "data", "train_learnable")
    return [photo.id for photo in split.photos]


def test_group_statistics_are_those_of_the_rewards_with_the_population_deviation() -> None:
    rows = [
        make_prediction(name, k, *TRUTH, Completion(text, 1, "stop"))
        for name, (texts, _) in GROUPS.items()
        for k, text in enumerate(texts)
    ]
    stats = learnable.group_stats(rows)
    assert list(stats) == list(GROUPS)
    for name, (texts, _) in GROUPS.items():
        totals = [components(text, *TRUTH).total for text in texts]
        assert stats[name]["mean_reward"] == pytest.approx(sum(totals) / 4)
        mean = sum(totals) / 4
        deviation = (sum((total - mean) ** 2 for total in totals) / 4) ** 0.5
        assert stats[name]["std_reward"] == pytest.approx(deviation)
    hits = {name: group["country_hits"] for name, group in stats.items()}
    assert hits == {
        "hit": 4,
        "miss": 0,
        "silent": 0,
        "one": 1,
        "three": 3,
        "format": 0,
        "spread": 4,
        "alike": 0,
    }
    assert stats["format"]["std_reward"] == pytest.approx(0.05, abs=0.01)
    assert stats["spread"]["std_reward"] > 0.08


@pytest.mark.parametrize(
    ("hits", "std", "kept"),
    [
        (0, 0.0, False),
        (0, 0.08, False),
        (0, 0.0801, True),
        (1, 0.0, True),
        (3, 0.0, True),
        (4, 0.0, False),
        (4, 0.08, False),
        (4, 0.2, True),
    ],
)
def test_set_a_is_torn_in_country_or_deviates_by_more_than_the_threshold(
    hits: int, std: float, kept: bool
) -> None:
    stats = {"x": {"country_hits": hits, "std_reward": std, "mean_reward": 0.5}}
    assert learnable.learnable(stats, n=4, min_std=0.08) == (["x"] if kept else [])


def test_sets_a_and_b_add_up(folder: Path, script: Script) -> None:
    ended = script("filter_learnable.py", *flags(folder, "rest_share=0.4"))
    assert ended.code == 0
    assert "kept 5 of 8 photos: set A 3, set B 2, 1 countries" in ended.out
    stats = stats_of(folder)
    assert (stats["set_a"], stats["set_b"], stats["rows"], stats["photos"]) == (3, 2, 5, 8)
    kept = kept_ids(folder)
    assert set(kept) >= A and len(set(kept)) == 5
    table = pl.read_parquet(folder / "data" / "train_learnable.parquet")
    rows = {Path(row["image_path"]).stem: row for row in table.iter_rows(named=True)}
    assert rows["one"]["country_hits"] == 1 and rows["one"]["country_iso2"] == "TD"
    assert {"mean_reward", "std_reward", "country_hits"} <= set(table.columns)
    completions = artifacts.read_rows(folder / "filter" / artifacts.PREDICTIONS, Prediction)
    assert len(completions) == 32
    assert [row.sample for row in completions[:5]] == [0, 1, 2, 3, 0]
    rewards = [row.total for row in completions]
    assert stats["base_mean_reward"] == pytest.approx(float(np.mean(rewards)))
    assert stats["base_country_acc"] == (4 + 1 + 3 + 4) / 32
    assert stats["zero_spread_share"] == 3 / 8


@pytest.mark.parametrize(("share", "rest"), [(0, 0), (0.2, 1), (1, 5)])
def test_set_b_is_the_asked_share_of_the_rest(
    share: float, rest: int, folder: Path, script: Script
) -> None:
    assert script("filter_learnable.py", *flags(folder, f"rest_share={share}")).code == 0
    assert stats_of(folder)["set_b"] == rest and len(kept_ids(folder)) == 3 + rest


def test_the_order_is_seeded(folder: Path, script: Script) -> None:
    orders = []
    for seed in (1, 1, 2, 3):
        assert (
            script("filter_learnable.py", *flags(folder, "rest_share=1", f"seed={seed}")).code == 0
        )
        orders.append(kept_ids(folder))
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) > 1


def test_new_thresholds_generate_nothing(
    folder: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script("filter_learnable.py", *flags(folder)).code == 0
    path = folder / "filter" / artifacts.PREDICTIONS
    before, stamp = path.read_bytes(), path.stat().st_mtime_ns
    monkeypatch.setattr(ScriptedBackend, "generate", lambda *_: pytest.fail("generated again"))
    for more in (["min_std=0.5"], ["min_std=0.001"], ["rest_share=0.9", "seed=5"]):
        assert script("filter_learnable.py", *flags(folder, *more)).code == 0
        assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, stamp)
    script("filter_learnable.py", *flags(folder, "min_std=1e-9"))
    assert stats_of(folder)["set_a"] == 5  # "format" and "alike" joined in


def test_below_min_rows_the_threshold_drops_and_says_so(folder: Path, script: Script) -> None:
    more = ["min_rows=4", "fallback_std=0.03", "rest_share=0"]
    ended = script("filter_learnable.py", *flags(folder, *more))
    assert ended.code == 0
    assert "only 3 photos" in ended.out and "threshold drops to 0.03" in ended.out
    assert stats_of(folder)["min_std"] == 0.03
    assert set(kept_ids(folder)) == A | {"format"}
    ended = script("filter_learnable.py", *flags(folder, "min_rows=3"))
    assert "threshold drops" not in ended.out and stats_of(folder)["min_std"] == 0.08


def test_a_base_that_answers_everything_alike_is_reported(folder: Path, script: Script) -> None:
    (folder / "answers.json").write_text(json.dumps({"*": FAR}))
    ended = script("filter_learnable.py", *flags(folder))
    assert ended.code == 2 and "nothing is learnable" in ended.err
    assert not (folder / "data" / "train_learnable.parquet").exists()


def test_evaluation_photos_are_refused(folder: Path, script: Script, make_split: Split) -> None:
    make_split(folder / "data", [photo("miss"), photo("other")])
    ended = script("filter_learnable.py", *flags(folder))
    assert ended.code == 2 and "'train_pool' shares 1 photos with 'eval_osv', miss" in ended.err
    make_split(folder / "data", [photo("other")])
    make_split(folder / "data", [photo("hit")], name="train_pool", role="evaluation")
    ended = script("filter_learnable.py", *flags(folder))
    assert ended.code == 2 and "is for evaluation" in ended.err
    assert not (folder / "filter" / artifacts.PREDICTIONS).exists()


def test_the_output_may_be_trained_on_and_keeps_hashes_and_policy(
    folder: Path, script: Script
) -> None:
    assert script("filter_learnable.py", *flags(folder)).code == 0
    split = data.load_split(folder / "data", "train_learnable")
    data.require_train_role(split, folder / "data")
    pool = data.load_split(folder / "data", "train_pool")
    assert split.role == "train" and split.image_policy == pool.image_policy
    manifest = json.loads((folder / "data" / "train_learnable.manifest.json").read_text())
    assert all(row["sha256"] == f"hash of {row['id']}" for row in manifest["photos"])


def test_greedy_groups_are_refused(folder: Path, script: Script) -> None:
    ended = script("filter_learnable.py", *flags(folder, "generation.temperature=0"))
    assert ended.code == 2 and "temperature" in ended.err


def test_a_country_gives_at_most_its_cap_and_a_limit_is_a_prefix(
    tmp_path: Path, make_split: Split, script: Script
) -> None:
    pool = [(f"{n}", 10.0, 20.0, "TD" if n % 3 else "FR") for n in range(12)]
    make_split(tmp_path / "data", pool, name="train_pool", role="train")
    photos = data.load_split(tmp_path / "data", "train_pool").photos
    chosen = [p.id for p in learnable.choose(photos, rows=5, cap=3)]
    assert chosen == ["0", "1", "2", "3", "4"]
    chosen = [p.id for p in learnable.choose(photos, rows=99, cap=3)]
    assert chosen == ["0", "1", "2", "3", "4", "6"]
    (tmp_path / "answers.json").write_text(json.dumps({"*": [RIGHT, FAR]}))
    path = tmp_path / "filter" / artifacts.PREDICTIONS
    more = ["cap=3", "generation.block_size=2"]
    assert script("filter_learnable.py", *flags(tmp_path, *more), "--limit", 3).code == 0
    short = path.read_bytes()
    assert script("filter_learnable.py", *flags(tmp_path, *more)).code == 0
    assert path.read_bytes().startswith(short)
    assert stats_of(tmp_path)["photos"] == 6
    ended = script("filter_learnable.py", *flags(tmp_path, "cap=4", "generation.block_size=2"))
    assert ended.code == 2 and "cap was 3 and is now 4" in ended.err


@pytest.mark.parametrize("limit", ["0", "-1", "abc"])
def test_a_limit_that_is_no_count_is_an_error(limit: str, folder: Path, script: Script) -> None:
    ended = script("filter_learnable.py", *flags(folder), f"--limit={limit}")
    assert ended.code == 2 and "limit" in ended.err and "Traceback" not in ended.err


def test_another_sampling_in_the_same_folder_is_refused(folder: Path, script: Script) -> None:
    assert script("filter_learnable.py", *flags(folder)).code == 0
    for more, key in (
        ("completions=8", "sampling.n"),
        ("generation.temperature=0.7", "sampling.temperature"),
        ("generation.seed=1", "sampling.seed"),
        ("prompt.style=direct", "prompt_style"),
    ):
        ended = script("filter_learnable.py", *flags(folder, more))
        assert ended.code == 2 and f"{key} was " in ended.err


def test_a_killed_filter_continues_to_the_same_bytes(
    tmp_path: Path, make_split: Split, start_script: Script, script: Script
) -> None:
    pool = [(f"{n:04d}", 10.0, 20.0, "TD") for n in range(600)]
    texts = {"*": [text + " " * 2000 for text in (RIGHT, FAR, NEAR, SILENT)]}
    results = []
    for name in ("killed", "straight"):
        folder = tmp_path / name
        make_split(folder / "data", pool, name="train_pool", role="train")
        (folder / "answers.json").write_text(json.dumps(texts))
        command = flags(folder, "generation.block_size=1", "cap=600")
        path = folder / "filter" / artifacts.PREDICTIONS
        if name == "killed":
            process = start_script("filter_learnable.py", *command)
            deadline = time.monotonic() + 60
            while not path.exists() or path.read_bytes().count(b"\n") < 9:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert path.read_bytes().count(b"\n") < 2400
            assert not (folder / "data" / "train_learnable.parquet").exists()
        assert script("filter_learnable.py", *command).code == 0
        outputs = [path, folder / "filter" / learnable.STATS]
        outputs += sorted((folder / "data").glob("train_learnable.*"))
        results.append([file.read_bytes() for file in outputs])
    assert len(results[0]) == 4 and results[0] == results[1]
