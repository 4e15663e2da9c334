"""Prepare from a Hub on the loopback: the named files, pinned, resumed; a sentence a fault."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import ROOT, SMALL, csv_text, make_rows, photo_entries, write_zip
from hub_server import Answer, HubServer
from test_prepare import pano_rows

OSV, PANO = "osv5m/osv5m", "stochastic/random_streetview_images_pano_v0.0.2"
TEST = ["test.csv", "images/test/00.zip"]
TRAIN = ["train.csv", "images/train/00.zip", "images/train/01.zip"]
PREPARE = """
import sys
sys.path.insert(0, "scripts")
from geoguessr_rl import config, hub
hub.BACKOFF_SECONDS = 0.01
import prepare_data
config.run_script(prepare_data.main)
"""

Ended = subprocess.CompletedProcess[str]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    """OSV-5M with six test photos and eight train photos in two zips."""
    test = make_rows(["FR", "DE", "NA"], each=2)
    train = [{**row, "longitude": 150.5} for row in make_rows(["BR", "JP"] * 4, prefix="t")]
    tables = {"test.csv": test, "train.csv": train}
    files = {name: csv_text(rows).encode() for name, rows in tables.items()}
    parts = {TEST[1]: test, TRAIN[1]: train[:4], TRAIN[2]: train[4:], "images/train/02.zip": []}
    for name, rows in parts.items():
        write_zip(tmp_path / "a.zip", photo_entries(rows))
        files[name] = (tmp_path / "a.zip").read_bytes()
    with HubServer(files, repo=OSV) as running:
        yield running


@pytest.fixture
def prepare(server: HubServer, tmp_path: Path) -> Callable[..., Ended]:
    """Runs scripts/prepare_data.py in a process of its own, against the server."""

    def run(*flags: object, **environment: str) -> Ended:
        rules = {"image": SMALL.model_dump(), "contamination.max_hash_bits": None, "pano.size": 0}
        settings = [
            part for key, value in rules.items() for part in ("--set", f"{key}={json.dumps(value)}")
        ]
        command = [sys.executable, "-c", PREPARE, "--output_dir", tmp_path / "data", *settings]
        return subprocess.run(
            [*map(str, command), *map(str, flags)],
            env=server.environment(tmp_path / "cache", **environment),
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def fetched(server: HubServer) -> list[str]:
    """The files whose content was asked for, in order."""
    return [name for name in [*TEST, *TRAIN, "images/train/02.zip"] if server.offsets(name)]


def test_a_limit_fetches_the_test_files_and_the_whole_run_the_rest(
    server: HubServer, prepare: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = prepare("--limit", 4)
    assert ended.returncode == 0, ended.stderr
    assert fetched(server) == TEST
    ended = prepare()
    assert ended.returncode == 0, ended.stderr
    assert fetched(server) == [*TEST, *TRAIN]
    assert all(len(server.offsets(name)) == 1 for name in [*TEST, *TRAIN])
    manifest = json.loads((tmp_path / "data/train_pool.manifest.json").read_text())
    assert manifest["dataset"] == {"repo": OSV, "revision": server.commit, "files": TRAIN}
    assert pl.read_parquet(tmp_path / "data/train_pool.parquet").height == 8


def test_which_zips_is_a_list(server: HubServer, prepare: Callable[..., Ended]) -> None:
    ended = prepare("--set", "source.train=[1]")
    assert ended.returncode == 0, ended.stderr
    assert fetched(server) == [*TEST, TRAIN[0], TRAIN[2]]


def test_a_folder_keeps_the_commit_with_which_it_was_begun(
    server: HubServer, prepare: Callable[..., Ended], tmp_path: Path
) -> None:
    assert prepare("--limit", 4).returncode == 0
    first = server.commit
    known = {path: path.read_bytes() for path in (tmp_path / "data").rglob("*.parquet")}
    server.commit = "beef" + "0" * 36  # the dataset moves on
    requests = len(server.log)
    assert prepare("--limit", 4).returncode == 0
    assert len(server.log) == requests  # all of it is in the cache
    assert {path: path.read_bytes() for path in known} == known
    assert json.loads((tmp_path / "data/run.json").read_text())["source"]["revision"] == first
    ended = prepare("--limit", 4, "--set", f"source.revision={server.commit}")
    assert ended.returncode == 2 and "source.revision was" in ended.stderr


def test_a_connection_that_drops_halfway_is_continued(
    server: HubServer, prepare: Callable[..., Ended]
) -> None:
    half = len(server.files[TEST[1]]) // 2
    server.drop_after = [None, half]  # the CSV passes, the zip is cut
    ended = prepare("--limit", 4)
    assert ended.returncode == 0, ended.stderr
    assert server.offsets(TEST[1]) == [0, half]


def test_a_manifest_fetches_its_own_commit_and_files(
    server: HubServer, prepare: Callable[..., Ended], tmp_path: Path
) -> None:
    assert prepare("--limit", 4).returncode == 0
    manifest = tmp_path / "data/eval_osv.manifest.json"
    server.log.clear()
    ended = prepare(
        "--manifest", manifest, "--output_dir", tmp_path / "elsewhere",
        "--set", "source.revision=other", "--set", "source.test=[7]",
        HF_HUB_CACHE=str(tmp_path / "another cache"),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert fetched(server) == TEST
    assert (tmp_path / "elsewhere/eval_osv.manifest.json").read_bytes() == manifest.read_bytes()


FAULTS: dict[str, tuple[Callable[[HubServer], Any], dict[str, str], str]] = {
    "offline": (lambda _: None, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
    "a file that is missing": (
        lambda s: s.files.pop(TEST[1]),
        {},
        "has no file images/test/00.zip",
    ),
    "no space": (lambda s: s.claimed_size.update({TEST[1]: 10**13}), {}, "has no room for"),
    "401": (lambda s: s.always.update({"HEAD": Answer(401)}), {}, "hf auth login"),
    "404": (lambda s: s.always.update({"API": Answer(404)}), {}, "there is no dataset osv5m/osv5m"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_and_exit_code_2(
    name: str, server: HubServer, prepare: Callable[..., Ended], tmp_path: Path
) -> None:
    fault, environment, says = FAULTS[name]
    fault(server)
    ended = prepare("--limit", 4, **environment)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    (sentence,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert says in sentence
    assert not fetched(server)
    assert not list((tmp_path / "data").glob("*.parquet"))


def test_the_space_for_all_files_is_checked_before_the_first_byte(
    server: HubServer, prepare: Callable[..., Ended]
) -> None:
    server.claimed_size[TRAIN[2]] = 10**13
    ended = prepare()
    assert ended.returncode == 2 and "has no room for the dataset's files" in ended.stderr
    assert not fetched(server)


def test_the_pano_set_comes_from_its_own_repository(tmp_path: Path) -> None:
    halves = {f"data/train-{n:05d}-of-00002.parquet": pano_rows(["FR", "DE"]) for n in (0, 1)}
    files = {}
    for name, rows in halves.items():
        pl.DataFrame(rows).write_parquet(tmp_path / "half.parquet")
        files[name] = (tmp_path / "half.parquet").read_bytes()
    config = tmp_path / "pano.py"
    config.write_text(
        "import sys\n"
        "from geoguessr_rl import sources\n"
        "from geoguessr_rl.config import Pano\n"
        "print(sources.read_pano(sources.locate_pano(Pano())).rows.height)\n"
    )
    with HubServer(files, repo=PANO) as pano:
        environment = pano.environment(tmp_path / "pano cache")
        for offline in ("0", "1"):
            ended = subprocess.run(
                [sys.executable, config],
                env={**environment, "HF_HUB_OFFLINE": offline, "PYTHONPATH": os.fspath(ROOT)},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert ended.stdout.strip() == "4", ended.stderr
