"""A real browser for tests of pages: what it asked for, what it said, and no host but this one.

Import `browser_fixture`, take the fixture `browser`, and open pages with `open_tab`. Where Chromium
or Playwright is missing, such a test is skipped with the reason; under `CI=true` it fails.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


@dataclass
class Tab:
    """One page and what happened on it."""

    page: Any
    requests: list[str] = field(default_factory=list)  # every address it asked for
    refused: list[str] = field(default_factory=list)  # those beyond the loopback address
    errors: list[str] = field(default_factory=list)  # console errors, uncaught exceptions
    console: list[str] = field(default_factory=list)  # every message: "warning: text"


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def require_browser() -> str:
    """Returns Chromium's path, or skips (fails under CI) with what is missing."""
    path = chromium()
    packages = [name for name in ("playwright", "gradio") if not importlib.util.find_spec(name)]
    if packages:
        missing = f"not installed: {', '.join(packages)}"
    elif path is None:
        missing = "no chromium on the path (Debian: apt-get install chromium)"
    else:
        return path
    if os.environ.get("CI") == "true":
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


@pytest.fixture(name="browser", scope="module")
def browser_fixture() -> Iterator[Any]:
    """Chromium for one module: while Playwright is open, its thread cannot run asyncio.run."""
    path = require_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-background-networking", "--no-first-run"]
        arguments += ["--use-fake-device-for-media-stream"]  # a camera that shows a test picture
        chrome = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chrome
        chrome.close()


@contextmanager
def open_tab(
    browser: Any, url: str, *, width: int = 1280, height: int = 900, **context: Any
) -> Iterator[Tab]:
    """Opens a page of a width in a fresh context; further arguments are those of the context.

    For a phone: `width=390, height=844, has_touch=True, is_mobile=True`; for the dark mode:
    `color_scheme="dark"`.
    """
    with browser.new_context(viewport={"width": width, "height": height}, **context) as opened:
        tab = Tab(opened.new_page())

        def ask(route: Any) -> None:
            tab.requests.append(route.request.url)
            if is_local(route.request.url):
                route.continue_()
            else:
                tab.refused.append(route.request.url)
                route.abort()

        def hear(message: Any) -> None:
            tab.console.append(f"{message.type}: {message.text}")
            if message.type == "error":
                tab.errors.append(message.text)

        opened.route("**/*", ask)
        tab.page.on("console", hear)
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.goto(url)
        yield tab


def is_local(url: str) -> bool:
    """Whether an address is this machine's, or none of a host at all (data:, blob:)."""
    parts = urlsplit(url)
    return parts.scheme in {"data", "blob", "about"} or parts.hostname in LOOPBACK
