"""Evaluation in depth: K samples, headers, verification, and servers that fail and come back."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from api_server import PAGE, ApiServer, Reply, Request, chat, error, now_and_then, proxy
from conftest import scene

from geoguessr_rl import artifacts
from geoguessr_rl.backends import openai
from geoguessr_rl.bootstrap import interval_of_mean
from geoguessr_rl.eval_metrics import consensus
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Prediction

PHOTOS = [(f"p{n:02}", 40.5 + n / 2, 2.0 + n, "FR") for n in range(12)]
Script = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, make_split: Callable[..., Path]) -> Path:
    """Twelve evaluation photos with their files, and a train pool of Japan."""
    make_split(tmp_path / "data", PHOTOS)
    make_split(tmp_path / "data", [("t1", 36.0, 138.0, "JP")], name="train_pool", role="train")
    for n, (identifier, *_) in enumerate(PHOTOS):
        path = tmp_path / f"data/images/{identifier}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(scene(n))
    return tmp_path


def flags(folder: Path, *more: object) -> list[object]:
    return [
        *("--data_dir", folder / "data", "--output_dir", folder / "eval"),
        *("--set", "generation.block_size=4", *more),
    ]


def run_dir(folder: Path, name: str = "base") -> Path:
    return folder / "eval" / name / "eval_osv"


def metrics_of(folder: Path, name: str = "base") -> dict[str, Any]:
    return json.loads((run_dir(folder, name) / artifacts.METRICS).read_text())


def rows_of(folder: Path, name: str = "base") -> list[Prediction]:
    return artifacts.read_rows(run_dir(folder, name) / artifacts.PREDICTIONS, Prediction)


def scripted(script_name: str) -> list[str]:
    return ["--backend", "scripted", "--set", f"generation.script={script_name}"]


# --- K samples


def test_k_samples_give_mean_best_and_consensus_with_intervals(
    folder: Path, script: Script
) -> None:
    more = (*scripted("random_land"), "--samples", 3, "--set", "generation.temperature=1.0")
    ended = script("run_eval.py", *flags(folder, *more))
    assert ended.code == 0, ended.err
    assert "consensus-of-3 GeoScore" in ended.out
    rows = rows_of(folder)
    assert [(row.id, row.sample) for row in rows[:4]] == [
        ("p00", 0), ("p00", 1), ("p00", 2), ("p01", 0),
    ]  # fmt: skip
    photos = [rows[i : i + 3] for i in range(0, 36, 3)]
    metrics = metrics_of(folder)
    assert (metrics["n"], metrics["samples"]) == (36, 3)
    for name, values in {
        "mean": [np.mean([row.geoscore for row in photo]) for photo in photos],
        "best": [max(row.geoscore for row in photo) for photo in photos],
        "consensus": [consensus(photo).geoscore for photo in photos],
    }.items():
        figure = metrics["of_k"][name]["mean_geoscore"]
        assert figure["value"] == pytest.approx(np.mean(values))
        assert figure["interval"] == pytest.approx(interval_of_mean(values))


def test_k_equal_answers_are_refused(folder: Path, script: Script) -> None:
    ended = script("run_eval.py", *flags(folder, *scripted("random_land"), "--samples", 3))
    assert ended.code == 2 and "samples is 3 and generation.temperature 0" in ended.err


def test_answers_do_not_depend_on_order_or_blocks(folder: Path, script: Script) -> None:
    more = (*scripted("random_land"), "--samples", 2, "--set", "generation.temperature=1.0")
    for name, size in (("base", 4), ("other", 5)):
        ended = script(
            "run_eval.py", *flags(folder, *more), "--run_name", name,
            "--set", f"generation.block_size={size}",
        )  # fmt: skip
        assert ended.code == 0, ended.err
    assert rows_of(folder) == rows_of(folder, "other")


def test_the_prior_of_the_train_pool_is_a_baseline(folder: Path, script: Script) -> None:
    ended = script("run_eval.py", *flags(folder, *scripted("train_prior")))
    assert ended.code == 0, ended.err
    assert {row.pred_country for row in rows_of(folder)} == {"Japan"}
    identity = json.loads((run_dir(folder) / artifacts.IDENTITY).read_text())
    assert identity["model"] == "scripted:train_prior" and identity["model_files"]


# --- The header, and verification


def test_a_file_begins_with_what_its_rows_are(folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder, *scripted("constant"))).code == 0
    path = run_dir(folder) / artifacts.PREDICTIONS
    header = artifacts.read_header(path)
    assert header is not None
    versions = header.pop("versions")
    assert versions == artifacts.installed_versions() and "torch" in versions
    assert header == json.loads((run_dir(folder) / artifacts.IDENTITY).read_text())
    assert len(path.read_text().splitlines()) == 13 and len(rows_of(folder)) == 12


def verify(folder: Path, script: Script) -> Any:
    return script("run_eval.py", "--verify", run_dir(folder))


def test_an_honest_run_verifies(folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder, *scripted("random_land"))).code == 0
    ended = verify(folder, script)
    assert ended.code == 0 and ended.out.startswith("verified 12 rows and every figure")


def edit_row(path: Path, **values: Any) -> None:
    lines = path.read_text().splitlines()
    row = json.loads(lines[3])
    lines[3] = json.dumps({**row, **values})
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("score", "photo p02, sample 0: geoscore is 5000.0, and its completion gives"),
        ("distance", "photo p02, sample 0: d_km is 1.0, and its completion gives"),
        ("truth", "photo p02, sample 0: its truth is not that of eval_osv"),
        ("photo", "photo q99, sample 0 is not in eval_osv"),
        ("metric", "says mean_geoscore = 4999.0, and the rows beside it give"),
        ("nested metric", "says acc_at_km = "),
    ],
)
def test_whatever_was_edited_is_named(what: str, says: str, folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder, *scripted("random_land"))).code == 0
    path = run_dir(folder) / artifacts.PREDICTIONS
    changes: dict[str, dict[str, Any]] = {
        "score": {"geoscore": 5000.0}, "distance": {"d_km": 1.0}, "truth": {"latitude": 1.0},
        "photo": {"id": "q99"},
    }  # fmt: skip
    if what in changes:
        edit_row(path, **changes[what])
    else:
        metrics = metrics_of(folder)
        if what == "metric":
            metrics["mean_geoscore"] = 4999.0
        else:
            metrics["acc_at_km"]["200"] = 0.99
        (run_dir(folder) / artifacts.METRICS).write_text(json.dumps(metrics))
    ended = verify(folder, script)
    assert ended.code == 2 and "figures differ; evaluate that run again" in ended.err
    assert says in ended.out


def test_an_identity_that_is_not_the_header_is_refused(folder: Path, script: Script) -> None:
    assert script("run_eval.py", *flags(folder, *scripted("random_land"))).code == 0
    identity = run_dir(folder) / artifacts.IDENTITY
    identity.write_text(identity.read_text().replace("random_land", "constant"))
    ended = verify(folder, script)
    assert ended.code == 2 and "run.json is not the header of predictions.jsonl" in ended.err


# --- Servers that fail


def answer_for(content: bytes) -> str:
    """An answer that depends on the picture alone."""
    shift = sum(content) % 7
    return format_completion("France", 40.0 + shift, 2.0 + shift, style="direct")


def respond(request: Request) -> Reply:
    (block,) = [b for b in request.body["messages"][-1]["content"] if b["type"] == "image_url"]
    picture = base64.b64decode(block["image_url"]["url"].partition(",")[2])
    return chat(answer_for(picture))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Points this process to a server, with short waits."""

    def use(url: str) -> None:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
        monkeypatch.setenv("OPENAI_MODEL", "tiny")

    monkeypatch.setattr(openai, "BACKOFF_SECONDS", 0.001)
    return use


