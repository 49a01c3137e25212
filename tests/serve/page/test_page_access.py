"""Accessibility of the page: contrast, names, keyboard, screen reader, a phone, light and dark."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from helpers.page_server import PageServer, Refusal, chunk, end, token

DONE = b"data: [DONE]\n\n"
DRAFTERS = tuple(f"drafter-{number}" for number in range(1, 10))
Open = Callable[..., Any]

Colour = tuple[float, float, float, float]

VISIBLE_TEXT = """() => {
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode, parent = node.parentElement;
        if (!node.textContent.trim() || parent.closest(".unseen, template, option")) continue;
        if (!parent.checkVisibility({ visibilityProperty: true })) continue;
        const behind = [];
        for (let each = parent; each; each = each.parentElement) behind.push(getComputedStyle(each).backgroundColor);
        found.push({ text: node.textContent.trim(), colour: getComputedStyle(parent).color, behind });
    }
    return found;
}"""


FOCUSED = """() => {
    const each = document.activeElement;
    if (each === document.body) return ["nothing", ""];
    const name = each.getAttribute("aria-label") || each.id || each.textContent.trim();
    const whole = each.id === "message"; // its frame is that of the composer
    return [name, whole ? getComputedStyle(each.nextElementSibling).boxShadow : getComputedStyle(each).outline];
}"""


def parse(colour: str) -> Colour:
    """Red, green, blue and opacity, 0 to 1, of ``rgb(...)`` or ``rgba(...)``."""
    assert colour.startswith("rgb"), colour
    red, green, blue, *opacity = map(float, re.findall(r"[\d.]+", colour))
    return red / 255, green / 255, blue / 255, opacity[0] if opacity else 1.0


def flattened(layers: Sequence[str]) -> Colour:
    """What is seen of colours that lie on each other, the topmost first."""
    seen = (1.0, 1.0, 1.0)
    for layer in reversed(layers):
        *colour, opacity = parse(layer)
        seen = tuple(opacity * new + (1 - opacity) * old for new, old in zip(colour, seen, strict=True))
    return (*seen, 1.0)


def luminance(colour: Colour) -> float:
    """Relative luminance as in WCAG 2."""
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, other: Colour) -> float:
    """Contrast ratio as in WCAG 2, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def many_drafters(request: dict[str, Any]) -> list[Any]:
    """An answer with every mark, one more drafter than there are marks, and the limit of tokens reached."""
    if request["messages"][-1]["content"] == "Fail":
        return Refusal(500, "It broke.")  # type: ignore[return-value]
    if not request["speculative"]["enabled"]:
        return [chunk([token("other")]), end(), DONE]
    return [chunk([token("first"), *(token(f" by {name}", name) for name in DRAFTERS)]), end("length"), DONE]


def send(page: Any, text: str) -> Any:
    turn = page.locator(".turn").nth(page.locator(".turn").count())
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    turn.locator(".actions button").first.wait_for()
    return turn


