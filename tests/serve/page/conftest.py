"""A real browser for the tests of the page, and a server that replays streams to it."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.page_server import PageServer, serve_page

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; without one, or without playwright, the test is skipped."""
    playwright = pytest.importorskip("playwright.sync_api")
    if EXECUTABLE is None:
        pytest.skip("there is no Chromium on the path")
    sandbox = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=EXECUTABLE, args=[*FLAGS, *sandbox])
        yield chromium
        chromium.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    """A server whose answers the test sets."""
    with serve_page(lambda request: pytest.fail(f"unexpected: {request}")) as running:
        yield running


@pytest.fixture
def open_page(browser: Any, server: PageServer) -> Iterator[Callable[..., Any]]:
    """Opens the page in a new profile, ready to be used; at the end the browser must have complained about nothing.

    Its options are those of playwright's ``new_context``; ``errors`` are words of complaints that the test provokes.
    """
    contexts, complaints, allowed = [], [], []

    def open_it(url: str = "", errors: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        allowed.extend(errors)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url or server.url)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert [each for each in complaints if not any(words in each for words in allowed)] == []