API = ["--backend", "openai", "--set", "generation.api.tries=3"]


def test_a_server_that_dies_halfway_leaves_a_run_that_resumes_to_the_same_result(
    folder: Path, script: Script, api: Callable[[str], None]
) -> None:
    with ApiServer(respond) as server:
        api(server.url)
        ended = script("run_eval.py", *flags(folder, *API, "--run_name", "whole"))
        assert ended.code == 0, ended.err
        served = len(server.requests)

    def dies(request: Request) -> Reply | None:
        return respond(request) if request.number < 6 else None

    with ApiServer(dies) as server:
        api(server.url)
        one_by_one = (*API, "--set", "generation.api.concurrency=1")
        ended = script("run_eval.py", *flags(folder, *one_by_one))
    assert ended.code == 1
    assert "incomplete: 6 photos have no answer (p06, p07, p08, p09, p10 ...)" in ended.out
    metrics = metrics_of(folder)
    assert metrics["complete"] is False and metrics["n"] == 6 and len(metrics["missing"]) == 6
    assert all(row.completion == "" for row in rows_of(folder) if row.outcome == "error")

    with ApiServer(respond) as server:
        api(server.url)
        ended = script("run_eval.py", *flags(folder, *API))
        assert ended.code == 0, ended.err
        assert len(server.requests) == 6 < served  # only what was missing
    assert rows_of(folder) == rows_of(folder, "whole")
    fresh, whole = metrics_of(folder), metrics_of(folder, "whole")
    for metrics in (fresh, whole):
        metrics.pop("run_name")
    assert fresh == whole and fresh["complete"] and fresh["missing"] == []


