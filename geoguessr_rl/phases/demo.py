"""Demo: a page on which people show a model their photos, play against it and read its report.

The page asks no host but this one, and is seen by no other machine unless `listen` or `share` says
so. Photos are read once, deleted and kept in the visitor's session alone; one guess runs at a time.
"""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from geoguessr_rl import demo_views, embedded, game, world_map
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends.desk import Desk, open_desk, with_defaults
from geoguessr_rl.config import DemoConfig
from geoguessr_rl.demo_views import PERSON, Answer
from geoguessr_rl.game import Game
from geoguessr_rl.images import BadImageError
from geoguessr_rl.photo_drop import MAX_BYTES, Upload, take
from geoguessr_rl.records import Photo
from geoguessr_rl.tables import country_name
from geoguessr_rl.world_map import map_value, picked_place

SESSION_SECONDS = 3600  # that a visitor's photo and game outlive their page
SESSIONS = 100

TITLE = "# Where was this photo taken?"


def run(config: DemoConfig, auth: str | None = None) -> None:
    """Opens the page, and serves it until it is interrupted.

    Args:
        config: The resolved config.
        auth: `user:password` that a visitor has to give.

    Raises:
        UserError: Gradio is missing, there is no model, the adapter does not fit it, or the port is
            taken.
    """
    if find_spec("gradio") is None:
        raise UserError("the demo needs Gradio; install it with `uv pip install -e '.[demo]'`")
    login = _login(auth)
    with tempfile.TemporaryDirectory(prefix="geoguessr-rl-") as folder:
        # Read by Gradio when it is imported and when components are made.
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        desk = open_desk(with_defaults(config), Path(folder))
        page = build(desk)
        stop = threading.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: stop.set())
        launch(page, desk.config, login)
        names = " and ".join(name.lower() for name in desk.players)
        print(f"demo: {page.share_url or page.local_url} ({names}); Ctrl-C ends it", flush=True)
        stop.wait()
        page.close(verbose=False)


def _login(auth: str | None) -> tuple[str, str] | None:
    """Reads `user:password`."""
    if auth is None:
        return None
    user, colon, password = auth.partition(":")
    if not (user and colon and password):
        raise UserError("--auth must look like user:password")
    return user, password


def launch(page: Any, config: DemoConfig, login: tuple[str, str] | None) -> None:
    """Starts the server; every default of the environment that would open it is overruled."""
    import gradio as gr

    try:
        page.launch(
            server_name="0.0.0.0" if config.listen else "127.0.0.1",
            server_port=config.port,
            share=config.share,
            auth=login,
            max_file_size=MAX_BYTES,
            state_session_capacity=SESSIONS,
            prevent_thread_lock=True,
            quiet=True,
            footer_links=[],
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            enable_monitoring=False,
            head=world_map.head(),
            # The theme's own fonts come without some letters where the network is closed.
            theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
            css=(Path(__file__).parents[1] / "demo.css").read_text(encoding="utf-8"),
        )
    except OSError as error:
        raise UserError(
            f"the page cannot be served on port {config.port} ({error}); choose another with --port"
        ) from None


def build(desk: Desk) -> Any:
    """Returns the page of three tabs."""
    import gradio as gr

    with gr.Blocks(title="geoguessr-rl", analytics_enabled=False) as page:
        gr.Markdown(f"{TITLE}\n\n{embedded.NOTE}" if desk.tiny else TITLE)
        with gr.Tabs():
            with gr.Tab("Guess"):
                _guess_tab(gr, desk)
            with gr.Tab("Play"):
                _play_tab(gr, desk)
            with gr.Tab("Report") as tab:
                frame = gr.HTML()
        tab.select(lambda: _report(desk.report), outputs=frame, api_visibility="private")
    page.queue(max_size=desk.config.waiting, default_concurrency_limit=4)
    return page


def _report(path: Path) -> str:
    """Returns the report in its frame, or what to do for one."""
    if not path.is_file():
        return demo_views.note(f"There is no {path} yet; scripts/write_report.py writes it.")
    return demo_views.report_frame(path.read_text(encoding="utf-8"))