def wait_until(page: Any, condition: str) -> None:
    """Waits for a condition in JavaScript; the page's policy forbids playwright's own way."""
    for _ in range(500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{condition} did not come true")


def with_everything(page: Any) -> None:
    """An answer, a comparison of it, an answer that failed."""
    turn = send(page, "Hi")
    turn.get_by_role("button", name="The same without drafts").click()
    turn.locator(".verdict[data-kind]").wait_for()
    send(page, "Fail")


def test_the_contrast_of_black_and_white() -> None:
    assert contrast(parse("rgb(0, 0, 0)"), parse("rgb(255, 255, 255)")) == pytest.approx(21)
    assert contrast(parse("rgb(119, 119, 119)"), parse("rgb(255, 255, 255)")) == pytest.approx(4.48, abs=0.01)
    assert flattened(["rgba(0, 0, 0, 0.5)", "rgb(255, 255, 255)"]) == (0.5, 0.5, 0.5, 1.0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out(server: PageServer, open_page: Open, scheme: str) -> None:
    server.answers = many_drafters
    page = open_page(color_scheme=scheme, errors=("Failed to load resource",))
    page.get_by_text("tiny").wait_for()
    found = page.evaluate(VISIBLE_TEXT)
    with_everything(page)
    found += page.evaluate(VISIBLE_TEXT)
    page.get_by_role("button", name="Settings").click()
    found += page.evaluate(VISIBLE_TEXT)
    texts = {each["text"] for each in found}
    assert {"by drafter-1", "by drafter-8", "Send", "Defaults", "It broke.", "est. speedup"} <= texts
    assert any(text.startswith("The texts differ") for text in texts)
    ground = "rgb(255, 255, 255)" if scheme == "light" else "rgb(0, 0, 0)"
    faint = {
        each["text"]: round(ratio, 2)
        for each in found
        if (ratio := contrast(parse(each["colour"]), flattened([*each["behind"], ground]))) < 4.5
    }
    assert faint == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_marks_and_controls_stand_out(server: PageServer, open_page: Open, scheme: str) -> None:
    server.answers = many_drafters
    page = open_page(color_scheme=scheme)
    send(page, "Hi")
    marks = page.locator(".text .token").evaluate_all(
        """found => found.map(each => getComputedStyle(each)).map(style => ({
            line: style.textDecorationColor, tint: style.backgroundColor,
            kind: `${style.textDecorationLine} ${style.textDecorationStyle}` }))"""
    )
    ground = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert len(marks) == len(DRAFTERS)
    assert len({mark["kind"] for mark in marks}) == 8, "eight marks without colour; later drafters share the last"
    assert len({mark["tint"] for mark in marks}) == 8
    for mark in marks:
        assert contrast(parse(mark["line"]), parse(ground)) >= 3, mark
        assert contrast(parse(mark["line"]), parse(mark["tint"])) >= 3, mark
    borders = page.locator("#composer textarea, dialog textarea, dialog input:not([type=checkbox])").evaluate_all(
        "found => found.map(each => [getComputedStyle(each).borderTopColor, getComputedStyle(each).backgroundColor])"
    )
    for border, inside in borders:
        assert contrast(parse(border), parse(inside)) >= 3


def test_the_page_follows_the_system_until_the_button_is_pressed(server: PageServer, open_page: Open) -> None:
    page = open_page(color_scheme="light")
    button = page.get_by_role("button", name="Dark mode")

    def is_dark() -> bool:
        colour = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        dark = luminance(parse(colour)) < 0.5
        for _ in range(100):  # the event comes after the colours have changed
            if button.get_attribute("aria-pressed") == str(dark).lower():
                return dark
            page.wait_for_timeout(20)
        raise AssertionError("the button says something else than the colours")

    assert not is_dark()
    page.emulate_media(color_scheme="dark")
    assert is_dark()
    button.click()
    assert not is_dark()
    page.reload()
    assert not is_dark()
    page.emulate_media(color_scheme="light")
    button.click()
    assert is_dark()


def test_every_control_has_a_name_and_a_size(server: PageServer, open_page: Open) -> None:
    server.answers = many_drafters
    page = open_page(viewport={"width": 360, "height": 700}, errors=("Failed to load resource",))
    with_everything(page)
    for dialog in ("Settings", None):
        if dialog:
            page.get_by_role("button", name=dialog).click()
        controls = page.locator("button:visible, input:visible, textarea:visible, select:visible")
        assert controls.count() >= 6
        for control in controls.all():
            shown = control.aria_snapshot()
            assert re.match(r'- \w+ "[^"]+"', shown), shown
            box = control.bounding_box()
            smallest = 17 if control.get_attribute("type") == "checkbox" else 24
            assert min(box["width"], box["height"]) >= smallest, (shown, box)
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1
    assert page.title() == "selfspec"
    repeated = page.evaluate(
        "[...document.querySelectorAll('[id]')].map(e => e.id).filter((id, i, all) => all.indexOf(id) < i)"
    )
    assert repeated == []


def test_a_screen_reader_is_told_the_beginning_and_the_end_alone(server: PageServer, open_page: Open) -> None:
    gate = threading.Event()

    def slowly(_: dict[str, Any]) -> Iterator[Any]:
        for word in ("a", "b", "c"):
            yield chunk([token(word)])
        gate.wait(10)
        yield from (end(), DONE)

    server.answers = slowly
    page = open_page()
    page.evaluate(
        """() => {
            const live = '[aria-live]:not([aria-live=off]), [role=status], [role=alert], [role=log]:not([aria-live])';
            window.spoken = [];
            new MutationObserver((records) => {
                for (const { target } of records) {
                    const region = (target.nodeType === 1 ? target : target.parentElement).closest(live);
                    if (region) window.spoken.push(region.textContent);
                }
            }).observe(document.body, { subtree: true, childList: true, characterData: true });
        }"""
    )
    page.get_by_label("Message", exact=True).fill("Hi")
    page.keyboard.press("Enter")
    page.get_by_text("abc").wait_for()
    assert page.evaluate("spoken") == ["Generating."]
    assert page.locator(".answer").get_attribute("aria-busy") == "true"
    gate.set()
    page.locator(".actions button").first.wait_for()
    spoken = page.evaluate("spoken")
    assert len(spoken) == 2
    assert spoken[1].startswith("Answer finished. 3 tokens")
    assert page.locator(".answer").get_attribute("aria-busy") is None
    assert page.get_by_role("heading", name="Answer, drafts by auto").count() == 1


def test_the_keyboard_reaches_everything(server: PageServer, open_page: Open) -> None:
    server.answers = many_drafters
    page = open_page()
    page.locator("#method option").first.wait_for(state="attached")
    message = page.get_by_label("Message", exact=True)
    assert message.evaluate("field => field === document.activeElement"), "one can type at once"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert message.input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy").wait_for()
    assert server.requests[0]["messages"][0]["content"] == "one\ntwo"
    assert message.input_value() == ""
    page.locator("body").evaluate("() => document.activeElement.blur()")
    page.evaluate("document.querySelector('header').scrollIntoView()")
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        name, frame = page.evaluate(FOCUSED)
        reached.add(name)
        assert name == "nothing" or "none" not in frame, f"the focus on {name} cannot be seen"
    wanted = {"New chat", "Settings", "Dark mode", "The same without drafts", "Copy", "message", "method", "send"}
    assert wanted <= reached


def test_dialogs_keep_the_focus_and_give_it_back(server: PageServer, open_page: Open) -> None:
    page = open_page()
    opener = page.get_by_role("button", name="Settings")
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Settings")
    assert dialog.is_visible()
    assert dialog.evaluate("dialog => dialog.contains(document.activeElement)")
    assert dialog.evaluate("dialog => dialog.matches(':modal')")
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert opener.evaluate("button => button === document.activeElement")


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_nothing_is_cut_off_at_the_side(server: PageServer, open_page: Open, width: int) -> None:
    server.answers = many_drafters
    page = open_page(viewport={"width": width, "height": 700}, errors=("Failed to load resource",))
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) <= width
    with_everything(page)
    send(page, "x" * 200)
    assert page.evaluate(wide) <= width
    box = page.locator(".comparison").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert abs(box["x"] + box["width"] / 2 - width / 2) < 10, "in the middle"
    page.get_by_role("button", name="Settings").click()
    box = page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_the_end_stays_in_view_unless_one_scrolls_away(server: PageServer, open_page: Open) -> None:
    gates = [threading.Event(), threading.Event()]
    lines = [token(f"line {number}\n", "suffix") for number in range(60)]

    def slowly(_: dict[str, Any]) -> Iterator[Any]:
        for gate in gates:
            yield chunk(lines)
            gate.wait(10)
        yield from (end(), DONE)

    server.answers = slowly
    page = open_page(viewport={"width": 800, "height": 300})
    page.get_by_text("tiny").wait_for()
    assert page.evaluate("scrollY") == 0, "the welcome is read from its beginning"
    page.get_by_label("Message", exact=True).fill("Hi")
    page.keyboard.press("Enter")
    distance = "document.documentElement.scrollHeight - innerHeight - scrollY"
    wait_until(page, f"scrollY > 500 && {distance} < 5")
    page.mouse.move(400, 300)
    page.mouse.wheel(0, -400)
    wait_until(page, f"{distance} > 300")
    before = page.evaluate("scrollY")
    gates[0].set()
    wait_until(page, f"{distance} > 1500")
    assert page.evaluate("scrollY") == before
    gates[1].set()
