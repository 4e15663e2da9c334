"""`--engine ray` on a cluster of this machine: the same files, whoever dies meanwhile."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray_faults
import torch
from conftest import SMALL, make_rows, photo_entries
from warm_base import loud_adapter

from geoguessr_rl import artifacts, budget, photos
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import planning, predictions, ray_engine
from geoguessr_rl.config import (
    CONFIGS,
    Contamination,
    DataConfig,
    EvalConfig,
    EvalDraw,
    FilterConfig,
    GrpoConfig,
    Ray,
    Source,
    load,
)
from geoguessr_rl.phases import evaluate, plan, prepare
from geoguessr_rl.phases import filter as learnable
from geoguessr_rl.records import Prediction

Script = Callable[..., Any]
COUNTRIES = ["FR", "DE", "JP", "BR", "KE"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One local cluster for all tests of this file; a phase that finds one leaves it up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as Ray gives a worker of one core
    with pytest.MonkeyPatch.context() as patch:
        # Where workers find ray_faults.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with ray_engine.session("ray", Ray(workers=2)):
            yield
    torch.set_num_threads(threads)


workers = pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough blocks for several workers in the small sources of these tests."""
    monkeypatch.setattr(prepare, "RAY_BLOCK", 16)


def written(folder: Path) -> dict[str, bytes]:
    """A folder's files, without locks and the one that records the engine."""
    left_out = (artifacts.RESOLVED_CONFIG, ".lock")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in left_out
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 test photos and 60 train photos in the OSV-5M layout; two are damaged."""
    from conftest import csv_text, write_zip

    root = tmp_path_factory.mktemp("a source with spaces")
    for split, each in (("test", 30), ("train", 12)):
        rows = make_rows(COUNTRIES, prefix=split[1], each=each)
        entries = photo_entries(rows)
        for n in (3, 40):
            entries[n] = (entries[n][0], entries[n][1][:200])
        write_zip(root / f"images/{split}/00.zip", entries)
        (root / f"{split}.csv").write_text(csv_text(rows))
    return root


def preparing(source: Path, out: Path, **keys: Any) -> DataConfig:
    return DataConfig(
        source=Source(root=source, train=[0], test=[0]),
        output_dir=out,
        image=SMALL,
        eval=EvalDraw(size=140, quick=3),
        contamination=Contamination(max_hash_bits=None, min_km=0),
        **{"workers": 1, **keys},
    )


@pytest.fixture(scope="module")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `--engine local` makes of the source."""
    out = tmp_path_factory.mktemp("local") / "data"
    prepare.run(preparing(source, out))
    return out


@workers
def test_prepare_writes_the_files_of_the_local_engine(
    workers: int, source: Path, prepared: Path, tmp_path: Path
) -> None:
    prepare.run(preparing(source, tmp_path / "data", engine="ray", ray=Ray(workers=workers)))
    assert written(tmp_path / "data") == written(prepared)


