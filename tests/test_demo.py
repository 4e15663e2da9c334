"""The page of the demo in a real browser, and what its server refuses."""

import base64
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Tab, browser_fixture, open_tab  # noqa: F401 (a fixture)
from PIL import Image
from warm_base import loud_adapter, warm_up_thinking

from geoguessr_rl import data, demo_views
from geoguessr_rl.backends import desk
from geoguessr_rl.backends.desk import Desk
from geoguessr_rl.config import DemoConfig, ImagePolicy
from geoguessr_rl.demo_views import ALONE
from geoguessr_rl.phases import demo
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Completion

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
WIDE, PHONE = {"width": 1280}, {"width": 390, "height": 844}
SECONDS = 60_000  # milliseconds that the browser waits: a busy machine is slow

# What is no usable photo, and the word that says why.
REFUSED = {
    "giant_280MP_gray.jpg": "too large",
    "png_65536x65536.png": "too large",
    "truncated.jpg": "damaged",
    "truncated_header_gps.jpg": "damaged",
}


CUT_OFF = """() => [...document.querySelectorAll('main *')]
    .filter((e) => e.checkVisibility() && !e.closest('svg')
        && e.getBoundingClientRect().right > innerWidth + 1)
    .map((e) => e.className)"""


@dataclass
class Server:
    """A running demo.

    Attributes:
        url: Its address.
        process: Itself.
        folder: Where it keeps its temporary files.
        data_dir: The games' photos.
    """

    url: str
    process: "subprocess.Popen[str]"
    folder: Path
    data_dir: Path

    def memory(self) -> int:
        """The bytes that the process holds in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]

    def files(self) -> list[str]:
        """What visitors sent and is still there."""
        return [path.name for path in self.folder.rglob("*") if path.is_file()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(tmp: Path, *args: object, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/demo_gradio.py"), "--device", "cpu", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=(tmp / "stderr.log").open("w"),
        text=True,
        cwd=tmp,
        env={**os.environ, "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1", **environment},
    )


def url_of(process: "subprocess.Popen[str]") -> str:
    """The address that a demo prints when it is open."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"demo: (https?://[\w.]+:\d+)", line):
            return found[1]
    raise AssertionError(f"the demo did not open: {process.wait()}")


@pytest.fixture(scope="module")
def models(world: Path) -> list[object]:
    """Flags of a base that answers, and an adapter under which it answers otherwise."""
    base = warm_up_thinking(world)
    adapter = loud_adapter(base, world / "loud")
    return ["--model", base, "--lora", adapter, "--data_dir", world / "data"]


@pytest.fixture(scope="module")
def server(
    world: Path, models: list[object], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    tmp = tmp_path_factory.mktemp("demo")
    report = tmp / "report.html"
    report.write_text("<h1>A report</h1><script>document.title = 'run'</script>")
    process = start(tmp, *models, "--port", free_port(), "--report", report)
    try:
        url = url_of(process)
        folder = next(tmp.glob("geoguessr-rl-*"))
        yield Server(url, process, folder, world / "data")
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(params=[WIDE, PHONE], ids=["wide", "phone"])
def tab(request: pytest.FixtureRequest, browser: Any, server: Server) -> Iterator[Tab]:
    with open_tab(browser, server.url, **request.param) as opened:
        opened.page.set_default_timeout(SECONDS)
        opened.page.wait_for_selector("#photo")
        yield opened
        assert not opened.page.evaluate(CUT_OFF)
        assert not opened.errors
        assert not opened.refused


def send(tab: Tab, photo: Path) -> None:
    tab.page.set_input_files("#photo input[type=file]", str(photo))


def status(tab: Tab) -> str:
    return str(tab.page.inner_text("#photo [role=status]"))


def answered(tab: Tab) -> list[str]:
    """Waits for both answers, and returns their countries."""
    tab.page.wait_for_function(
        "document.querySelectorAll('.answer details.raw').length >= 2", timeout=SECONDS
    )
    return [str(text) for text in tab.page.locator(".answer .country").all_inner_texts()]


def a_photo(server: Server) -> Path:
    return next((server.data_dir / "images").rglob("*.jpg"))


def test_a_photo_is_answered_by_both_models_with_clues_place_and_pin(
    tab: Tab, server: Server
) -> None:
    send(tab, a_photo(server))
    countries = answered(tab)
    assert len(countries) == 2 and "Brazil" in countries[0]
    assert "soil" in tab.page.inner_text(".answer.base .clues")
    assert re.search(r"\d°\s[NS], .*\d°\s[EW]", tab.page.inner_text(".answer.base .where"))
    link = tab.page.get_attribute(".answer.base a", "href")
    assert link.startswith("https://www.openstreetmap.org/?mlat=-")
    assert tab.page.locator("#map .pin").count() >= 1
    assert not tab.page.is_visible("#compare")  # no GPS in a prepared photo
    assert not server.files()


# Gives the page a file as a drop or as a paste would.
GIVE = """([kind, bytes]) => {
  const data = new DataTransfer();
  const content = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
  data.items.add(new File([content], "a.jpg", { type: "image/jpeg" }));
  const options = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
  const event = kind === "drop" ? new DragEvent(kind, options) : new ClipboardEvent(kind, options);
  document.querySelector("#photo .photo-drop").dispatchEvent(event);
}"""


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_photo_can_be_dropped_and_pasted(kind: str, tab: Tab, server: Server) -> None:
    photo = base64.b64encode(a_photo(server).read_bytes()).decode()
    tab.page.evaluate(GIVE, [kind, photo])
    answered(tab)
    assert status(tab) == "a.jpg"


def test_a_paste_on_another_tab_is_left_alone(tab: Tab, server: Server) -> None:
    photo = base64.b64encode(a_photo(server).read_bytes()).decode()
    tab.page.get_by_role("tab", name="Play").click()
    tab.page.wait_for_selector("#start")
    tab.page.evaluate(GIVE, ["paste", photo])
    tab.page.wait_for_timeout(500)
    assert not [url for url in tab.requests if "/upload" in url]


def test_a_photo_can_be_taken_with_the_camera(tab: Tab, server: Server) -> None:
    tab.page.click(".use-camera")  # nobody has allowed it
    tab.page.wait_for_selector("text=The camera cannot be used")
    tab.page.context.grant_permissions(["camera"])
    tab.page.click(".use-camera")
    tab.page.wait_for_selector(".shoot")
    tab.page.wait_for_function("document.querySelector('#photo video').videoWidth > 0")
    tab.page.click(".shoot")
    answered(tab)
    assert status(tab) == "camera.jpg"
    assert not tab.page.is_visible(".shoot")


def test_the_copy_button_copies_the_coordinates(tab: Tab, server: Server) -> None:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    send(tab, a_photo(server))
    answered(tab)
    tab.page.click(".answer.base .copy")
    tab.page.wait_for_selector("text=copied")
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert re.fullmatch(r"-?\d+\.\d{5}, -?\d+\.\d{5}", copied)


def test_samples_show_their_consensus_and_their_spread(tab: Tab, server: Server) -> None:
    tab.page.fill("input[type=number]", "4")
    tab.page.keyboard.press("Tab")
    send(tab, a_photo(server))
    answered(tab)
    text = tab.page.inner_text(".answer.base")
    assert "4 samples" in text and "Two samples lie a median of" in text
    tab.page.click(".answer.base details:not(.raw) summary")
    assert tab.page.locator(".answer.base li").count() >= 2
    assert tab.page.locator("#map .pin").count() >= 3


def test_gps_is_revealed_when_asked_for_and_not_before(
    tab: Tab, server: Server, tmp_path: Path
) -> None:
    photo = tmp_path / "with gps.jpg"
    exif = Image.Exif()
    exif[0x8825] = {1: "S", 2: (33.0, 27.0, 12.5), 3: "W", 4: (70.0, 39.0, 43.25)}
    with Image.open(a_photo(server)) as image:
        image.save(photo, exif=exif)
    listen(tab)
    send(tab, photo)
    answered(tab)
    tab.page.wait_for_selector("#compare")
    assert not places(told(tab), (-33.4535, -70.6620))
    tab.page.click("#compare")
    tab.page.wait_for_selector("text=Against the photo's own GPS")
    assert tab.page.locator("#map .pin").count() >= 2
    assert places(told(tab), (-33.4535, -70.6620))
    assert re.search(r"\d km", tab.page.inner_text(".scores"))


# Keeps a copy of everything that the server streams; what stays open has no body to ask for.
LISTEN = """
window.told = "";
const ask = window.fetch;
window.fetch = async (...args) => {
  const answer = await ask(...args);
  if (!answer.body) return answer;
  const [mine, theirs] = answer.body.tee();
  (async () => {
    const reader = mine.getReader(), decoder = new TextDecoder();
    for (let part = await reader.read(); !part.done; part = await reader.read())
      window.told += decoder.decode(part.value, { stream: true });
  })().catch(() => {}); // the page ends a stream when it has heard enough
  return new Response(theirs, { status: answer.status, headers: answer.headers });
};
window.EventSource = class extends window.EventSource {
  constructor(...args) {
    super(...args);
    this.addEventListener("message", (event) => { window.told += event.data; });
  }
};
"""


def listen(tab: Tab) -> None:
    tab.page.add_init_script(LISTEN)
    tab.page.reload()
    tab.page.wait_for_selector("#photo")


def told(tab: Tab) -> str:
    """All that the page was told and holds, but for pictures."""
    stream = tab.page.evaluate("window.told")
    assert "process_completed" in stream  # it hears what Gradio streams
    return re.sub(r"data:image/jpeg;base64,[\w+/=]+", "", stream + tab.page.content())


def places(held: str, place: tuple[float, float]) -> bool:
    """Whether a text holds coordinates, side by side in either order.

    A coordinate alone shows nothing: a style sheet of 0.22em says as much.
    """
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", held)]
    return any(
        max(abs(a - b) for a, b in zip(place, pair, strict=True)) < 0.01
        for first, second in itertools.pairwise(numbers)
        for pair in [(first, second), (second, first)]
    )


@pytest.mark.skipif(not SHARED.is_dir(), reason="the awkward files are not part of the project")
@pytest.mark.parametrize("tab", [WIDE], ids=["wide"], indirect=True)
def test_every_awkward_file_is_answered_or_refused_in_a_sentence(tab: Tab, server: Server) -> None:
    files = [f for f in sorted((SHARED / "awkward_files").iterdir()) if f.suffix != ".md"]
    assert len(files) > 25
    for file in files:
        send(tab, file)
        tab.page.wait_for_function(
            "!/^(Uploading|Reading)/.test(document.querySelector('#photo [role=status]').innerText)"
            " && document.querySelector('#photo [role=status]').innerText.startsWith("
            + json.dumps(file.name) + ")",
            timeout=SECONDS,
        )  # fmt: skip
        if reason := REFUSED.get(file.name):
            assert status(tab).startswith(f"{file.name} cannot be used: ")
            assert reason in status(tab)
        else:
            assert status(tab) == file.name
            assert tab.page.get_attribute("#photo img", "src").startswith("data:image/jpeg")
            answered(tab)
    assert not server.files()


def test_a_game_of_five_rounds_never_holds_a_truth_before_it_is_played(
    tab: Tab, server: Server
) -> None:
    photos = data.load_split(server.data_dir, "eval_osv").photos
    by_bytes = {demo_views.data_uri(photo.path.read_bytes()): photo for photo in photos}
    listen(tab)
    tab.page.get_by_role("tab", name="Play").click()
    tab.page.click("#start")
    total = 0
    for number in range(1, 6):
        tab.page.wait_for_selector(f"text=Photo {number} of 5")
        photo = by_bytes[tab.page.get_attribute(".game-photo img", "src")]
        held = told(tab)
        place = (photo.latitude, photo.longitude)
        assert photo.id not in held and not places(held, place)
        assert places(f'{held}{{"lat": {place[0]:.2f}, "lon": {place[1]}}}', place)
        box = tab.page.locator("#play-map svg").first.bounding_box()
        tab.page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.6)
        tab.page.click("#submit")
        tab.page.wait_for_selector(f"text={number} of 5 photos played")
        rows = tab.page.locator("#result tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows] == ["You", "Base model", "Trained model"]
        total += int(rows[0].split("\t")[2].replace(",", ""))
        assert abs(int(rows[0].split("\t")[3].replace(",", "")) - total) <= number
        if number < 5:
            tab.page.click("#next")
    line = tab.page.inner_text(".result span")
    assert line.startswith("geoguessr-rl ") and "/ 25,000" in line
    assert tab.page.is_visible("#start") and not tab.page.is_visible("#next")


def test_a_round_can_be_played_with_the_keyboard_alone(tab: Tab) -> None:
    tab.page.get_by_role("tab", name="Play").click()
    tab.page.locator("#start").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("text=Photo 1 of 5")
    tab.page.locator("#submit").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("text=Put a pin on the map first")
    tab.page.locator("#play-map [role=application]").focus()
    tab.page.keyboard.press("ArrowLeft")
    tab.page.keyboard.press("Enter")
    tab.page.locator("#submit").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("text=1 of 5 photos played")


def test_the_report_stands_in_a_frame_of_its_own(tab: Tab) -> None:
    tab.page.get_by_role("tab", name="Report").click()
    frame = tab.page.frame_locator("iframe.report")
    assert frame.locator("h1").inner_text() == "A report"
    assert "allow-same-origin" not in tab.page.get_attribute("iframe.report", "sandbox")


def test_html_in_a_files_name_is_text(tab: Tab, server: Server, tmp_path: Path) -> None:
    name = "<img src=x onerror=document.title='run'>.jpg"
    (tmp_path / name).write_bytes(a_photo(server).read_bytes())
    send(tab, tmp_path / name)
    answered(tab)
    assert status(tab) == name and tab.page.title() == "geoguessr-rl"


def test_a_file_over_the_limit_is_refused_before_it_is_sent(tab: Tab, tmp_path: Path) -> None:
    large = tmp_path / "large.jpg"
    large.write_bytes(bytes(20_000_001))
    send(tab, large)
    tab.page.wait_for_selector("text=large.jpg is larger than 20 MB; send a smaller copy.")
    assert not [url for url in tab.requests if url.endswith("/upload")]


# --- Without a browser


def upload(client: httpx.Client, photo: bytes, name: str = "photo.jpg") -> str:
    """Sends a file as the page does, and returns where the server put it."""
    unique = f"{uuid.uuid4()} {name}"  # Gradio puts equal files of one name into one place
    answer = client.post("/gradio_api/upload", files={"files": (unique, photo)})
    return str(answer.raise_for_status().json()[0])


class Visitor:
    """A session that calls the page's own functions."""

    def __init__(self, server: Server) -> None:
        from gradio_client import Client

        self.http = httpx.Client(base_url=server.url, timeout=60)
        self.client = Client(server.url, verbose=False)

    def show(self, path: str) -> Any:
        return self.client.predict({"path": path, "name": "photo.jpg"}, api_name="/photo")

    def guess(self, samples: int = 1) -> Any:
        return self.client.predict(samples, api_name="/guess")


def test_other_files_are_neither_served_nor_read(server: Server, tmp_path: Path) -> None:
    visitor = Visitor(server)
    for path in ("/etc/passwd", f"{ROOT}/README.md", f"{server.folder}/../stderr.log"):
        answer = visitor.http.get(f"/gradio_api/file={path}")
        assert answer.status_code in (403, 404) and "root:" not in answer.text
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(a_photo(server).read_bytes())
    for path in (str(secret), f"{server.folder}/../../{secret}", "", "\0", "x" * 9999, None, 7):
        shown = visitor.show(path)[0]  # type: ignore[arg-type]
        assert "did not arrive" in shown["message"] and not shown["picture"]
    assert secret.exists()


def test_an_upload_over_the_limit_is_refused_by_the_server_too(server: Server) -> None:
    answer = Visitor(server).http.post(
        "/gradio_api/upload", files={"files": ("large.jpg", bytes(20_000_001))}
    )
    assert answer.status_code == 413
    assert not server.files()


def test_ten_visitors_at_once_are_all_served_and_their_photos_are_gone(server: Server) -> None:
    photo = a_photo(server).read_bytes()

    def visit(n: int) -> str:
        visitor = Visitor(server)
        shown = visitor.show(upload(visitor.http, photo))[0]
        assert shown["picture"].startswith("data:image/jpeg;base64,")
        return str(visitor.guess()[-2])  # the base model's card

    with ThreadPoolExecutor(10) as pool:
        cards = list(pool.map(visit, range(10)))
    assert len(cards) == 10 and all("Brazil" in card for card in cards)
    assert not server.files()


@pytest.mark.slow
def test_memory_does_not_grow_with_guesses(server: Server) -> None:
    photos = [path.read_bytes() for path in (server.data_dir / "images").rglob("*.jpg")][:10]

    def visit(photo: bytes, times: int) -> None:
        visitor = Visitor(server)
        for _ in range(times):
            visitor.show(upload(visitor.http, photo))
            visitor.guess()

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(visit, photos, [2] * 10))
        after_20 = server.memory()
        list(pool.map(visit, photos, [18] * 10))
    after_200 = server.memory()
    assert after_200 <= 1.05 * after_20


def test_a_queue_that_is_full_says_so(models: list[object], server: Server, tmp_path: Path) -> None:
    process = start(tmp_path, *models, "--port", free_port(), "--set", "waiting=1")
    try:
        crowded = Server(url_of(process), process, tmp_path, server.data_dir)
        photo = a_photo(server).read_bytes()
        visitors = [Visitor(crowded) for _ in range(6)]
        for visitor in visitors:
            visitor.show(upload(visitor.http, photo))
        said: list[str] = []

        def ask(visitor: Visitor) -> None:
            try:
                visitor.guess(8)
                said.append("served")
            except Exception as error:
                said.append(str(error))

        threads = [threading.Thread(target=ask, args=(visitor,)) for visitor in visitors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert "served" in said and any("full" in text.lower() for text in said), said
    finally:
        process.terminate()
        process.wait(30)


def test_the_environment_cannot_open_the_page_and_its_end_removes_every_file(
    models: list[object], server: Server, tmp_path: Path
) -> None:
    environment = {"GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SHARE": "True"}
    port = free_port()
    process = start(tmp_path, *models, "--port", port, "--auth", "ann:secret", **environment)
    url = url_of(process)
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/config").status_code == 401
        wrong = client.post("/login", data={"username": "ann", "password": "guess"})
        assert wrong.status_code == 400
        client.post("/login", data={"username": "ann", "password": "secret"}).raise_for_status()
        assert client.get("/config").status_code == 200
        upload(client, a_photo(server).read_bytes())
    folder = next(tmp_path.glob("geoguessr-rl-*"))
    assert list(folder.rglob("*photo.jpg"))  # sent, and never asked about
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not folder.exists()


def test_without_a_quickstart_one_sentence_says_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = script("demo_gradio.py", "--config", ROOT / "configs/demo.yaml")
    assert ended.code == 2 and "runbook/quickstart.sh" in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_without_gradio_one_sentence_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, script: Callable[..., Any]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    ended = script("demo_gradio.py")
    assert ended.code == 2 and "'.[demo]'" in ended.err


def test_the_default_is_what_the_quickstart_trained_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for n, name in enumerate(("seed-0-vllm", "seed-0-transformers", "seed-1-transformers")):
        page = tmp_path / "outputs/quickstart" / name / "report.html"
        page.parent.mkdir(parents=True)
        page.write_text("")
        os.utime(page, (n % 2, n % 2))
    found = desk.with_defaults(DemoConfig())
    assert found.model is not None
    assert found.model.name == "outputs/quickstart/seed-0-transformers/base"
    assert found.lora == Path("outputs/quickstart/seed-0-transformers/grpo")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--auth", "ann"], "user:password"),
        (["--split", "train_pool"], "is not held out"),
        (["--set", "port=0"], "port"),
        (["--model", "no-such-folder"], "does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(
    flags: list[str], said: str, models: list[object], server: Server, script: Callable[..., Any]
) -> None:
    taken = ["--port", server.url.rpartition(":")[2]]  # what is let through ends there
    flags = flags if "--model" in flags else [*map(str, models), *flags]
    ended = script("demo_gradio.py", *taken, *flags)
    assert ended.code == 2 and said in ended.err
    assert ended.err.startswith("error: ") and "Traceback" not in ended.err


def test_a_taken_port_is_one_sentence(models: list[object], server: Server, tmp_path: Path) -> None:
    process = start(tmp_path, *models, "--port", server.url.rpartition(":")[2])
    assert process.wait(120) == 2
    assert "choose another with --port" in (tmp_path / "stderr.log").read_text()


def test_pictures_that_may_not_be_shown_are_not_played(
    models: list[object], server: Server, tmp_path: Path, script: Callable[..., Any]
) -> None:
    for name in ("eval_osv.parquet", "eval_osv.manifest.json"):
        (tmp_path / name.replace("osv", "pano")).write_bytes((server.data_dir / name).read_bytes())
    path = tmp_path / "eval_pano.manifest.json"
    manifest = json.loads(path.read_text()) | {"split": "eval_pano", "publishable": False}
    path.write_text(json.dumps(manifest))
    taken = ["--port", server.url.rpartition(":")[2]]
    pano = ["--data_dir", tmp_path, "--split", "eval_pano"]
    ended = script("demo_gradio.py", *taken, *models[:4], *pano)
    assert ended.code == 2 and "shown to nobody" in ended.err


class Hostile:
    """A model whose every answer is HTML, in place of a backend."""

    def stream(self, image: Any, key: str, sampling: Any, *, adapter: bool = True) -> Any:
        evil = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
        text = format_completion(evil, 1.0, 2.0, clues=evil, style="think")
        yield [Completion(text, 9, "stop")]


@contextmanager
def shown(
    backend: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Serves the page from this process, with a model of the test's own."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    config = DemoConfig(port=free_port())
    here = Desk(
        backend, {ALONE: True}, True, ImagePolicy(long_edge=160, min_pixels=1024),
        data.load_split(server.data_dir, "eval_osv").photos, tmp_path, tmp_path, config,
        threading.Lock(),
    )  # fmt: skip
    page = demo.build(here)
    demo.launch(page, config, None)
    yield page.local_url
    page.close(verbose=False)


def test_html_in_a_models_answer_is_text(
    browser: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        shown(Hostile(), server, tmp_path, monkeypatch) as url,
        open_tab(browser, url) as tab,
    ):
        tab.page.set_default_timeout(SECONDS)
        tab.page.wait_for_selector("#photo")
        send(tab, a_photo(server))
        tab.page.wait_for_selector(".answer details.raw")
        assert tab.page.inner_text(".answer .country").strip().startswith("<img src=x")
        assert "<script>" in tab.page.inner_text(".answer .clues")
        assert "<img" in tab.page.locator("#map svg").first.text_content()
        assert tab.page.title() == "geoguessr-rl" and not tab.errors


class Endless:
    """A model that never ends its answer."""

    def stream(self, image: Any, key: str, sampling: Any, *, adapter: bool = True) -> Any:
        while True:
            yield [Completion("<think>I see a road", 5, "length")]
            time.sleep(0.05)


def test_a_visitor_who_leaves_makes_room_for_the_next(
    browser: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shown(Endless(), server, tmp_path, monkeypatch) as url:
        for _ in range(2):
            with open_tab(browser, url) as tab:
                tab.page.set_default_timeout(SECONDS)
                tab.page.wait_for_selector("#photo")
                send(tab, a_photo(server))
                tab.page.wait_for_selector("text=I see a road")
