"""Calls and reasoning in every format: found wherever the text is cut, and forced by a grammar."""

import itertools
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from helpers.dialects import MODELS, SECTION, tokenizer_of
from selfspec.constraint import Constraint
from selfspec.decoding.output import TextStream
from selfspec.sampling.grammar import Grammars
from selfspec.serve.formats.dialect import Asked, Dialect
from selfspec.serve.formats.scanner import MOST_HELD

TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a"],
    },
    "now": {"type": "object", "properties": {}},
}
ADD = ("add", {"a": 1, "note": 'x "y" {'})
JSON_ADD = '{"name": "add", "arguments": {"a": 1, "note": "x \\"y\\" {"}}'
ARGUMENTS = '{"a": 1, "note": "x \\"y\\" {"}'
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    '<parameter=note>\nx "y" {\n</parameter>\n</function>\n</tool_call>'
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    '<arg_key>note</arg_key>\n<arg_value>x "y" {</arg_value>\n</tool_call>'
)
DEEPSEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
WRITTEN = {
    "hermes": f"<tool_call>\n{JSON_ADD}\n</tool_call>\n<tool_call>{JSON_ADD}</tool_call>",
    "qwen": f"<tool_call>\n{JSON_ADD}\n</tool_call>\n<tool_call>{JSON_ADD}</tool_call>",
    "qwen-coder": f"{CODER}\n{CODER}",
    "glm": f"{GLM}\n{GLM}",
    "llama": f"{JSON_ADD}; {JSON_ADD}".replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{JSON_ADD}, {JSON_ADD}]",
    "mistral-named": f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]add[CALL_ID]ab12[ARGS]{ARGUMENTS}",
    "deepseek": f"{SECTION[0]}{DEEPSEEK}\n{DEEPSEEK}{SECTION[1]}",
    "deepseek-v3.1": f"{SECTION[0]}"
    + f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>" * 2
    + SECTION[1],
    "kimi": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.add:{index}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
        for index in range(2)
    )
    + "<|tool_calls_section_end|>",
    "granite": f"<|tool_call|>[{JSON_ADD}, {JSON_ADD}]",
    "phi": f"<|tool_call|>[{JSON_ADD}, {JSON_ADD}]<|/tool_call|>",
    "pythonic": '[add(a=1, note=\'x "y" {\'), add(1, "x \\"y\\" {")]',
    "lfm2": '<|tool_call_start|>[add(a=1, note="x \\"y\\" {"), add(note="x \\"y\\" {", a=1)]<|tool_call_end|>',
    "olmo": '<function_calls>\nadd(a=1, note="x \\"y\\" {")\nadd(note="x \\"y\\" {", a=1)\n</function_calls>',
    "harmony": f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
    "plain": f"[{JSON_ADD}, {JSON_ADD}]",
}
BARE = {"llama", "pythonic", "plain", "harmony"}


class Model:
    """A format's tokenizer, and what its answers mean."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tokenizer_of(name)
        self.dialect = Dialect(self.tokenizer)

    def pieces(self, text: str) -> list[str]:
        """The text of each token, with marks."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        stream = TextStream(self.tokenizer)
        reader = self.dialect.reader(Asked(TOOLS), thinks=False)
        assert reader is not None
        return [reader.marked(token_id, stream.push(token_id)) for token_id in ids]

    def read(
        self, text: str, cuts: list[int] | None = None, *, thinks: bool = False, **asked: Any
    ) -> list[tuple[str, str]]:
        """The parts of an answer, those of one kind that follow each other joined."""
        reader = self.dialect.reader(Asked(**{"tools": TOOLS, **asked}), thinks=thinks)
        assert reader is not None
        pieces = self.pieces(text)
        places = (
            [0, *sorted(min(cut, len(pieces)) for cut in cuts), len(pieces)]
            if cuts is not None
            else [*range(len(pieces) + 1)]
        )
        parts = [part for start, end in itertools.pairwise(places) for part in reader.push("".join(pieces[start:end]))]
        joined: list[tuple[str, str]] = []
        for part in [*parts, *reader.flush()]:
            if joined and joined[-1][0] == part.kind != "call":
                joined[-1] = (part.kind, joined[-1][1] + part.text)
            else:
                joined.append((part.kind, part.text))
        return joined


MADE = {name: Model(name) for name in MODELS}