def test_prepare_goes_on_with_either_engine(source: Path, prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    prepare.run(preparing(source, out, limit=20))
    prepare.run(preparing(source, out, limit=90, engine="ray", ray=Ray(workers=2)))
    prepare.run(preparing(source, out))
    assert written(out) == written(prepared)


def test_a_photo_that_kills_its_worker_is_damaged_and_no_other_suffers(
    source: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = [path.stem for path in sorted((prepared / "images/test").glob("*"))][7]
    faults = {"notes": tmp_path, "poison": [poison]}
    monkeypatch.setattr(photos, "examine", partial(ray_faults.examine, faults=faults))
    out = tmp_path / "data"
    summary = prepare.run(preparing(source, out, engine="ray", ray=Ray(workers=2)))
    said = summary["test"]["rejected"][poison]
    assert said == "damaged: killed the worker that read it, 3 times"
    assert summary["test"]["dropped"]["damaged"] == 3
    there = {name for name in written(out) if name.startswith("images")}
    before = {name for name in written(prepared) if name.startswith("images")}
    assert before - there == {f"images/test/{poison}.jpg"} and len(there - before) <= 1
    assert all(written(out)[name] == written(prepared)[name] for name in before & there)
    # Three tries of its block, and then of it alone.
    assert ray_faults.handled(tmp_path).count(poison) == 2 * ray_engine.TRIES


def test_a_worker_that_is_killed_costs_nothing_but_its_block_again(
    source: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims = [path.stem for path in sorted((prepared / "images/test").glob("*"))][20:120:50]
    faults = {"notes": tmp_path, "once": victims}
    monkeypatch.setattr(photos, "examine", partial(ray_faults.examine, faults=faults))
    out = tmp_path / "data"
    prepare.run(preparing(source, out, engine="ray", ray=Ray(workers=2)))
    assert written(out) == written(prepared)
    handled = Counter(ray_faults.handled(tmp_path))
    # Three times where both lie in one block: it dies of one, and then of the other.
    assert all(2 <= handled[victim] <= ray_engine.TRIES for victim in victims)
    again = {name for name, times in handled.items() if times > 1}
    assert len(again) <= len(victims) * prepare.RAY_BLOCK < len(handled)


@pytest.fixture(scope="module")
def adapter(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_adapter(world / "tiny", tmp_path_factory.mktemp("adapter") / "loud")


def evaluating(world: Path, out: Path, **keys: Any) -> EvalConfig:
    """A run over 24 drawings in blocks of five, the last of them short."""
    flags = {
        "model.name": str(world / "tiny"),
        "data_dir": world / "data",
        "output_dir": out,
        "generation.block_size": 5,
        "generation.max_tokens": 8,
        **keys,
    }
    return load(EvalConfig, CONFIGS / "embedded/eval.yaml", flags=flags)


ENGINES = {
    "scripted": {"generation.backend": "scripted", "generation.script": "random_land"},
    "transformers": {"generation.max_tokens": 8},
    "sampled": {"samples": 2, "generation.temperature": 1.0},
}
ON_RAY = {"engine": "ray", "ray.workers": 2}


@workers
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES), "adapter"],
)
def test_evaluation_writes_the_files_of_the_local_engine(
    name: str, workers: int, world: Path, adapter: Path, tmp_path: Path
) -> None:
    keys = ENGINES.get(name, {"lora": adapter})
    evaluate.run(evaluating(world, tmp_path / "local", **keys))
    cluster = {"engine": "ray", "ray.workers": workers}
    metrics = evaluate.run(evaluating(world, tmp_path / "on ray", **keys, **cluster))
    assert metrics["complete"] and metrics["n"] == 24 * keys.get("samples", 1)
    assert written(tmp_path / "on ray") == written(tmp_path / "local")


def test_the_filter_writes_the_files_of_the_local_engine(world: Path, tmp_path: Path) -> None:
    files = []
    for name in ("local", "ray"):
        root = tmp_path / name
        shutil.copytree(world / "data", root / "data")
        flags = {
            "model.name": str(world / "tiny"),
            "data_dir": root / "data",
            "output_dir": root / "out",
            "generation.backend": "scripted",
            "generation.script": "random_land",
            "generation.block_size": 7,
            "engine": name,
            "ray.workers": 2,
        }
        learnable.run(load(FilterConfig, CONFIGS / "embedded/filter.yaml", flags=flags))
        files.append(written(root))
    assert files[0] == files[1] and "data/train_learnable.parquet" in files[0]


@pytest.fixture
def local_rows(world: Path, tmp_path: Path) -> bytes:
    evaluate.run(evaluating(world, tmp_path / "local"))
    return (tmp_path / "local/base/eval_osv/predictions.jsonl").read_bytes()


def ids_of(world: Path) -> list[str]:
    from geoguessr_rl import data

    return [photo.id for photo in data.load_split(world / "data", "eval_osv").photos]


def watch(monkeypatch: pytest.MonkeyPatch, notes: Path, **faults: Any) -> None:
    """Notes which photos are answered, and lets some kill their worker."""
    made = partial(ray_faults.start_answering, faults={"notes": notes, **faults})
    monkeypatch.setattr(predictions, "start_answering", made)


def test_a_killed_worker_changes_no_answer(
    world: Path, local_rows: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(world)
    watch(monkeypatch, tmp_path, once=[ids[7], ids[18]])
    evaluate.run(evaluating(world, tmp_path / "runs", **ON_RAY))
    run = tmp_path / "runs/base/eval_osv"
    assert (run / artifacts.PREDICTIONS).read_bytes() == local_rows
    assert not (run / predictions.WAITING).exists()
    assert sorted(set(ray_faults.handled(tmp_path))) == sorted(ids)
    assert (tmp_path / f"{ids[7]}.died").exists() and (tmp_path / f"{ids[18]}.died").exists()


@pytest.mark.slow
def test_a_photo_that_kills_its_worker_has_no_answer_and_the_run_is_incomplete(
    world: Path,
    local_rows: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
) -> None:
    poison = ids_of(world)[11]
    watch(monkeypatch, tmp_path, poison=[poison])
    overrides = ("generation.block_size=5", "generation.max_tokens=8", "ray.workers=2")
    flags = [
        "--config", CONFIGS / "embedded/eval.yaml", "--model", world / "tiny",
        "--data_dir", world / "data", "--output_dir", tmp_path / "runs",
        *(part for text in overrides for part in ("--set", text)),
    ]  # fmt: skip
    ended = script("run_eval.py", *flags, "--engine", "ray")
    assert ended.code == 1
    assert f"incomplete: 1 photos have no answer ({poison})" in ended.out
    path = tmp_path / "runs/base/eval_osv" / artifacts.PREDICTIONS
    rows = {row.id: row for row in artifacts.read_rows(path, Prediction)}
    assert rows[poison].outcome == "error" and len(rows) == 24
    metrics = json.loads(path.with_name(artifacts.METRICS).read_text())
    assert metrics["missing"] == [poison] and metrics["n"] == 23
    # The other engine asks for it alone, and the file is as if nothing had happened.
    assert script("run_eval.py", *flags).code == 0
    assert [json.loads(line) for line in path.read_bytes().splitlines()][1:] == [
        json.loads(line) for line in local_rows.splitlines()
    ][1:]


@pytest.mark.parametrize(
    "order", [("local", "ray"), pytest.param(("ray", "local"), marks=pytest.mark.slow)]
)
def test_a_run_goes_on_with_the_other_engine(
    order: tuple[str, str], world: Path, local_rows: bytes, tmp_path: Path
) -> None:
    for engine, limit in zip(order, (12, None), strict=True):
        keys = {"engine": engine, "ray.workers": 2, "limit": limit}
        evaluate.run(evaluating(world, tmp_path / "runs", **keys))
    path = tmp_path / "runs/base/eval_osv" / artifacts.PREDICTIONS
    assert path.read_bytes() == local_rows


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_block_that_waited_for_its_turn_is_not_answered_again(
    engine: str,
    world: Path,
    local_rows: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a killed driver leaves it: the third block is done and the first is not."""
    evaluate.run(evaluating(world, tmp_path / "runs", limit=15))
    run = tmp_path / "runs/base/eval_osv"
    rows = artifacts.read_rows(run / artifacts.PREDICTIONS, Prediction)
    third = artifacts.fingerprint([row.id for row in rows[10:15]])
    artifacts.write_rows(run / predictions.WAITING / f"{third}.jsonl", rows[10:15])
    header = (run / artifacts.PREDICTIONS).read_bytes().splitlines(keepends=True)[0]
    (run / artifacts.PREDICTIONS).write_bytes(header)
    asked: list[str] = []
    if engine == "ray":
        watch(monkeypatch, tmp_path)
    else:
        answer = predictions._answer

        def noted(backend: Any, sampling: Any, block: Any) -> Any:
            asked.extend(photo.id for photo in block)
            return answer(backend, sampling, block)

        monkeypatch.setattr(predictions, "_answer", noted)
    with pytest.raises(UserError, match="holds another run: backend"):
        other = evaluating(world, tmp_path / "runs", **ENGINES["scripted"])
        evaluate.run(other)
    evaluate.run(evaluating(world, tmp_path / "runs", engine=engine, **{"ray.workers": 2}))
    assert (run / artifacts.PREDICTIONS).read_bytes() == local_rows
    ids = ids_of(world)
    assert sorted(asked or ray_faults.handled(tmp_path)) == sorted(ids[:10] + ids[15:])
    assert not (run / predictions.WAITING).exists()


@pytest.mark.slow
def test_a_killed_driver_loses_no_finished_block(
    world: Path, tmp_path: Path, start_script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"generation.block_size": 1, "samples": 24, "generation.temperature": 1.0}
    keys["generation.max_tokens"] = 64
    evaluate.run(evaluating(world, tmp_path / "local", **keys))
    overrides = [f"{key}={value}" for key, value in keys.items()]
    process = start_script(
        "run_eval.py", "--config", CONFIGS / "embedded/eval.yaml", "--model", world / "tiny",
        "--data_dir", world / "data", "--output_dir", tmp_path / "runs", "--engine", "ray",
        *(part for text in [*overrides, "ray.workers=1"] for part in ("--set", text)),
    )  # fmt: skip
    run = tmp_path / "runs/base/eval_osv"
    path = run / artifacts.PREDICTIONS
    end = time.monotonic() + 120
    while not artifacts.holds_rows(path):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = {row.id for row in artifacts.read_rows(path, Prediction)}
    assert 0 < len(done) < 24
    finished = {
        row.id
        for file in (run / predictions.WAITING).glob("*.jsonl")
        for row in artifacts.read_rows(file, Prediction)
    }
    watch(monkeypatch, tmp_path)
    evaluate.run(evaluating(world, tmp_path / "runs", **keys, **ON_RAY))
    assert written(tmp_path / "runs") == written(tmp_path / "local")
    assert not (done | finished) & set(ray_faults.handled(tmp_path))


def test_scores_are_those_of_the_local_engine(
    world: Path, local_rows: bytes, tmp_path: Path, script: Script
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(local_rows)
    for engine in ("local", "ray"):
        ended = script(
            "score_predictions.py", rows, "--truth", world / "data/eval_osv.parquet",
            "--output", tmp_path / f"{engine}.json", "--engine", engine,
        )  # fmt: skip
        assert ended.code == 0, ended.err
    assert (tmp_path / "ray.json").read_bytes() == (tmp_path / "local.json").read_bytes()


def count(notes: Path, numbers: int = 8, **keys: Any) -> dict[int, list[Any]]:
    start = partial(ray_faults.start_counting, notes=notes, **keys)
    blocks = artifacts.blocks(range(numbers), 4)
    return dict(ray_engine.map_blocks(start, blocks, lambda item: [], Ray(workers=2)))


def test_a_mistake_of_the_users_comes_back_as_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        count(tmp_path, fault="user")
    assert str(refused.value) == "there is no such thing; name another"


def test_a_bug_is_raised_at_once_with_the_workers_traceback(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug of ours") as raised:
        count(tmp_path, numbers=4, fault="bug")
    assert "ray_faults.py" in raised.value.__notes__[0]
    assert ray_faults.handled(tmp_path) == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_a_cluster_that_loses_every_worker_ends_with_the_blocks_name(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        count(tmp_path, numbers=3, fault="everything")
    text = str(refused.value)
    assert text.startswith("the block from 0 to 2 lost its worker 3 times") and "\n" not in text


def test_both_workers_work(tmp_path: Path) -> None:
    answers = count(tmp_path, numbers=400)
    assert [value for n in sorted(answers) for value, _ in answers[n]] == list(range(0, 800, 2))
    assert len({pid for block in answers.values() for _, pid in block}) == 2


def test_a_window_is_handed_over_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "WINDOW", 1)
    answers = count(tmp_path, numbers=9)
    assert {n: [value for value, _ in block] for n, block in answers.items()} == {
        0: [0, 2, 4, 6],
        1: [8, 10, 12, 14],
        2: [16],
    }


def test_without_the_package_ray_names_its_extra_and_local_works(
    world: Path, tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    flags = [
        "--config", CONFIGS / "embedded/eval.yaml", "--backend", "scripted",
        "--data_dir", world / "data", "--output_dir", tmp_path,
    ]  # fmt: skip
    ended = script("run_eval.py", *flags, "--engine", "ray")
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "install it with uv pip install -e '.[ray]'" in ended.err
    assert script("run_eval.py", *flags).code == 0


ON_GPUS = """
from pathlib import Path

import ray
from ray_faults import start_seeing

from geoguessr_rl.backends.ray_engine import map_blocks, session
from geoguessr_rl.config import Ray

ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
with session("ray", Ray()):
    blocks = [[n] for n in range(60)]
    seen = dict(map_blocks(start_seeing, blocks, lambda item: [], Ray(), gpu=True)).values()
    print(sorted({gpus for ((gpus, _),) in seen}), len({pid for ((_, pid),) in seen}))
"""


def test_a_worker_takes_a_gpu_of_its_own_where_there_are_any() -> None:
    """Two logical GPUs; Ray hands each of them out by CUDA_VISIBLE_DEVICES."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", ON_GPUS]
    ended = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ended.stdout.splitlines()[-1:] == ["['0', '1'] 2"], ended.stderr[-2000:]


def test_ray_clients_address_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"on a node of the cluster with ray\.address auto"):
        ray_engine._connect(Ray(address="ray://127.0.0.1:10001"))


def test_usage_statistics_are_off_before_ray_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError), ray_engine.session("ray", Ray()):
        pass
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_ray_data_keeps_no_records_of_errors() -> None:
    assert not logging.getLogger("ray.data").isEnabledFor(logging.ERROR)


