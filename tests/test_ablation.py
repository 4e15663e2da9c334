"""The ablation's figures by hand, its guards, and its script on the tiny model."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended, make_checkpoint
from warm_base import warm_up

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import EvalConfig, Generation
from geoguessr_rl.eval_metrics import make_prediction
from geoguessr_rl.phases import ablation
from geoguessr_rl.records import Completion
from geoguessr_rl.runs import Run

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "configs/embedded"
NAMES = ("run1", "run2", "run3")


def make_training(folder: Path, *, steps: int = 4, max_steps: int = 4) -> Path:
    """A training run's folder that generates every second step."""
    trainer = {"max_steps": max_steps, "beta": 0.02, "num_generations": 4}
    artifacts.write_json(folder / artifacts.RESOLVED_CONFIG, {"trainer": trainer})
    artifacts.write_json(folder / artifacts.IDENTITY, {"completions_a_step": 8})
    log = [
        {"step": 1, "grad_norm": 0.5, "group_std": 0.1},
        {"step": 2, "grad_norm": 7.25},
        {"step": 3, "grad_norm": 0.1, "group_std": 0.4},
        {"step": 4, "grad_norm": 0.2},
    ]
    make_checkpoint(folder, steps, json.dumps({"log_history": log}))
    return folder


def make_run(name: str, kilometres: list[float]) -> Run:
    """A run over one photo in Kenya a distance, each answered that far north with the country."""
    rows = []
    for photo, km in enumerate(kilometres):
        answer = {"country": "Kenya", "lat": km / 111.195, "lon": 38}
        text = f"<think>x</think><answer>{json.dumps(answer)}</answer>"
        completion = Completion(text, 20, "stop", None)
        rows.append(make_prediction(str(photo), 0, 0.0, 38.0, "KE", completion))
    return Run(name, Path(name), {}, {}, {}, rows)


def test_a_run_is_read_from_its_config_and_its_log(tmp_path: Path) -> None:
    training = ablation.read_training(make_training(tmp_path / "run2"))
    assert training == ablation.Training(
        run="run2",
        adapter=tmp_path / "run2/checkpoint-4",
        scale_rewards="group",  # TRL's default
        beta=0.02,
        prompts=2,
        steps=4,
        median_spread=0.25,  # of the two steps that generate
        peak_grad_norm=7.25,  # which was on another step
    )


def test_a_run_that_did_not_reach_its_end_is_refused(tmp_path: Path) -> None:
    stopped = make_training(tmp_path / "run1", steps=4, max_steps=6)
    with pytest.raises(UserError, match="stopped at step 4 of 6; run the same command again"):
        ablation.read_training(stopped)
    shutil.rmtree(stopped / "checkpoint-4")
    with pytest.raises(UserError, match="stopped at step 0 of 6"):
        ablation.read_training(stopped)
    with pytest.raises(UserError, match=r"resolved_config\.json does not exist; run the same"):
        ablation.read_training(tmp_path / "nowhere")


def test_a_backend_without_adapters_is_refused(tmp_path: Path) -> None:
    config = EvalConfig(generation=Generation(backend="scripted"))
    with pytest.raises(UserError, match="the scripted backend has no adapters"):
        ablation.run(config, [tmp_path], tmp_path)


def test_gains_are_paired_over_photos_and_the_verdicts_adjusted(tmp_path: Path) -> None:
    training = ablation.read_training(make_training(tmp_path / "run"))
    far, near = [5000.0 + 10 * n for n in range(12)], [10.0 * n for n in range(12)]
    mixed = [km + (30 if n < 3 else -40) for n, km in enumerate(far)]  # worse on three photos
    base = make_run("base", far)
    others = [make_run("a", near), make_run("b", far), make_run("c", mixed)]
    better, same, unclear = ablation.compare([training] * 3, base, others)

    rewards = [row.total for row in base.rows], [row.total for row in others[0].rows]
    assert better.reward.difference == pytest.approx((sum(rewards[1]) - sum(rewards[0])) / 12)
    assert 0.3 < better.reward.low < better.reward.difference < better.reward.high < 0.6
    assert better.geoscore.difference > 4000 and better.geoscore.better == 12
    assert better.verdict == "better"
    assert same.reward.difference == 0 and same.verdict == "not distinguishable at n = 12"
    assert unclear.reward.low > 0 and 0.025 < unclear.reward.p < 0.05  # alone it would be better
    assert unclear.verdict == "not distinguishable at n = 12"