def test_a_page_in_place_of_13_percent_of_answers_changes_nothing(
    folder: Path, script: Script, api: Callable[[str], None]
) -> None:
    with ApiServer(respond) as server:
        api(server.url)
        assert script("run_eval.py", *flags(folder, *API, "--run_name", "plain")).code == 0
        with proxy(server.url, now_and_then(0.13, PAGE, seed=6)) as between:
            api(between.url)
            ended = script("run_eval.py", *flags(folder, *API, "--set", "generation.api.tries=9"))
            assert ended.code == 0, ended.err
            assert len(between.requests) > 12  # some were asked for again
    assert rows_of(folder) == rows_of(folder, "plain")
    assert all("<" not in row.completion.replace("<answer>", "").replace("</answer>", "")
               for row in rows_of(folder))  # fmt: skip


def test_a_report_and_a_comparison_refuse_an_incomplete_run(
    folder: Path, script: Script, api: Callable[[str], None]
) -> None:
    assert script("run_eval.py", *flags(folder, *scripted("constant"), "--run_name", "a")).code == 0
    with ApiServer(lambda request: error(500, "down")) as server:
        api(server.url)
        assert script("run_eval.py", *flags(folder, *API)).code == 1
    ended = script("compare_runs.py", run_dir(folder, "a"), run_dir(folder))
    assert ended.code == 2 and "transport errors" in ended.err


def test_tokens_are_counted_and_priced(
    folder: Path, script: Script, api: Callable[[str], None]
) -> None:
    with ApiServer(respond) as server:
        api(server.url)
        prices = ("generation.api.price_prompt=2.0", "generation.api.price_completion=10.0")
        ended = script("run_eval.py", *flags(folder, *API), "--set", prices[0], "--set", prices[1])
    assert ended.code == 0, ended.err
    rows, used = rows_of(folder), metrics_of(folder)["usage"]
    prompt, completion = sum(row.prompt_tokens or 0 for row in rows), sum(r.tokens for r in rows)
    assert (used["prompt_tokens"], used["completion_tokens"]) == (prompt, completion)
    assert used["dollars"] == pytest.approx((2 * prompt + 10 * completion) / 1e6)
    assert f"{prompt:,} prompt and {completion:,} completion tokens" in ended.out
    assert "dollars" in ended.out


def test_the_labels_of_the_split_decide_the_figures_by_coordinates(
    folder: Path, script: Script
) -> None:
    path = folder / "data/eval_osv.parquet"
    table = pl.read_parquet(path)
    artifacts.write_parquet(path, table.with_columns(pl.lit("Nowhere").alias("region")))
    assert script("run_eval.py", *flags(folder, *scripted("constant"))).code == 0
    metrics = metrics_of(folder)
    assert metrics["region_acc"] == 0 and metrics["city_acc"] is None
    assert metrics["country_acc_coords"] == 1