def test_a_cluster_that_was_there_stays_up(world: Path, tmp_path: Path) -> None:
    import ray

    before = ray.get_runtime_context().get_job_id()
    evaluate.run(evaluating(world, tmp_path, **ENGINES["scripted"], **ON_RAY))
    assert ray.is_initialized() and ray.get_runtime_context().get_job_id() == before


def test_the_planner_says_what_phases_take_on_clusters() -> None:
    """Recomputed from the budget's own functions, at the figures of one GPU and of eight."""
    config = load(GrpoConfig, CONFIGS / "grpo.yaml")
    lines = plan.on_clusters(config, [1, 8, 64])
    args = planning.trainer_args(config.trainer)
    model, gpu = planning.model_shape(config.model.name, config.lora), budget.GPUS["A100-80"]
    run = planning.run_shape(config, args, plan.PHOTO_TOKENS, 1)
    block = replace(
        run, micro_batch=256, accumulation=1, generations=1, generation_batch=256, vllm_share=0.85
    )
    parts = budget.step_plan(model, block, gpu)
    hours = (120 + 821 * (parts["decode"] + parts["prefill"])) / 3600  # 210,122 photos
    (row,) = [line for line in lines if "210,122" in line]
    assert f"| {hours:.1f} h, {hours * 1.39:.2f} $ |" in row
    hours = (120 + 103 * (parts["decode"] + parts["prefill"])) / 3600
    assert f"| {hours:.1f} h, {8 * hours * 1.39:.2f} $ |" in row
    hours = 1200 * sum(budget.step_plan(model, run, gpu).values()) / 3600
    assert f"| {hours:.1f} h, {hours * 1.39:.2f} $ |" in lines[-1]
    assert lines[-1].endswith("| – |")  # 32 completions a step are no work for 64 GPUs


def test_the_guides_table_is_the_planners() -> None:
    guide = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    config = load(GrpoConfig, CONFIGS / "grpo.yaml")
    table = [line for line in plan.on_clusters(config, [1, 8, 64]) if line.startswith("|")]
    assert "\n".join(table) in guide


@pytest.mark.parametrize("text", ["", "0", "1,", "eight", "1,-8"])
def test_numbers_of_gpus_must_be_numbers(text: str, script: Script) -> None:
    ended = script("plan_run.py", "--gpus", text or ",")
    assert ended.code == 2 and ended.err.endswith("must be numbers of GPUs, as in 1,8,64\n")