def test_the_table_holds_ours_and_labels_what_is_published(tmp_path: Path) -> None:
    training = ablation.read_training(make_training(tmp_path / "run2"))
    far, near = [5000.0 + 10 * n for n in range(12)], [10.0 * n for n in range(12)]
    base = make_run("base", near)
    head, row = ablation.table(ablation.compare([training], base, [make_run("a", far)]))
    assert head.startswith("run   scale_rewards  beta  prompts  steps  reward gain")
    assert row.startswith("run2          group  0.02        2      4       −0.")
    assert row.split()[-3:] == ["0.250", "7.25", "worse"]
    assert "for orientation only, not comparable" in ablation.PUBLISHED_SOURCE
    assert [line.split() for line in ablation.published_table()[1:]] == [
        ["run1", "+0.162", "0.016", "11.25"],
        ["run2", "+0.033", "0.193", "0.16"],
        ["run3", "+0.072", "0.078", "6.77"],
    ]


def run_ablation(world: Path, out: Path, configs: Path) -> Ended:
    """Runs the script from another folder: two steps a run, eight photos."""
    command = [
        "bash", str(ROOT / "scripts/run_ablation.sh"), "--config_dir", str(configs),
        "--eval_config", str(configs / "eval.yaml"), "--data_dir", str(world / "data"),
        "--model", str(warm_up(world)), "--output_dir", out.name, "--backend", "transformers",
        "--limit", "8", "--", "--split", "train_pool", "--set", "prompt.style=direct",
        "--set", "trainer.max_steps=2", "--set", "trainer.save_steps=2",
        "--set", "trainer.report_to=none",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_the_script_runs_all_three_and_goes_on_where_it_failed(
    world: Path, tmp_path: Path, script: Callable[..., Ended]
) -> None:
    out, configs = tmp_path / "an ablation", tmp_path / "my configs"
    shutil.copytree(EMBEDDED / "ablations", configs)
    direct = (EMBEDDED / "eval.yaml").read_text() + "prompt: {style: direct}\n"
    (configs / "eval.yaml").write_text(direct)
    (configs / "run2.yaml").rename(configs / "away.yaml")
    ended = run_ablation(world, out, configs)
    assert ended.code == 2
    assert f"error: the config file {configs / 'run2.yaml'} does not exist" in ended.err
    done = [
        out / "eval/base/eval_osv/predictions.jsonl",
        out / "run1/checkpoint-2/trainer_state.json",
    ]
    before = [path.stat().st_mtime_ns for path in done]

    (configs / "away.yaml").rename(configs / "run2.yaml")
    ended = run_ablation(world, out, configs)
    assert ended.code == 0, ended.err[-3000:]
    assert [path.stat().st_mtime_ns for path in done] == before
    printed = ended.out.splitlines()
    start = next(n for n, line in enumerate(printed) if line.startswith("run   scale_rewards"))
    rows = [line.split() for line in printed[start + 1 : start + 4]]
    assert [row[:5] for row in rows] == [
        ["run1", "group", "0", "1", "2"],
        ["run2", "none", "0.02", "2", "2"],
        ["run3", "group", "0", "2", "2"],
    ]
    assert printed[start + 4].startswith("gains over the base on eval_osv, 8 photos")
    assert "not comparable" in ended.out
    record = json.loads((out / ablation.RESULT).read_text())
    assert [run["training"]["run"] for run in record["runs"]] == list(NAMES)
    assert all(run["reward"]["low"] <= run["reward"]["high"] for run in record["runs"])
    assert all(run["training"]["median_spread"] > 0 for run in record["runs"])

    # All is measured. Another adapter's answers under a run's name are refused.
    shutil.rmtree(out / "eval/run2-step-2")
    shutil.copytree(out / "eval/run1-step-2", out / "eval/run2-step-2")
    ended = script(
        "compare_ablation.py", *(out / name for name in NAMES), "--config", configs / "eval.yaml",
        "--model", world / "warm", "--data_dir", world / "data", "--limit", 8,
        "--output_dir", out,
    )  # fmt: skip
    assert ended.code == 2
    assert "run2-step-2/eval_osv holds another run: adapter was" in ended.err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--steps", "3"], "unknown option --steps; flags of train_grpo.py go behind --"),
        (["--model"], "--model takes a value"),
    ],
)
def test_a_wrong_option_of_the_script_is_refused(flags: list[str], sentence: str) -> None:
    command = ["bash", str(ROOT / "scripts/run_ablation.sh"), *flags]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and sentence in ended.stderr
