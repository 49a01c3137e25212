"""The page in a real browser: streaming, marks, methods, the comparison, stopping, settings."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.page_server import FIGURES, METHODS, PageServer, chunk, end, token

DONE = b"data: [DONE]\n\n"
SUFFIX, LOW_BIT = "suffix", "low-bit"
Open = Callable[..., Any]


def sky(request: dict[str, Any]) -> list[Any]:
    """An answer of five drafted tokens and two of the full model; without drafts the same text."""
    if not request["speculative"]["enabled"]:
        return [*(chunk([token(text)]) for text in ("The", " sky", " is", " <b>", "blue", "</b>", ".")), end(), DONE]
    first = [token("The", LOW_BIT), token(" sky", LOW_BIT), token(" is")]
    second = [token(" <b>", SUFFIX), token("blue", SUFFIX), token("</b>", SUFFIX), token(".")]
    return [chunk(first, speedup_estimate=1.25), chunk(second), end(method="auto"), DONE]


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Any, turn: int = 0) -> Any:
    """The turn, once its answer is complete."""
    found = page.locator(".turn").nth(turn)
    found.get_by_role("button", name="Copy").wait_for()
    return found


def ask(page: Any, text: str) -> Any:
    turn = page.locator(".turn").count()
    send(page, text)
    return finished(page, turn)


def spans(turn: Any) -> list[tuple[str, str]]:
    """The marked tokens of an answer and who drafted them, as their tooltips say."""
    found = turn.locator(".text .token").evaluate_all("found => found.map(each => [each.textContent, each.title])")
    return [(text, title.removeprefix("drafted by ")) for text, title in found]


def figures(turn: Any) -> dict[str, str]:
    labels = turn.locator(".figures").first.locator("dt").all_text_contents()
    return dict(zip(labels, turn.locator(".figures").first.locator("dd").all_text_contents(), strict=True))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds a stream back; opened at the end in any case."""
    event = threading.Event()
    yield event
    event.set()


def test_drafted_tokens_are_marked_by_who_drafted_them(server: PageServer, open_page: Open) -> None:
    server.answers = sky
    turn = ask(page := open_page(), "Why?")
    assert turn.locator(".question").inner_text() == "Why?"
    assert turn.locator(".text").inner_text() == "The sky is <b>blue</b>."
    drafted = [("The", LOW_BIT), (" sky", LOW_BIT), ("<b>", SUFFIX), ("blue", SUFFIX), ("</b>", SUFFIX)]
    assert spans(turn) == drafted
    assert turn.locator("b").count() == 0
    assert turn.locator(".legend li").all_inner_texts() == [
        "full model 2 (29 %)",
        "low-bit 2 (29 %)",
        "suffix 3 (43 %)",
    ]
    classes = {
        name: page.locator(f".text .token[title$='{name}']").first.get_attribute("class") for name in METHODS[1:3]
    }
    assert classes == {"low-bit": "token mark-1", "suffix": "token mark-2"}
    styles = page.locator(".text .token").evaluate_all(
        "found => found.map(each => getComputedStyle(each)).map(s => [s.backgroundColor, s.textDecorationStyle])"
    )
    colours, lines = zip(*styles, strict=True)
    assert len(set(colours)) == 2
    assert set(lines) == {"solid", "dashed"}, "who drafted can be seen without colour"


def test_the_figures_are_the_servers(server: PageServer, open_page: Open) -> None:
    server.answers = sky
    found = figures(ask(open_page(), "Why?"))
    assert found["tokens"] == "7"
    assert found["est. speedup"] == f"{FIGURES['speedup_estimate']:.2f}×"
    assert found["accepted"] == "75 %"
    assert server.requests[0]["stream"] is True
    assert server.requests[0]["speculative"] == {"method": "auto", "enabled": True, "report": True}


def test_text_and_figures_come_while_the_answer_is_generated(
    server: PageServer, open_page: Open, gate: threading.Event
) -> None:
    def slowly(_: dict[str, Any]) -> Iterator[Any]:
        yield chunk([token("One", SUFFIX), token(" two")], speedup_estimate=1.25, acceptance_rate=0.5)
        gate.wait()
        yield chunk([token(" three")])
        yield from (end(), DONE)

    server.answers = slowly
    page = open_page()
    send(page, "Count")
    page.get_by_text("50 %", exact=True).wait_for()
    assert page.locator(".text").inner_text() == "One two"
    assert figures(page) == {"tokens": "2", "tokens/s": "–", "est. speedup": "1.25×", "accepted": "50 %"}
    assert page.get_by_role("status").text_content() == "Generating."
    assert page.get_by_role("button", name="Stop").is_visible()
    gate.set()
    assert finished(page).locator(".text").inner_text() == "One two three"
    assert figures(page)["est. speedup"] == "1.50×"
    assert "3 tokens" in page.get_by_role("status").text_content()


