"""Calls of tools in texts, however these are cut into pieces."""

import json

import hypothesis.strategies as st
from hypothesis import given

from selfspec.serve.tool_calls import ParsedCall, ToolCallParser

NAMES = st.sampled_from(["search", "add"])
ARGUMENTS = st.dictionaries(st.text("xy", min_size=1, max_size=3), st.integers() | st.text(max_size=5), max_size=3)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)


def parse(pieces: list[str]) -> tuple[str, list[ParsedCall]]:
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
    assert parse(['<tool_call>{"name": "f", "arguments": {}}']) == ("", [ParsedCall("f", "{}")])


def test_text_before_a_tag_is_not_held_back() -> None:
    parser = ToolCallParser()
    assert parser.push("hello <to") == ("hello ", [])
    assert parser.push("morrow") == ("<tomorrow", [])
