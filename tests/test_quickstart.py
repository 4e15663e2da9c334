"""The quickstart's promises, for three seeds and through vLLM: the whole job on a CPU.

Slow: each run takes several minutes alone on two cores.
"""

import json
import re
import resource
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--seed", "0"], ["--seed", "1"], ["--seed", "2"], ["--vllm"]],
    ids=lambda options: " ".join(options),
)
def test_the_quickstart_learns_what_it_promises(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "quick start"
    command = ["bash", str(ROOT / "runbook/quickstart.sh"), *options, "--output_dir", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-5:]
    assert [line.split(":")[0] for line in last] == ["before", "after", "gain", "report", "next"]
    before, after = (
        json.loads((out / f"eval/{name}/eval_osv/metrics.json").read_text())
        for name in ("base", "rl")
    )
    assert before["country_acc"] < 0.25
    assert after["country_acc"] - before["country_acc"] >= 0.35
    assert after["format_rate"] >= 0.95
    assert after["mean_geoscore"] - before["mean_geoscore"] >= 1500
    low = re.search(r"interval (-?\d+) to", last[2])
    assert low and int(low[1]) > 1000
    report = (out / "report.md").read_text()
    assert "says nothing about real photos" in report.splitlines()[0]
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    assert peak_gib < 6