# One guess at a time, of whatever tab.
MODEL_QUEUE = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "hidden"}
# One decoding at a time: a picture of 100 megapixels takes up to a gigabyte while it is read.
DECODE_QUEUE = {"concurrency_id": "decode", "concurrency_limit": 1, "show_progress": "hidden"}


def _map(desk: Desk, label: str, *, clickable: bool) -> dict[str, Any]:
    return world_map.component_arguments(
        label=label,
        clickable=clickable,
        tiles=desk.config.tiles,
        attribution=desk.config.tiles_credit,
    )


def _photo_drop(gr: Any) -> Any:
    """Returns the component that takes a photo."""
    here = Path(__file__).parents[1]
    return gr.HTML(
        {"picture": "", "message": ""},
        html_template=(here / "photo_drop.html").read_text(encoding="utf-8"),
        js_on_load=(here / "photo_drop.js").read_text(encoding="utf-8"),
        max_bytes=MAX_BYTES,
        elem_id="photo",
    )


def _card(gr: Any, value: str = "", elem_id: str | None = None) -> Any:
    """Returns a component of plain HTML whose copy buttons work."""
    script = (Path(__file__).parents[1] / "copy.js").read_text(encoding="utf-8")
    return gr.HTML(value, js_on_load=script, elem_id=elem_id)


def _guess_tab(gr: Any, desk: Desk) -> None:
    """Lays out the tab of one's own photos."""
    upload, asked = (gr.State(None, time_to_live=SESSION_SECONDS) for _ in range(2))
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            photo = _photo_drop(gr)
            samples = gr.Slider(
                1,
                desk.config.max_samples,
                value=1,
                step=1,
                label="Answers",
                info="1: the model's best answer. More: samples, their consensus and its spread.",
                visible=desk.config.max_samples > 1,
            )
            with gr.Row():
                again = gr.Button("Guess again", interactive=False, elem_id="guess-again")
                compare = gr.Button(
                    "Compare with the photo's own GPS", visible=False, elem_id="compare"
                )
            compared = gr.HTML()
        with gr.Column(scale=3, min_width=320):
            place = gr.HTML(**_map(desk, "Where the models put it", clickable=False), elem_id="map")
            with gr.Row():
                cards = []
                for name in desk.players:
                    with gr.Column(min_width=280):
                        cards.append(_card(gr, demo_views.answer_card(name, None)))

    def receive(sent: dict[str, Any]) -> tuple[Any, ...]:
        """Takes an upload in; a photo that is of no use is a sentence."""
        name = str(sent.get("name", "the photo"))
        try:
            found = take(sent.get("path"), desk.uploads, desk.policy)
        except BadImageError as error:
            shown = {"picture": "", "message": f"{name} cannot be used: {error}."}
            return shown, None, None, gr.update(interactive=False), gr.update(visible=False), ""
        shown = {"picture": demo_views.data_uri(found.jpeg), "message": name}
        has_gps = gr.update(visible=found.gps is not None)
        return shown, found, None, gr.update(interactive=True), has_gps, ""

    def answer(found: Upload | None, count: float) -> Iterator[tuple[Any, ...]]:
        """Streams the models' answers."""
        if found is None:
            yield None, map_value(), *(demo_views.answer_card(name, None) for name in desk.players)
            return
        count = min(max(int(count), 1), desk.config.max_samples)
        for answers in desk.ask(found.jpeg, found.key, count):
            yield (
                answers,
                demo_views.answer_map(answers),
                *(demo_views.answer_card(name, answers.get(name)) for name in desk.players),
            )

    def reveal(found: Upload | None, answers: dict[str, Answer] | None) -> tuple[Any, ...]:
        """Compares the answers with the photo's own GPS."""
        if found is None or found.gps is None or not answers:
            return gr.skip(), gr.skip()
        return _revealed(found.gps, answers)

    received = [photo, upload, asked, again, compare, compared]
    answered = [asked, place, *cards]
    arrival = photo.upload(receive, photo, received, api_name="photo", **DECODE_QUEUE)
    first = arrival.then(answer, [upload, samples], answered, api_name="guess", **MODEL_QUEUE)
    again.click(
        answer, [upload, samples], answered, api_visibility="private", cancels=first, **MODEL_QUEUE
    )
    compare.click(
        reveal, [upload, asked], [compared, place], api_visibility="private",
        show_progress="hidden",
    )  # fmt: skip


