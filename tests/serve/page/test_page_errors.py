"""What the page says when something goes wrong, and how a person goes on from there."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from helpers.page_server import PageServer, Refusal, chunk, end, token

DONE = b"data: [DONE]\n\n"
Open = Callable[..., Any]
REFUSED = ("Failed to load resource",)
"""What Chromium says in its console of any answer with status 400 or more."""


def answer(_: dict[str, Any]) -> list[Any]:
    return [chunk([token("Hello", "suffix"), token(" you")]), end(), DONE]


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (Refusal(429, "Too many requests wait.", {"Retry-After": "3"}), "Too many requests wait. Try again in 3 s."),
        (Refusal(400, "The prompt is too long."), "The prompt is too long."),
        ([chunk([token("He")]), {"error": {"message": "The worker ended."}}], "The worker ended."),
        ([chunk([token("He")])], "The connection ended before the answer was complete."),
        ([chunk([token("He")]), b"data: {nonsense\n\n"], "The server sent something that cannot be read."),
    ],
    ids=["busy", "refused", "error in the stream", "cut", "nonsense"],
)
def test_an_error_is_told_and_can_be_tried_again(server: PageServer, open_page: Open, wrong: Any, told: str) -> None:
    server.answers = lambda _: wrong
    page = open_page(errors=REFUSED)
    send(page, "Hi")
    assert page.get_by_role("alert").inner_text() == told
    assert page.get_by_role("button", name="Send").is_visible()
    server.answers = answer
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("button", name="Copy").wait_for()
    assert page.locator(".turn").count() == 1
    assert page.get_by_role("alert").count() == 0
    assert page.locator(".text").inner_text() == "Hello you"


def test_what_failed_is_no_part_of_the_conversation(server: PageServer, open_page: Open) -> None:
    server.answers = lambda _: Refusal(500, "It broke.")
    page = open_page(errors=REFUSED)
    send(page, "Lost")
    page.get_by_role("alert").wait_for()
    assert not page.locator(".figures").is_visible()
    server.answers = answer
    send(page, "Kept")
    page.get_by_role("button", name="Copy").wait_for()
    assert server.requests[1]["messages"] == [{"role": "user", "content": "Kept"}]


def test_a_server_that_is_gone(server: PageServer, open_page: Open) -> None:
    page = open_page(errors=REFUSED)
    page.get_by_text("tiny").wait_for()
    page.route("**/v1/**", lambda route: route.abort())
    send(page, "Hi")
    assert page.get_by_role("alert").inner_text() == "The server cannot be reached. Is it still running?"


def test_an_error_of_a_comparison_is_told_there(server: PageServer, open_page: Open) -> None:
    server.answers = lambda request: answer(request) if request["speculative"]["enabled"] else Refusal(429, "Busy.")
    page = open_page(errors=REFUSED)
    send(page, "Hi")
    page.get_by_role("button", name="The same without drafts").click()
    page.locator(".verdict[data-kind=stopped]").wait_for()
    assert page.locator(".verdict").inner_text() == "Busy."
    assert page.locator(".text").first.inner_text() == "Hello you"


def test_the_key_is_asked_for_until_it_fits(server: PageServer, open_page: Open) -> None:
    server.key = "sesame"
    server.answers = answer
    page = open_page(errors=REFUSED)
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_text("This server needs an API key.").wait_for()
    for key in ("wrong", "sesame"):
        dialog.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
    page.get_by_text("tiny").wait_for()
    assert not dialog.is_visible()
    send(page, "Hi")
    page.get_by_role("button", name="Copy").wait_for()
    stored = page.evaluate("JSON.stringify([localStorage, document.cookie])")
    assert "sesame" not in stored, "the key is not kept beyond the tab"
    page.reload()
    page.get_by_text("tiny").wait_for()


def test_without_a_key_the_refusal_is_told(server: PageServer, open_page: Open) -> None:
    server.key = "sesame"
    page = open_page(errors=REFUSED)
    page.get_by_role("dialog", name="API key").wait_for()
    page.keyboard.press("Escape")
    page.locator("#connection").get_by_text("This server needs an API key.").wait_for()
    send(page, "Hi")
    page.get_by_role("dialog", name="API key").wait_for()
    page.get_by_label("Key", exact=True).fill("sesame")
    server.answers = answer
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy").wait_for()


def test_a_page_without_storage_works(server: PageServer, open_page: Open) -> None:
    server.answers = answer
    page = open_page()
    blocked = "() => { throw new DOMException('denied', 'SecurityError'); }"
    for name in ("localStorage", "sessionStorage"):
        page.add_init_script(f"Object.defineProperty(window, '{name}', {{ get: {blocked} }})")
    page.reload()
    send(page, "Hi")
    page.get_by_role("button", name="Copy").wait_for()
    page.get_by_role("button", name="Dark mode").click()
    assert page.get_by_role("button", name="Dark mode").get_attribute("aria-pressed") == "true"


def test_unusable_settings_in_the_storage_are_ignored(server: PageServer, open_page: Open) -> None:
    server.answers = answer
    page = open_page()
    for stored in ("{", json.dumps(None), json.dumps({"temperature": "warm", "other": 1})):
        page.evaluate("stored => localStorage.setItem('selfspec.settings', stored)", stored)
        page.reload()
        page.get_by_text("tiny").wait_for()
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Max tokens").input_value() == "256"