def test_a_stream_may_be_cut_anywhere(server: PageServer, open_page: Open) -> None:
    event = json.dumps(chunk([token("Grüße", SUFFIX), token(" 🌍")]), ensure_ascii=False)
    stream = f": a comment\r\n\r\ndata: {event}\r\n\r\n".encode()
    server.answers = lambda _: [*(bytes([byte]) for byte in stream), end(), DONE]
    turn = ask(open_page(), "Hello")
    assert turn.locator(".text").inner_text() == "Grüße 🌍"
    assert spans(turn) == [("Grüße", SUFFIX)]


def test_where_tokens_are_not_the_text_the_text_is_shown(server: PageServer, open_page: Open) -> None:
    held_back = chunk([token("Half", SUFFIX), token(" STO", SUFFIX)], content="Half")
    whole = chunk([token("", LOW_BIT), token(" é", LOW_BIT)])
    server.answers = lambda _: [held_back, whole, end(), DONE]
    turn = ask(open_page(), "Stop")
    assert turn.locator(".text").inner_text() == "Half é"
    assert spans(turn) == [(" é", LOW_BIT)]
    assert turn.locator(".legend li").all_inner_texts() == ["suffix 2 (50 %)", "low-bit 2 (50 %)"]


def test_the_method_can_be_switched(server: PageServer, open_page: Open) -> None:
    anonymous = [{"text": "Hi", "origin": "draft", "drafted_by": None}]
    server.answers = lambda request: [chunk(anonymous), end(method=request["speculative"]["method"]), DONE]
    page = open_page()
    choice = page.get_by_label("Drafts by")
    choice.locator("option").first.wait_for(state="attached")
    assert choice.locator("option").all_text_contents() == METHODS
    assert choice.input_value() == "auto"
    choice.select_option("suffix")
    assert spans(ask(page, "Hello")) == [("Hi", "suffix")]
    choice.select_option("autoregressive")
    plain = ask(page, "Hello")
    assert [each["speculative"]["method"] for each in server.requests] == ["suffix", "autoregressive"]
    assert plain.get_by_role("button", name="The same without drafts").count() == 0


def test_the_conversation_goes_along_until_a_new_chat(server: PageServer, open_page: Open) -> None:
    server.answers = sky
    page = open_page()
    ask(page, "First")
    ask(page, "Second")
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    assert page.get_by_role("heading", name="Watch a model speed itself up").is_visible()
    ask(page, "Third")
    first = [{"role": "user", "content": "First"}]
    answered = [*first, {"role": "assistant", "content": "The sky is <b>blue</b>."}]
    second = [*answered, {"role": "user", "content": "Second"}]
    third = [{"role": "user", "content": "Third"}]
    assert [each["messages"] for each in server.requests] == [first, second, third]


def test_escape_stops_and_what_came_stays(server: PageServer, open_page: Open) -> None:
    def endless(request: dict[str, Any]) -> Iterator[Any]:
        if len(request["messages"]) > 1:
            yield from sky(request)
            return
        while True:
            yield chunk([token("la ", SUFFIX)])

    server.answers = endless
    page = open_page()
    send(page, "Sing")
    page.get_by_text("la la").wait_for()
    page.keyboard.press("Escape")
    turn = finished(page)
    assert turn.locator(".note").inner_text() == "Stopped."
    assert server.dropped.wait(10), "the connection is closed"
    assert turn.get_by_role("button", name="The same without drafts").count() == 0
    ask(page, "More")
    sung = server.requests[1]["messages"][1]
    assert sung["role"] == "assistant"
    assert set(sung["content"].split()) == {"la"}


def test_the_button_stops_too(server: PageServer, open_page: Open, gate: threading.Event) -> None:
    def waiting(_: dict[str, Any]) -> Iterator[Any]:
        yield chunk([token("Well")])
        gate.wait()
        yield from (end(), DONE)

    server.answers = waiting
    page = open_page()
    send(page, "Sing")
    page.get_by_text("Well").wait_for()
    page.get_by_label("Message", exact=True).fill("Meanwhile")
    page.keyboard.press("Enter")
    assert len(server.requests) == 1, "one answer at a time"
    page.get_by_role("button", name="Stop").click()
    finished(page)
    assert page.get_by_role("button", name="Send").is_visible()
    assert page.get_by_label("Message", exact=True).input_value() == "Meanwhile"


def test_the_same_without_drafts_stands_beside_it(server: PageServer, open_page: Open) -> None:
    server.answers = sky
    page = open_page()
    turn = ask(page, "Why?")
    turn.get_by_role("button", name="The same without drafts").click()
    verdict = turn.locator(".verdict[data-kind]")
    verdict.wait_for()
    assert verdict.inner_text().startswith("Identical text")
    assert verdict.get_attribute("data-kind") == "same"
    assert turn.locator(".comparison .text").all_inner_texts() == ["The sky is <b>blue</b>."] * 2
    assert len(spans(turn.locator(".comparison"))) == 5
    assert turn.locator("[data-part=plain] .legend").inner_text() == "full model 7 (100 %)"
    drafted, plain = server.requests
    assert plain["speculative"] == {"enabled": False, "report": True}
    assert {**plain, "speculative": None} == {**drafted, "speculative": None}
    ask(page, "And?")
    assert len(server.requests[2]["messages"]) == 3, "the comparison is no part of the conversation"