def called(parts: list[tuple[str, str]]) -> list[Any]:
    """Calls with their decoded arguments, and other parts as they are."""
    found: list[Any] = []
    for kind, text in parts:
        if kind == "arguments":
            found[-1] = (found[-1], json.loads(text))
        else:
            found.append(text if kind == "call" else (kind, text))
    return found


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=8))
def test_calls_are_read_wherever_the_text_is_cut(name: str, cuts: list[int]) -> None:
    assert called(MADE[name].read(WRITTEN[name], cuts)) == [ADD, ADD]


@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_are_given_as_they_are_written(name: str) -> None:
    if name in ("pythonic", "lfm2", "olmo"):
        pytest.skip("a call in Python's notation is read as a whole")
    model = MADE[name]
    reader = model.dialect.reader(Asked(TOOLS), thinks=False)
    assert reader is not None
    seen, before = "", ""
    for piece in model.pieces(WRITTEN[name]):
        before += piece
        seen += "".join(part.text for part in reader.push(piece) if part.kind == "arguments")
        if '"y' in before:
            assert 'x \\"' in seen
            return
    raise AssertionError("the argument was not found")


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - BARE))
def test_text_around_calls_is_text(name: str) -> None:
    assert called(MADE[name].read(f"Let me see. {WRITTEN[name]}"))[0] == ("text", "Let me see. ")
    assert called(MADE[name].read(f"Let me see. {WRITTEN[name]}"))[1:] == [ADD, ADD]


@pytest.mark.parametrize("name", WRITTEN)
def test_only_one_call_where_they_are_not_parallel(name: str) -> None:
    assert called(MADE[name].read(WRITTEN[name] + " more", parallel=False)) == [ADD]


TEXTS = [
    "Hello there.",
    '{"name": "Bob", "arguments": 3}',
    '{"name": "add"}',
    '{"age": 3}',
    "[1, 2, 3]",
    "[add is a function]",
    "[add(1, 2, 3)]",
    "[now(**{})]",
    "[open('x')]",
    "<tool_call>no JSON</tool_call>",
    '<tool_call>{"name": 3}</tool_call>',
    "<tool_call>",
    '<tool_call>{"name": "add", "arg',
    "a < b <tool",
    "  {",
    "def f():\n    return {}\n",
    "[TOOL_CALLS]",
    "to=functions.add",
    "",
    " ",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
]


@pytest.mark.parametrize("name", ["hermes", "qwen", "glm", "qwen-coder", "llama", "pythonic", "olmo", "plain", "lfm2"])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    expected = "".join(MADE[name].tokenizer.decode(MADE[name].tokenizer.encode(text), skip_special_tokens=True))
    for cuts in (None, [], [3]):
        parts = MADE[name].read(text, cuts)
        assert "".join(part for kind, part in parts if kind == "text") == expected
        assert {kind for kind, _ in parts} <= {"text"}


def test_a_tag_that_is_spelled_is_text_where_the_tokenizer_has_a_token_of_it() -> None:
    model = MADE["qwen"]
    reader = model.dialect.reader(Asked(TOOLS), thinks=False)
    assert reader is not None
    spelled = WRITTEN["qwen"]
    assert "".join(part.text for part in [*reader.push(spelled), *reader.flush()]) == spelled


def test_without_tools_tags_are_text() -> None:
    assert MADE["qwen"].read(WRITTEN["qwen"], tools={}) == [("text", WRITTEN["qwen"])]


def test_other_orders_and_forms_of_json_calls() -> None:
    read = MADE["hermes"].read
    for text in (
        '{"arguments": {"a": 1}, "name": "add"}',
        '{"type": "function", "name": "add", "parameters": {"a": 1}, "more": [2]}',
        '{"name": "add", "arguments": "{\\"a\\": 1}"}',
    ):
        assert called(read(f"<tool_call>{text}</tool_call>")) == [("add", {"a": 1})]
    assert called(read('<tool_call>{"name": "now"}</tool_call>')) == [("now", {})]
    assert called(read('<tool_call>{"name": "now", "arguments": null}')) == [("now", {})]
    assert read('<tool_call>{"name": "add", "arguments": {"a": 1') == [("call", "add"), ("arguments", '{"a": 1')]
    assert called(read('<tool_call>{"name": "add", "arguments": {"a": 1} oops</tool_call> and')) == [
        ("add", {"a": 1}),
        ("text", "oops</tool_call> and"),
    ]


