"""Calls of tools and stop strings in texts, however these are cut into pieces."""

import json

import hypothesis.strategies as st
from hypothesis import example, given

from selfspec.serve.responses import CalledFunction
from selfspec.serve.tools import StopText, ToolCallParser

NAMES = st.sampled_from(["search", "add"])
ARGUMENTS = st.dictionaries(st.text("xy", min_size=1, max_size=3), st.integers() | st.text(max_size=5), max_size=3)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)


def parse(pieces: list[str]) -> tuple[str, list[CalledFunction]]:
    parser, text, calls = ToolCallParser(), "", []
    for piece in pieces:
        content, found = parser.push(piece)
        text += content
        calls += found
    content, found = parser.flush()
    return text + content, calls + found


@given(st.lists(st.tuples(TEXTS, NAMES, ARGUMENTS), max_size=3), TEXTS, st.data())
def test_calls_are_found_wherever_the_text_is_cut(
    parts: list[tuple[str, str, dict[str, object]]], rest: str, data: st.DataObject
) -> None:
    text = rest
    for before, name, arguments in reversed(parts):
        call = json.dumps({"name": name, "arguments": arguments})
        text = f"{before}<tool_call>\n{call}\n</tool_call>{text}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = parse(pieces)
    assert content == "".join(before for before, _, _ in parts) + rest
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [part[1:] for part in parts]


def test_what_is_no_call_stays_text() -> None:
    for text in ("<tool_call>no JSON</tool_call>", '<tool_call>{"name": 3}</tool_call>', "<tool_call>", "a < b <tool"):
        assert parse([text]) == (text, [])
        assert parse(list(text)) == (text, [])


def test_a_last_call_without_its_end_tag_is_a_call() -> None:
    assert parse(['<tool_call>{"name": "f", "arguments": {}}']) == ("", [CalledFunction(name="f", arguments="{}")])


def test_text_before_a_tag_is_not_held_back() -> None:
    parser = ToolCallParser()
    assert parser.push("hello <to") == ("hello ", [])
    assert parser.push("morrow") == ("<tomorrow", [])


def before_stop(text: str, stops: list[str], *, include: bool) -> str:
    """The text up to the stop string that ends first: the slow oracle, a character at a time."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: end if include else min(begins)]
    return text


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
@example(["a", "ab"], ["aab", "b"], False)
def test_pieces_join_to_the_text_before_the_stop(pieces: list[str], stops: list[str], include: bool) -> None:
    stopped = StopText(stops, include=include)
    given = [stopped.push(piece) for piece in pieces]
    given.append(stopped.flush())
    assert "".join(given) == before_stop("".join(pieces), stops, include=include)


def test_no_more_is_held_back_than_a_stop_string_can_begin_with() -> None:
    stopped = StopText(["END", "</s>"])
    assert [stopped.push(piece) for piece in ("one E", "D two <", "/s", "x")] == ["one ", "ED two ", "", "</sx"]


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopText([]).push("all of it") == "all of it"
