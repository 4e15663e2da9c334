"""Compare: runs side by side only where they did the same task, and what got worse first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geoguessr_rl import artifacts
from geoguessr_rl.prompt import format_completion

PHOTOS = [
    (f"{code}{n}", latitude + n / 10, longitude, code)
    for code, latitude, longitude in (
        ("FR", 46.0, 2.0), ("DE", 51.0, 10.0), ("JP", 36.0, 138.0), ("BR", -10.0, -50.0),
    )
    for n in range(4)
]  # fmt: skip

Evaluate = Callable[..., Path]


@pytest.fixture
def evaluate(
    tmp_path: Path, make_split: Callable[..., Path], script: Callable[..., Any]
) -> Evaluate:
    """Evaluates answers, `{country code: completion}`, and returns the run's folder."""

    def run(name: str, answers: dict[str, str], *flags: object) -> Path:
        folder = tmp_path / "data"
        if not folder.exists():
            make_split(folder, PHOTOS)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({one: answers.get(code, "?") for one, _, _, code in PHOTOS}))
        ended = script(
            "run_eval.py", "--data_dir", folder, "--output_dir", tmp_path / "eval",
            "--run_name", name, "--backend", "scripted", "--set", f"generation.script={path}",
            *flags,
        )  # fmt: skip
        assert ended.code == 0, ended.err
        return tmp_path / "eval" / name / "eval_osv"

    return run


def at(country: str, latitude: float, longitude: float) -> str:
    return format_completion(country, latitude, longitude, style="direct")


FRANCE = at("France", 46.2, 2.0)
BASE = {code: FRANCE for code in ("FR", "DE", "JP", "BR")}
TUNED = {
    "FR": at("Germany", 51.0, 10.0),
    "DE": at("Germany", 51.2, 10.0),
    "JP": at("Japan", 36.2, 138.0),
    "BR": at("Brazil", -10.0, -50.0),
}


def test_every_run_is_held_against_the_first_and_what_fell_comes_first(
    evaluate: Evaluate, script: Callable[..., Any], tmp_path: Path
) -> None:
    folders = [evaluate("base", BASE), evaluate("rl", TUNED), evaluate("same", BASE)]
    output = tmp_path / "compared.json"
    ended = script("compare_runs.py", *folders, "--output", output)
    assert ended.code == 0, ended.err
    assert "rl against base on eval_osv, 16 photos: mean GeoScore is better" in ended.out
    assert "same against base on eval_osv, 16 photos: mean GeoScore is not disting" in ended.out
    found = json.loads(output.read_text())
    assert found["base"] == "base"
    rl, same = found["comparisons"]
    assert rl["countries"][0]["name"] == "France"
    assert rl["continents"][0]["name"] == "Europe"
    assert rl["countries"][0]["high"] < 0 < rl["countries"][-1]["low"]
    assert all(row["difference"] == 0 for row in same["countries"])
    metrics = {row["metric"]: row for row in rl["metrics"]}
    assert (metrics["country_acc"]["before"], metrics["country_acc"]["after"]) == (0.25, 0.75)
    assert metrics["country_acc_coords"]["after"] == 0.75
    score = metrics["mean_geoscore"]
    assert (score["better"], score["worse"], score["ties"]) == (12, 4, 0)
    worst = ended.out.index("By country, worst")
    assert ended.out.index("  France", worst) < ended.out.index("  Japan", worst)
    assert "adjusted as one family (Holm)" in ended.out
    assert "some stand out by chance" in ended.out


DIFFERENCES = {
    "sampling": ["--samples", 2, "--set", "generation.temperature=1.0"],
    "sampling ": ["--set", "generation.max_tokens=64"],
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_other_sampling_or_k_is_refused_by_name(
    name: str, evaluate: Evaluate, script: Callable[..., Any]
) -> None:
    folders = [evaluate("base", BASE), evaluate("rl", TUNED, *DIFFERENCES[name])]
    ended = script("compare_runs.py", *folders)
    assert ended.code == 2 and f"not comparable: {name.strip()} is" in ended.err


@pytest.mark.parametrize("key", ["split_fingerprint", "image", "score_version"])
def test_other_photos_size_or_score_version_are_refused_by_name(
    key: str, evaluate: Evaluate, script: Callable[..., Any]
) -> None:
    folders = [evaluate("base", BASE), evaluate("rl", TUNED)]
    identity = json.loads((folders[1] / artifacts.IDENTITY).read_text())
    identity[key] = {"image": {"long_edge": 5}}.get(key, "another")
    (folders[1] / artifacts.IDENTITY).write_text(json.dumps(identity))
    path = folders[1] / artifacts.PREDICTIONS
    _, *rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({"header": identity}) + "\n", *rows]))
    ended = script("compare_runs.py", *folders)
    assert ended.code == 2 and f"not comparable: {key} is" in ended.err


def test_one_run_alone_is_no_comparison(evaluate: Evaluate, script: Callable[..., Any]) -> None:
    ended = script("compare_runs.py", evaluate("base", BASE))
    assert ended.code == 2 and "needs two runs or more" in ended.err
