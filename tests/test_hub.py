"""Downloads from a Hub on the loopback, with the real client and every fault that a line has."""

import errno
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import Answer, HubServer

from geoguessr_rl import hub
from geoguessr_rl.artifacts import UserError

ROOT = Path(__file__).parents[1]
REPO = "owner/photos"
ZIP, NOTE = "images/test/00.zip", "README.md"
SIZE = 3_000_000
CONTENT = random.Random(0).randbytes(SIZE)
# What another process does: the same calls, with the Hub's address in its environment.
PROCESS = """
import sys
from geoguessr_rl import config, hub
hub.BACKOFF_SECONDS = 0.01
limit, revision, *names = sys.argv[1:]
if int(limit):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
config.run_script(lambda: print(*hub.download("owner/photos", revision, names), sep="\\n"))
"""


@pytest.fixture
def server() -> Iterator[HubServer]:
    files = {ZIP: CONTENT, NOTE: b"CC BY-SA 4.0\n"}
    with HubServer(files, repo=REPO, in_git=[NOTE]) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, server: HubServer, cache: Path) -> Callable[..., None]:
    """Gives this process's client the settings that a new process would read."""
    from huggingface_hub import close_session, constants

    def use(**more: str) -> None:
        environment = server.environment(cache, **more)
        for name in [name for name in os.environ if name.startswith("HF_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # The client reads its environment once, into this module: read it again, from its file.
        spec = importlib.util.spec_from_file_location("huggingface_hub._", constants.__file__)
        assert spec and spec.loader
        fresh = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
        for name, value in vars(fresh).items():
            if name.isupper() and not name.startswith("_") and value != getattr(constants, name):
                monkeypatch.setattr(constants, name, value)
        close_session()

    monkeypatch.setattr(hub, "BACKOFF_SECONDS", 0.01)
    use()
    return use


def blobs(cache: Path) -> Path:
    return cache / "datasets--owner--photos" / "blobs"


def part(cache: Path, server: HubServer, name: str = ZIP) -> Path:
    return blobs(cache) / f"{server.checksum(name)}.part"


def put_part(cache: Path, server: HubServer, content: bytes) -> None:
    part(cache, server).parent.mkdir(parents=True)
    part(cache, server).write_bytes(content)


@contextmanager
def start(
    server: HubServer, cache: Path, *names: str, limit: int = 0, **more: str
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROCESS, str(limit), server.commit, *names]
    environment = server.environment(cache, **more)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # a failed test does not wait for it


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refused(names: Sequence[str] = (ZIP,), revision: str = "main", repo: str = REPO) -> str:
    with pytest.raises(UserError) as raised:
        hub.download(repo, revision, names)
    message = str(raised.value)
    assert "\n" not in message and "Traceback" not in message
    return message


def assert_whole(cache: Path, server: HubServer) -> None:
    """The zip stands in the cache, and nothing but blobs beside it."""
    (path,) = hub.download(REPO, server.commit, [ZIP])
    assert path.read_bytes() == CONTENT
    assert [file.name for file in blobs(cache).iterdir()] == [server.checksum(ZIP)]


@pytest.mark.usefixtures("use")
def test_files_arrive_where_the_plain_client_finds_them(server: HubServer, cache: Path) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    paths = hub.download(REPO, "main", [ZIP, NOTE, ZIP])
    assert [path.read_bytes() for path in paths] == [CONTENT, server.files[NOTE], CONTENT]
    for name, path in ((ZIP, paths[0]), (NOTE, paths[1])):
        for revision in ("main", server.commit):
            options = {"repo_type": "dataset", "revision": revision, "local_files_only": True}
            assert hf_hub_download(REPO, name, **options) == str(path)
    assert server.offsets(ZIP) == [0]
    names = {server.checksum(ZIP), server.checksum(NOTE)}
    assert {file.name for file in blobs(cache).iterdir()} == names
    scanned = scan_cache_dir(cache)
    assert not scanned.warnings and scanned.size_on_disk == SIZE + len(server.files[NOTE])


@pytest.mark.usefixtures("use")
def test_what_is_in_the_cache_costs_no_request(server: HubServer) -> None:
    first = hub.download(REPO, server.commit, [ZIP, NOTE])
    server.log.clear()
    assert hub.download(REPO, server.commit, [ZIP, NOTE]) == first
    assert server.log == []
    assert hub.download(REPO, "main", [ZIP, NOTE]) == first
    assert [request.path for request in server.log] == [f"/api/datasets/{REPO}/revision/main"]


def test_a_new_process_reads_the_same_settings_and_xet_is_not_used(
    server: HubServer, cache: Path
) -> None:
    server.xet = True
    with start(server, cache, ZIP, NOTE, HF_HUB_DISABLE_XET="0") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert [Path(line).read_bytes() for line in out.split()] == [CONTENT, server.files[NOTE]]
    assert server.offsets(ZIP) == [0]
    assert not [request for request in server.log if "xet-token" in request.path]
    with start(server, cache, ZIP, NOTE, HF_HUB_OFFLINE="1") as process:
        assert process.communicate()[0] == out


def test_the_token_goes_to_the_hub_and_not_to_the_server_it_leads_to(
    server: HubServer, use: Callable[..., None], cache: Path
) -> None:
    use(HF_TOKEN="hf_secret")
    server.through_cdn = True
    server.drop_after = [SIZE // 2]
    assert_whole(cache, server)
    authorized = {request.origin: request.authorized for request in server.log}
    assert authorized == {"hub": True, "cdn": False}
    # Every try asks the Hub anew, whose signed addresses expire.
    gets = [request.origin for request in server.log if request.method == "GET"]
    assert gets == ["hub", "cdn", "hub", "cdn"]


@pytest.mark.usefixtures("use")
@pytest.mark.parametrize("through_cdn", [False, True])
def test_a_line_that_breaks_often_costs_no_byte_twice(
    through_cdn: bool, server: HubServer, cache: Path
) -> None:
    server.through_cdn = through_cdn
    server.drop_after = [300_000] * 9  # more often than the tries that may bring nothing
    assert_whole(cache, server)
    assert [offset for offset in dict.fromkeys(server.offsets(ZIP))] == [
        n * 300_000 for n in range(10)
    ]
    assert server.sent(ZIP) == SIZE


@pytest.mark.usefixtures("use")
def test_a_reset_keeps_what_had_arrived(server: HubServer, cache: Path) -> None:
    server.reset = True
    server.drop_after = [SIZE // 3, None]
    server.seconds_a_block = 0.01
    assert_whole(cache, server)
    first, second = server.offsets(ZIP)
    assert first == 0 < second <= SIZE // 3  # a reset loses what the client has not yet read
    assert server.sent(ZIP) < 1.34 * SIZE


@pytest.mark.usefixtures("use")
def test_an_end_that_comes_too_early_is_no_end(server: HubServer, cache: Path) -> None:
    server.without_length = True
    server.drop_after = [1_000_000]
    assert_whole(cache, server)
    assert server.offsets(ZIP) == [0, 1_000_000] and server.sent(ZIP) == SIZE


@pytest.mark.usefixtures("use")
def test_tries_that_bring_nothing_end_and_the_next_command_continues(
    server: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.drop_after = [1_000_000]
    server.drop_always = 0
    message = refused()
    assert f"{ZIP} of {REPO}" in message and "it continues where it stopped" in message
    # The first brought bytes; its break and five more tries that brought none.
    assert server.offsets(ZIP) == [0] + [1_000_000] * (hub.TRIES - 1)
    assert capsys.readouterr().err.count("next try in") == hub.TRIES - 1
    server.drop_always = None
    assert_whole(cache, server)
    assert server.sent(ZIP) == SIZE


def test_a_killed_process_leaves_a_part_that_the_next_one_continues(
    server: HubServer, cache: Path
) -> None:
    server.stall_after = 2_500_000
    with start(server, cache, ZIP) as process:
        growing = part(cache, server)
        wait_until(lambda: growing.exists() and growing.stat().st_size >= hub.BUFFER_BYTES)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    held = growing.stat().st_size
    assert CONTENT.startswith(growing.read_bytes())
    with start(server, cache, ZIP) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert Path(out.strip()).read_bytes() == CONTENT
    assert server.offsets(ZIP) == [0, held]
    assert [file.name for file in blobs(cache).iterdir()] == [server.checksum(ZIP)]


def test_two_processes_fetch_a_file_once(server: HubServer, cache: Path) -> None:
    server.stall_after = SIZE // 2
    with start(server, cache, ZIP) as first:
        wait_until(lambda: bool(server.gets(ZIP)))
        with start(server, cache, ZIP) as second:
            assert second.stderr and "waiting for another process" in second.stderr.readline()
            server.go_on.set()
            ends = [process.communicate() for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], ends
    assert ends[0][0] == ends[1][0]
    assert "B/s" not in ends[1][1]  # the second shows no bar
    assert server.offsets(ZIP) == [0] and server.sent(ZIP) == SIZE
    assert [file.name for file in blobs(cache).iterdir()] == [server.checksum(ZIP)]


@pytest.mark.usefixtures("use")
@pytest.mark.parametrize("name", [ZIP, NOTE])
def test_a_file_that_arrives_damaged_is_fetched_anew_by_the_next_command(
    name: str, server: HubServer, cache: Path
) -> None:
    right = server.files[name]
    server.content[name] = right[:-1] + b"?"
    message = refused([name])
    assert message == f"{name} of {REPO} arrived damaged; run the command again"
    assert not part(cache, server, name).exists()
    server.content.clear()
    assert hub.download(REPO, "main", [name])[0].read_bytes() == right
    assert server.offsets(name) == [0, 0]


@pytest.mark.usefixtures("use")
def test_more_bytes_than_the_size_are_not_taken(server: HubServer, cache: Path) -> None:
    server.content[ZIP] = CONTENT + bytes(20_000_000)
    assert "arrived damaged" in refused()
    assert server.sent(ZIP) < 20_000_000
    assert not part(cache, server).exists()


@pytest.mark.usefixtures("use")
def test_a_server_without_ranges_sends_the_file_from_its_start(
    server: HubServer, cache: Path
) -> None:
    server.ignore_range = True
    server.drop_after = [1_000_000, 500_000]
    assert_whole(cache, server)
    assert server.offsets(ZIP) == [0, 1_000_000, 500_000]  # asked for, and not kept to
    assert server.sent(ZIP) == 1_500_000 + SIZE


@pytest.mark.usefixtures("use")
def test_a_server_without_ranges_that_always_breaks_is_given_up(server: HubServer) -> None:
    server.ignore_range = True
    server.drop_always = 1_000_000
    assert "continues where it stopped" in refused()
    assert len(server.gets(ZIP)) == hub.TRIES


@pytest.mark.usefixtures("use")
@pytest.mark.parametrize("shift", [-5, 7])
def test_another_range_than_the_one_asked_for_is_not_appended(
    shift: int, server: HubServer, cache: Path
) -> None:
    server.drop_after = [1_000_000]
    server.shift_range = shift
    assert_whole(cache, server)
    assert server.offsets(ZIP) == [0, 1_000_000, 0]


@pytest.mark.usefixtures("use")
def test_starting_anew_again_and_again_is_given_up(server: HubServer) -> None:
    server.drop_after = [1_000_000] * 40
    server.shift_range = 7
    assert "continues where it stopped" in refused()
    assert len(server.gets(ZIP)) == hub.TRIES


@pytest.mark.usefixtures("use")
@pytest.mark.parametrize("held", [CONTENT[:1000], CONTENT + b"more"])
def test_a_part_that_no_range_continues_is_begun_anew(
    held: bytes, server: HubServer, cache: Path
) -> None:
    put_part(cache, server, held)
    server.answers["GET"] = [Answer(416)] if len(held) < SIZE else []
    assert_whole(cache, server)
    assert server.offsets(ZIP) == [0]


@pytest.mark.usefixtures("use")
def test_a_part_that_was_whole_when_its_process_died_is_only_checked(
    server: HubServer, cache: Path
) -> None:
    put_part(cache, server, CONTENT)
    assert_whole(cache, server)
    assert server.offsets(ZIP) == []


@pytest.mark.usefixtures("use")
def test_a_part_of_other_bytes_is_found_out(server: HubServer, cache: Path) -> None:
    put_part(cache, server, bytes(1000))
    assert "arrived damaged" in refused()
    assert_whole(cache, server)


@pytest.mark.usefixtures("use")
def test_a_blob_that_another_commit_brought_is_only_linked(server: HubServer, cache: Path) -> None:
    hub.download(REPO, server.commit, [ZIP])
    server.commit = "beef" + "0" * 36
    server.files["copy.zip"] = CONTENT
    old, new = hub.download(REPO, "main", [ZIP, "copy.zip"])
    assert old.resolve() == new.resolve() and old.parts[-4] == server.commit
    assert server.offsets(ZIP) == [0] and server.offsets("copy.zip") == []


@pytest.mark.usefixtures("use")
def test_an_empty_file_arrives(server: HubServer) -> None:
    server.files["empty.csv"] = b""
    assert hub.download(REPO, "main", ["empty.csv"])[0].read_bytes() == b""


@pytest.mark.usefixtures("use")
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("API", 500),
        ("HEAD", 503),
        ("HEAD", 429),
        ("GET", 502),
        ("GET", 429),
        ("CDN", 403),  # a signed address that expired
        ("CDN", 404),
    ],
)
def test_a_passing_fault_is_tried_again(
    kind: str, status: int, server: HubServer, cache: Path
) -> None:
    server.through_cdn = kind == "CDN"
    server.answers[kind] = [Answer(status)] * 2
    assert hub.download(REPO, "main", [ZIP])[0].read_bytes() == CONTENT


@pytest.mark.usefixtures("use")
def test_a_server_s_wish_to_wait_is_granted_up_to_a_limit(server: HubServer) -> None:
    limited = Answer(429, {"RateLimit": '"resolvers";r=0;t=1'})
    server.answers["GET"] = [Answer(429, {"Retry-After": "1"}), limited]
    before = time.monotonic()
    hub.download(REPO, "main", [ZIP])
    assert time.monotonic() - before >= 3  # the second is rounded up by one
    for too_long in ("86400", "Fri, 31 Dec 2100 23:59:59 GMT"):
        server.always["HEAD"] = Answer(429, {"Retry-After": too_long})
        server.log.clear()
        assert "status 429" in refused([NOTE]) and len(server.log) == 2


def test_a_silent_server_is_asked_again(
    server: HubServer, use: Callable[..., None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(HF_HUB_DOWNLOAD_TIMEOUT="1")
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 1)
    server.stall_after = 1_000_000
    assert_whole(cache, server)
    assert server.offsets(ZIP) == [0, 1_000_000]


@pytest.mark.usefixtures("use")
def test_a_missing_file_revision_or_repository_is_named(server: HubServer) -> None:
    assert f"{REPO} has no file images/99.zip" in refused(["images/99.zip"])
    assert f"{REPO} has no such revision on the Hub (revision 'v9')" in refused(revision="v9")
    assert f"{REPO} has no such revision" in refused(revision="a" * 40)
    assert "there is no dataset owner/photo on the Hub" in refused(repo="owner/photo")
    assert "'owner/pho tos' cannot be the name" in refused(repo="owner/pho tos")


@pytest.mark.usefixtures("use")
@pytest.mark.parametrize("kind", ["API", "HEAD", "GET"])
@pytest.mark.parametrize(
    "answer",
    [
        Answer(401, {"X-Error-Code": "RepoNotFound"}),
        Answer(401),
        Answer(403, {"X-Error-Code": "GatedRepo"}),
        Answer(403),
    ],
    ids=["unknown or private", "bad token", "gated", "forbidden"],
)
def test_a_refusal_says_how_to_get_access(answer: Answer, kind: str, server: HubServer) -> None:
    server.always[kind] = answer
    message = refused()
    for words in (f"dataset {REPO}", f"status {answer.status}", "hf auth login", "terms"):
        assert words in message
    assert sum(request.status == answer.status for request in server.log) == 1


@pytest.mark.usefixtures("use")
def test_a_refusal_after_the_last_byte_keeps_the_file(server: HubServer, cache: Path) -> None:
    server.answers["HEAD"] = [None, Answer(403)]
    assert "status 403" in refused()
    assert_whole(cache, server)
    assert server.offsets(ZIP) == [0]


@pytest.mark.usefixtures("use")
def test_a_refusal_of_another_kind_is_not_tried_again(server: HubServer) -> None:
    server.always["HEAD"] = Answer(400)
    assert "status 400" in refused() and "check HF_ENDPOINT" in refused()
    assert len([request for request in server.log if request.method == "HEAD"]) == 2


@pytest.mark.usefixtures("use")
@pytest.mark.parametrize(
    "claimed",
    [
        {"X-Repo-Commit": None},
        {"X-Repo-Commit": "f" * 40},
        {"X-Linked-Etag": '"../../evil"'},
        {"X-Linked-Etag": None},
    ],
)
def test_an_answer_that_is_not_the_hub_s_is_refused(
    claimed: dict[str, str | None], server: HubServer, cache: Path
) -> None:
    server.claimed_headers = claimed
    assert "check HF_ENDPOINT and the proxy" in refused()
    assert not server.gets(ZIP) and not list(cache.rglob("*.part"))


def test_a_hub_that_cannot_be_reached_is_one_sentence(
    use: Callable[..., None], server: HubServer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    use(HF_ENDPOINT=f"http://127.0.0.1:{port}")
    message = refused()
    assert f"127.0.0.1:{port}) cannot be reached" in message and "check the network" in message
    use(HF_ENDPOINT="my-mirror")
    assert refused().startswith("HF_ENDPOINT (my-mirror) is not an http address")


def test_offline_the_cache_answers_or_says_what_it_lacks(
    server: HubServer, use: Callable[..., None], cache: Path
) -> None:
    use(HF_HUB_OFFLINE="1")
    for revision in ("main", server.commit):
        message = refused(revision=revision)
        assert message.startswith("HF_HUB_OFFLINE or ") and str(cache) in message
    with pytest.raises(UserError, match=r"lacks any \*\.zip file of commit c0ffee"):
        hub.list_files(REPO, server.commit, ".zip")
    use(HF_HUB_OFFLINE="0")
    paths = hub.download(REPO, "main", [ZIP])
    server.log.clear()
    use(HF_HUB_OFFLINE="1")
    assert hub.resolve(REPO, "main") == server.commit
    assert hub.download(REPO, "main", [ZIP]) == paths
    assert hub.list_files(REPO, "main", ".zip") == [ZIP]
    assert f"lacks {NOTE} of commit c0ffee" in refused([ZIP, NOTE])
    assert server.log == []


@pytest.mark.usefixtures("use")
def test_a_branch_leads_to_its_latest_commit_and_a_commit_to_itself(
    server: HubServer, cache: Path
) -> None:
    assert hub.resolve(REPO, "a" * 40) == "a" * 40
    assert server.log == []
    assert hub.resolve(REPO, "main") == server.commit
    server.commit = "beef" + "0" * 36
    assert hub.resolve(REPO, "main") == server.commit
    refs = cache / "datasets--owner--photos" / "refs"
    assert {ref.name: ref.read_text() for ref in refs.iterdir()} == {"main": server.commit}


@pytest.mark.usefixtures("use")
def test_a_listing_holds_the_files_of_one_kind_in_order(server: HubServer) -> None:
    from huggingface_hub import HfApi

    server.files |= {"data/b.parquet": b"b", "data/a.parquet": b"a", "z.parquet": b"z"}
    wanted = ["data/a.parquet", "data/b.parquet", "z.parquet"]
    assert hub.list_files(REPO, "main", ".parquet") == wanted
    assert hub.list_files(REPO, server.commit, ".csv") == []
    plain = HfApi().list_repo_files(REPO, repo_type="dataset")
    assert sorted(plain) == sorted(server.files)


@pytest.mark.usefixtures("use")
def test_what_does_not_fit_is_refused_before_the_first_byte(server: HubServer, cache: Path) -> None:
    server.claimed_size = {ZIP: 10 * 10**12}
    message = refused([NOTE, ZIP])
    assert "10,000.0 GB are needed" in message and str(cache) in message and REPO in message
    # Each fits, both do not.
    free = shutil.disk_usage(cache).free
    server.files["b.zip"] = b"b"
    server.claimed_size = {ZIP: free * 6 // 10, "b.zip": free * 6 // 10}
    assert "no room for 2 file(s)" in refused([ZIP, "b.zip"])
    assert not [
        request
        for request in server.log
        if request.method == "GET" and not request.path.startswith("/api/")
    ]


@pytest.mark.usefixtures("use")
def test_only_what_has_not_arrived_needs_space(
    server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.download(REPO, "main", [NOTE])
    part(cache, server).write_bytes(CONTENT[:1_000_000])
    real = shutil.disk_usage(cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=SIZE - 1_000_001))
    assert "no room for 1 file(s)" in refused([ZIP, NOTE])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=SIZE - 1_000_000))
    assert hub.download(REPO, "main", [ZIP, NOTE])[0].read_bytes() == CONTENT


def test_space_is_looked_for_on_the_disk_of_a_folder_to_come(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    hub.require_space(folder, 1000, "a photo")
    with pytest.raises(UserError) as raised:
        hub.require_space(folder, 10**16, "all photos")
    message = str(raised.value)
    assert message.startswith(f"{folder} has no room for all photos: 10,000,000.0 GB are needed")
    assert not folder.parent.exists()


@pytest.mark.usefixtures("use")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_disk_that_fills_up_is_one_sentence(server: HubServer, cache: Path) -> None:
    blobs(cache).mkdir(parents=True)
    part(cache, server).symlink_to("/dev/full")
    message = refused()
    assert os.strerror(errno.ENOSPC) in message and str(cache) in message
    assert "HF_HUB_CACHE" in message and "continues where it stopped" in message


def test_a_limit_of_the_file_system_keeps_what_was_written(server: HubServer, cache: Path) -> None:
    with start(server, cache, ZIP, limit=1_500_000) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert os.strerror(errno.EFBIG) in line and "continues where it stopped" in line
    assert part(cache, server).read_bytes() == CONTENT[:1_500_000]
    with start(server, cache, ZIP) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert Path(out.strip()).read_bytes() == CONTENT
    assert server.offsets(ZIP) == [0, 1_500_000]


def test_a_cache_that_is_a_file_is_one_sentence(use: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    use(HF_HUB_CACHE=str(tmp_path / "file"))
    assert "cannot be written (Not a directory)" in refused()


def test_the_client_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, geoguessr_rl.hub; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n"