@pytest.mark.parametrize("name", ["hermes", "qwen", "mistral", "granite", "plain"])
def test_some_models_leave_the_tags_out(name: str) -> None:
    for text in (JSON_ADD, f"```json\n{JSON_ADD}\n```", f"```\n[{JSON_ADD}]\n```"):
        assert called(MADE[name].read(text)) == [ADD]
    for text in ("```json\n{}\n```", f"```python\n{JSON_ADD}\n```", JSON_ADD.replace("add", "unknown")):
        assert MADE[name].read(text) == [("text", text)]


def test_values_in_tags_have_the_types_of_the_schema() -> None:
    schema = {
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "number"},
            "list": {"type": "array"},
            "either": {"type": ["string", "null"]},
        }
    }
    tags = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in [("text", "1\n\n2"), ("number", "2.5"), ("list", "[1]"), ("either", "null"), ("new", "a b")]
    )
    parts = MADE["qwen-coder"].read(f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>", tools={"f": schema})
    values = {"text": "1\n\n2", "number": 2.5, "list": [1], "either": None, "new": "a b"}
    assert called(parts) == [("f", values)]


EITHER = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("name", ["qwen-coder", "glm"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (EITHER, "123", "123"),
        (EITHER, "true", "true"),
        (EITHER, '{"a": 1}', '{"a": 1}'),
        (EITHER, "null", None),
        (EITHER, '"123"', "123"),  # as a call that is forced has it
        ({"type": ["string", "null"]}, '"a"', "a"),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "2", 2),
        ({"type": "boolean"}, "True", True),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": "string"}, "True", "True"),
        ({"type": 3, "anyOf": 5}, "True", "True"),
        ({}, "False", "False"),
    ],
)
def test_values_in_tags_of_several_types(name: str, schema: dict[str, Any], text: str, value: Any) -> None:
    """Templates write what is no string into earlier calls as Python does, and models after them."""
    call = {
        "qwen-coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[name]
    assert called(MADE[name].read(call, tools={"f": {"properties": {"a": schema}}})) == [("f", {"a": value})]


def test_a_call_that_never_comes_to_a_name_is_not_held_for_ever() -> None:
    model = MADE["hermes"]
    text = '<tool_call>{"arguments": "' + "x" * (MOST_HELD + 10)
    reader = model.dialect.reader(Asked(TOOLS), thinks=False)
    assert reader is not None
    half = reader.push(text[:1000])
    assert half == []
    assert "".join(part.text for part in reader.push(text[1000:])) == text
    assert [part.text for part in reader.push(" more")] == [" more"]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("cuts", [None, [], [4, 9]])
def test_reasoning_is_told_from_the_answer(thinks: bool, cuts: list[int] | None) -> None:
    begin = "" if thinks else "<think>"
    text = f"{begin}\nHm <tool_call> no.\n</think>\n\nYes."
    assert MADE["qwen"].read(text, cuts, thinks=thinks) == [("reasoning", "Hm <tool_call> no."), ("text", "Yes.")]
    assert MADE["qwen"].read(f"{begin}a</think>\n{WRITTEN['qwen']}", cuts, thinks=thinks)[0] == ("reasoning", "a")
    assert called(MADE["qwen"].read(f"{begin}a</think>\n{WRITTEN['qwen']}", cuts, thinks=thinks))[1:] == [ADD, ADD]
    assert MADE["qwen"].read(f"{begin}never closed \n", cuts, thinks=thinks) == [("reasoning", "never closed")]


def test_channels_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert MADE["harmony"].read(text) == [("reasoning", "Hm."), ("text", "Yes.")]
    preamble = "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant"
    assert called(MADE["harmony"].read(preamble + WRITTEN["harmony"])) == [("text", "I call."), ADD, ADD]


@pytest.mark.parametrize("cuts", [None, [], [4, 9]])
@pytest.mark.parametrize("recipient", [" to=functions.add", "to=add"])
def test_a_recipient_of_harmony_before_the_channel(recipient: str, cuts: list[int] | None) -> None:
    for channel in ("<|channel|>commentary json", "<|channel|>commentary <|constrain|>json", ""):
        text = f"{recipient}{channel}<|message|>{ARGUMENTS}<|call|>"
        assert called(MADE["harmony"].read(text, cuts)) == [ADD]
    for text in (" to=functions.add", " to be, or not", "to", " "):
        assert MADE["harmony"].read(text, cuts) == [("text", text)]
    reasoning = f"{recipient}<|channel|>analysis<|message|>Hm.".replace("add", "other").replace("functions.", "")
    assert MADE["harmony"].read(reasoning, cuts) == [("reasoning", "Hm.")]


def test_a_name_of_harmony_that_no_tool_can_have_fails_nothing() -> None:
    assert MADE["harmony"].read(f"<|channel|>commentary to=functions.{'a' * 200}<|message|>{{}}<|call|>")


@pytest.mark.parametrize("cuts", [None, [], [4, 9]])
@pytest.mark.parametrize("blank", ["", " "])
def test_a_call_of_harmony_without_arguments_has_an_empty_object(blank: str, cuts: list[int] | None) -> None:
    head = f"<|channel|>commentary to=functions.now<|message|>{blank}"
    assert called(MADE["harmony"].read(f"{head}<|call|>", cuts)) == [("now", {})]
    assert MADE["harmony"].read(head, cuts)[0] == ("call", "now")
    assert "{}" not in [text for _, text in MADE["harmony"].read(head, cuts)]  # which was cut off


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_grammar_forces_calls_that_are_read(name: str, parallel: bool) -> None:
    model = MADE[name]
    asked = Asked(TOOLS, must_call=True, parallel=parallel)
    text = walk(model, model.dialect.constraint(asked, [], thinks=False))
    calls = called(model.read(text))
    assert calls
    assert all(call[0] in TOOLS for call in calls if call[0] != "reasoning"), text


def walk(model: Model, constraint: Constraint | None) -> str:
    """A text of a grammar: the rarest tokens of those that are allowed, so that it comes to an end."""
    assert constraint is not None
    grammars = Grammars(model.tokenizer, len(model.tokenizer), {0})
    matcher = grammars._compile(constraint)._matcher
    ids: list[int] = []
    wanted = model.tokenizer.encode('}])"\n/><1,:a', add_special_tokens=False)
    for _ in range(600):
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(len(model.tokenizer)) if bits[i // 8] >> (i % 8) & 1]
        if matcher.is_accepting():
            break
        special = [i for i in allowed if i >= 128]
        nice = [i for i in wanted if i in allowed]
        ids.append((special or nice or allowed)[0])
        assert matcher.consume_token(ids[-1])
    assert matcher.is_accepting(), model.tokenizer.decode(ids)
    return str(model.tokenizer.decode(ids))


@pytest.mark.parametrize("name", WRITTEN)
def test_the_grammar_takes_what_models_write(name: str) -> None:
    """But for what only some of them write: other orders, positional arguments, several bare calls."""
    model = MADE[name]
    written = {
        "llama": JSON_ADD.replace("arguments", "parameters"),
        "plain": JSON_ADD,
        "hermes": WRITTEN["hermes"]
        .replace("<tool_call>{", "<tool_call>\n{")
        .replace("}</tool_call>", "}\n</tool_call>"),
        "mistral-named": f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}",
        "deepseek": f"{SECTION[0]}{DEEPSEEK}{SECTION[1]}",
        "pythonic": '[add(a=1, note="x \\"y\\" {")]',
        "lfm2": '<|tool_call_start|>[add(a=1, note="x \\"y\\" {"), add(a=1)]<|tool_call_end|>',
        "olmo": '<function_calls>\nadd(a=1, note="x \\"y\\" {")\nadd(a=1)\n</function_calls>',
        "kimi": WRITTEN["kimi"].replace("add:1", "add:0"),
        "harmony": WRITTEN["harmony"].partition("<|call|>")[0],
    }
    written["qwen"] = written["hermes"]
    text = written.get(name, WRITTEN[name])
    asked = Asked(TOOLS, must_call=True)
    constraint = model.dialect.constraint(asked, [], thinks=False)
    assert constraint is not None
    matcher = Grammars(model.tokenizer, len(model.tokenizer), {0})._compile(constraint)._matcher
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    taken = matcher.try_consume_tokens(ids)
    assert taken == len(ids), model.tokenizer.decode(ids[:taken])
    assert matcher.is_accepting()