def _revealed(
    gps: tuple[float, float], answers: Mapping[str, Answer]
) -> tuple[str, dict[str, Any]]:
    """Returns the table and the map of answers against a photo's GPS."""
    here = Photo("", Path(), *gps, "")
    guesses = {
        name: game.score(here, (final.lat, final.lon) if (final := answer.final) else None)
        for name, answer in answers.items()
    }
    table = demo_views.guess_table(guesses, "Against the photo's own GPS")
    return table, demo_views.guess_map(guesses, gps, "", "gps")


def _play_tab(gr: Any, desk: Desk) -> None:
    """Lays out the tab of the game."""
    if isinstance(desk.photos, str):
        gr.HTML(demo_views.note(f"No game without photos: {desk.photos}."))
        return
    photos = desk.photos
    state = gr.State(None, time_to_live=SESSION_SECONDS)
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            picture = gr.HTML(
                demo_views.note(
                    "Five photos that no model was trained on. Put a pin where you think each was "
                    "taken; then see where it was, and where the models put it."
                )
            )
        with gr.Column(scale=3, min_width=320):
            place = gr.HTML(**_map(desk, "Your guess", clickable=True), elem_id="play-map")
            start = gr.Button("Start a game", variant="primary", elem_id="start")
            submit = gr.Button("Submit", variant="primary", visible=False, elem_id="submit")
            following = gr.Button("Next photo", variant="primary", visible=False, elem_id="next")
            result = _card(gr, elem_id="result")
    outputs = [state, picture, place, result, start, submit, following]

    def buttons(shown: Any) -> tuple[Any, ...]:
        """Shows one of the three buttons."""
        return tuple(gr.update(visible=one is shown) for one in (start, submit, following))

    def ask(current: Game) -> tuple[Any, ...]:
        """Shows the photo to guess."""
        photo = current.photo
        assert photo is not None
        picture = demo_views.game_photo(current, photo.path.read_bytes())
        return current, picture, map_value(), "", *buttons(submit)

    def play(current: Game | None, sent: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Takes a pin, asks the models, and shows the truth."""
        photo = current.photo if current else None
        if current is None or photo is None:
            yield (
                gr.skip(),
                gr.skip(),
                gr.skip(),
                demo_views.note("Start a game first."),
                *buttons(start),
            )
            return
        pin = picked_place(sent)
        if pin is None:
            text = "Put a pin on the map first: click it, or press Enter while it has the focus."
            yield gr.skip(), gr.skip(), gr.skip(), demo_views.note(text), *buttons(submit)
            return
        guesses = {PERSON: game.score(photo, pin)}
        waiting = demo_views.note("The models look at the photo …")
        yield gr.skip(), gr.skip(), gr.skip(), waiting, *buttons(None)
        *_, answers = desk.ask(photo.path.read_bytes(), photo.id, 1)
        for name, answer in answers.items():
            final = answer.final
            guesses[name] = game.score(photo, (final.lat, final.lon) if final else None)
        current = current.played(guesses)
        truth = (photo.latitude, photo.longitude)
        shown = demo_views.guess_map(guesses, truth, country_name(photo.country_iso2), "truth")
        view = demo_views.round_view(current)
        button = start if current.photo is None else following
        yield current, gr.skip(), shown, view, *buttons(button)

    start.click(
        lambda: ask(game.new_game(photos)), None, outputs, api_visibility="private",
        show_progress="hidden",
    )  # fmt: skip
    submit.click(play, [state, place], outputs, api_visibility="private", **MODEL_QUEUE)
    following.click(ask, state, outputs, api_visibility="private", show_progress="hidden")