def test_the_ratio_is_that_of_the_times_from_first_to_last_token(server: PageServer, open_page: Open) -> None:
    page = open_page()
    ratio = page.evaluate(
        """async () => {
            const { Answer } = await import("./page/answer.js");
            const { Comparison } = await import("./page/comparison.js");
            const answer = new Answer("suffix");
            const chunk = (text) => ({ choices: [{ delta: { content: text } }],
                                       selfspec: { tokens: [{ text, origin: "target", drafted_by: null }] } });
            let now = 0;
            performance.now = () => now;
            const at = (seconds, text) => { now = 1000 * seconds; return chunk(text); };
            for (const [seconds, text] of [[5, "a"], [6, "b"], [7, "c"]]) answer.take(at(seconds, text));
            async function* plain() {
                for (const [seconds, text] of [[20, "a"], [23, "b"], [25, "c"]]) yield at(seconds, text);
                now = 1e9;
            }
            return new Comparison(answer).receive(plain(), new AbortController().signal);
        }"""
    )
    assert ratio == "Identical text, 2.50× as fast with drafts: 2.00 s instead of 5.00 s from first to last token."


def test_a_comparison_tells_where_texts_differ(server: PageServer, open_page: Open) -> None:
    server.answers = lambda request: (
        sky(request) if request["speculative"]["enabled"] else [chunk([token("The sea")]), end(), DONE]
    )
    turn = ask(open_page(), "Why?")
    turn.get_by_role("button", name="The same without drafts").click()
    verdict = turn.locator(".verdict[data-kind]")
    verdict.wait_for()
    assert verdict.get_attribute("data-kind") == "different"
    assert verdict.inner_text().startswith("The texts differ from character 6 on")


def test_a_comparison_can_be_stopped(server: PageServer, open_page: Open, gate: threading.Event) -> None:
    def answers(request: dict[str, Any]) -> Iterator[Any]:
        yield chunk([token("Well")])
        if not request["speculative"]["enabled"]:
            gate.wait()
        yield from (end(), DONE)

    server.answers = answers
    page = open_page()
    turn = ask(page, "Why?")
    turn.get_by_role("button", name="The same without drafts").click()
    page.locator("[data-part=plain]").get_by_text("Well").wait_for()
    page.keyboard.press("Escape")
    turn.locator(".verdict[data-kind=stopped]").wait_for()
    assert page.get_by_role("button", name="Send").is_visible()


def test_settings_go_into_the_request_and_stay(server: PageServer, open_page: Open) -> None:
    server.answers = sky
    page = open_page()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Max tokens").fill("12")
    page.get_by_role("button", name="Done").click()
    page.reload()
    turn = ask(page, "Why?")
    request = server.requests[0]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["seed"], request["max_completion_tokens"]) == (0.7, 5, 12)
    assert turn.locator(".note").inner_text() == "Seed 5."


def test_a_sampled_answer_always_has_a_seed(server: PageServer, open_page: Open) -> None:
    server.answers = sky
    page = open_page()
    ask(page, "Greedy")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("1")
    page.keyboard.press("Escape")
    turn = ask(page, "Sampled")
    turn.get_by_role("button", name="The same without drafts").click()
    turn.locator(".verdict[data-kind]").wait_for()
    greedy, sampled, plain = server.requests
    assert "seed" not in greedy
    assert greedy["temperature"] == 0
    assert isinstance(sampled["seed"], int)
    assert plain["seed"] == sampled["seed"]


def test_a_setting_out_of_range_is_refused_before_anything_is_sent(server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("7")
    page.keyboard.press("Escape")
    send(page, "Why?")
    assert page.get_by_role("dialog", name="Settings").is_visible()
    assert page.get_by_label("Temperature").evaluate("field => !field.validity.valid")
    page.get_by_role("button", name="Defaults").click()
    assert page.get_by_label("Temperature").input_value() == "0"
    assert server.requests == []


def test_marks_can_be_switched_off(server: PageServer, open_page: Open) -> None:
    server.answers = sky
    page = open_page()
    ask(page, "Why?")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Mark drafted text").uncheck()
    line = "each => getComputedStyle(each).textDecorationLine"
    assert page.locator(".text .token").first.evaluate(line) == "none"
    assert page.locator(".legend .token").nth(1).evaluate(line) == "underline"


def test_the_limit_of_tokens_is_told(server: PageServer, open_page: Open) -> None:
    server.answers = lambda _: [chunk([token("So")]), end("length"), DONE]
    assert ask(open_page(), "Why?").locator(".note").inner_text() == "The limit of 256 tokens was reached."
