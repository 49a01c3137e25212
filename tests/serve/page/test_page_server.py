"""The page with the server that it belongs to, and a tiny model."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import build
from helpers.serving import InlineReaders
from selfspec.decoding.scheduler import Scheduler
from selfspec.engine import Engine
from selfspec.serve.app import create_app
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.service import Service

PROMPT = "abcabcabcabc"
MESSAGES = [{"role": "user", "content": PROMPT}]
Open = Callable[..., Any]


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[tuple[str, Service]]:
    """A server in a thread of this process: its address, and its service."""
    service = Service(ServedEngine(lambda: engine), ["tiny"], readers=InlineReaders())
    server = uvicorn.Server(uvicorn.Config(create_app(service, **options), port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: (server.started and service.ready) or not thread.is_alive())
        (socket,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/", service
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), "suffix")


@pytest.fixture(scope="module")
def served(engine: Engine, browser: Any) -> Iterator[tuple[str, Service]]:
    with running(engine) as address:
        yield address


def ask(page: Any) -> Any:
    turn = page.locator(".turn").nth(page.locator(".turn").count())
    page.get_by_label("Message", exact=True).fill(PROMPT)
    page.keyboard.press("Enter")
    turn.get_by_role("button", name="Copy").wait_for()
    return turn


def text(found: Any) -> str:
    """The text of an answer, with the spaces that a browser does not show at the ends of lines."""
    return found.locator(".text").first.text_content()


def limit(page: Any, tokens: int) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_role("button", name="Done").click()


def test_the_text_is_the_engines_with_marks_for_its_drafts(
    engine: Engine, served: tuple[str, Service], open_page: Open
) -> None:
    page = open_page(served[0])
    limit(page, 60)
    turn = ask(page)
    expected = engine.generate(MESSAGES, max_new_tokens=60)
    assert text(turn) == expected.text
    assert expected.accepted > 0
    assert turn.locator(".legend").inner_text().count(f"suffix {expected.accepted} ") == 1
    labels, values = (turn.locator(f".figures {name}").all_text_contents() for name in ("dt", "dd"))
    found = dict(zip(labels, values, strict=True))
    assert found["tokens"] == "60"
    assert found["accepted"] == f"{round(100 * expected.acceptance_rate)} %"
    assert float(found["est. speedup"].removesuffix("×")) > 0
    assert page.locator("#connection").inner_text() == "tiny"


def test_every_method_gives_the_same_text(engine: Engine, served: tuple[str, Service], open_page: Open) -> None:
    expected = engine.generate(MESSAGES, max_new_tokens=30).text
    page = open_page(served[0])
    limit(page, 30)
    choice = page.get_by_label("Drafts by")
    choice.locator("option").first.wait_for(state="attached")
    assert choice.input_value() == "suffix", "the method of the server"
    for method in ("uniform", "prompt-lookup", "autoregressive"):
        page.get_by_role("button", name="New chat").click()
        choice.select_option(method)
        turn = ask(page)
        assert text(turn) == expected
        assert (method in turn.locator(".legend").inner_text()) == (method != "autoregressive")


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_comparison_finds_identical_texts(served: tuple[str, Service], open_page: Open, temperature: str) -> None:
    page = open_page(served[0])
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill(temperature)
    page.get_by_label("Seed").fill("1")  # a new one each time may draw an early end of the text
    page.keyboard.press("Escape")
    limit(page, 40)
    turn = ask(page)
    turn.get_by_role("button", name="The same without drafts").click()
    turn.locator(".verdict[data-kind]").wait_for()
    assert turn.locator(".verdict").inner_text().startswith("Identical text, ")
    assert text(turn.locator("[data-part=plain]")) == text(turn)
    assert turn.locator("[data-part=plain] .legend").inner_text() == "full model 40 (100 %)"


def test_stopping_frees_the_place_on_the_server(
    served: tuple[str, Service], open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = served
    step = Scheduler.step
    monkeypatch.setattr(Scheduler, "step", lambda own: (time.sleep(0.05), step(own))[1])  # else it ends before Escape
    page = open_page(url)
    limit(page, 900)
    page.get_by_label("Message", exact=True).fill(PROMPT)
    page.keyboard.press("Enter")
    page.locator(".text .token").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.", exact=True).and_(page.locator(".note")).wait_for()
    wait_until(lambda: service.active == 0 and service.engine.queue.running == 0)


def test_what_the_server_refuses_is_told(served: tuple[str, Service], open_page: Open) -> None:
    page = open_page(served[0], errors=("Failed to load resource",))
    limit(page, 1_000_000)
    page.get_by_label("Message", exact=True).fill(PROMPT)
    page.keyboard.press("Enter")
    assert "1000000" in page.get_by_role("alert").inner_text().replace(",", "")


def test_the_key_of_a_server(engine: Engine, browser: Any, open_page: Open) -> None:
    with running(engine, api_keys=["sesame"]) as (url, _):
        page = open_page(url, errors=("Failed to load resource",))
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_text("Bearer").wait_for()
        dialog.get_by_label("Key", exact=True).fill("sesame")
        page.keyboard.press("Enter")
        limit(page, 5)
        assert text(ask(page)) == engine.generate(MESSAGES, max_new_tokens=5).text
