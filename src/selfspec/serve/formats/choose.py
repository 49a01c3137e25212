"""Which formats a model has, by its chat template and the tokens of its tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.serve.formats.calls import CallFormat
from selfspec.serve.formats.harmony import Harmony
from selfspec.serve.formats.json_calls import JsonCalls, NamedCalls
from selfspec.serve.formats.marks import Marks
from selfspec.serve.formats.python_calls import PythonCalls
from selfspec.serve.formats.tagged_calls import TaggedCalls


@dataclass(frozen=True)
class Thinking:
    """What is around reasoning at the beginning of an answer, as marks and as texts."""

    begin: str
    end: str
    names: tuple[str, str]


_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<reasoning>", "</reasoning>"),
)

_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def choose_thinking(template: str, marks: Marks) -> Thinking | None:
    """How a model with this chat template writes reasoning, if it does."""
    names = next((pair for pair in _THINKING if pair[0] in template and pair[1] in template), None)
    return None if names is None else Thinking(marks(names[0]), marks(names[1]), names)


def choose_calls(template: str, marks: Marks) -> CallFormat | Harmony:
    """How a model with this chat template writes calls: bare JSON objects where it shows no other form."""

    def knows(*names: str) -> bool:
        return all(name in template or (name.startswith("<|") and marks.has(name)) for name in names)

    def tags(begin: str, end: str) -> tuple[str, str]:
        return marks(begin), marks(end)

    known: Sequence[tuple[Sequence[str], Callable[[], CallFormat | Harmony]]] = (
        (("<|channel|>", "<|message|>", "<|start|>"), lambda: Harmony(marks)),
        ((_DEEPSEEK[0],), lambda: _deepseek(template, marks)),
        ((_KIMI_SECTION[0],), lambda: _kimi(marks)),
        (("[TOOL_CALLS]", "[ARGS]"), lambda: _mistral(marks)),
        (("[TOOL_CALLS]",), lambda: JsonCalls(marks("[TOOL_CALLS]"), listed=True)),
        (("<arg_key>",), lambda: _glm(marks)),
        (("<function=", "<parameter="), lambda: _qwen_coder(marks)),
        (("<|tool_call_start|>",), lambda: PythonCalls(*tags("<|tool_call_start|>", "<|tool_call_end|>"))),
        (("<function_calls>",), lambda: PythonCalls(*tags("<function_calls>", "</function_calls>"), listed=False)),
        (("<tool_call>",), lambda: JsonCalls(*tags("<tool_call>", "</tool_call>"))),
        (("<|tool_call|>", "<|/tool_call|>"), lambda: JsonCalls(*tags("<|tool_call|>", "<|/tool_call|>"), listed=True)),
        (("<|tool_call|>",), lambda: JsonCalls(marks("<|tool_call|>"), listed=True)),
        (("[func_name1(",), PythonCalls),
    )
    for names, make in known:
        if knows(*names):
            return make()
    key = "parameters" if '"parameters": dictionary' in template else "arguments"
    return JsonCalls(marks("<|python_tag|>") if knows("<|python_tag|>") else "", key=key, tagged=False)


def _deepseek(template: str, marks: Marks) -> NamedCalls:
    begin, between, end = map(marks, _DEEPSEEK)
    section = marks(_DEEPSEEK_SECTION[0]), marks(_DEEPSEEK_SECTION[1])
    if "```json" in template:  # V3 and R1; V3.1 has neither the word nor the fence
        return NamedCalls(begin, end, f"function{between}", "\n```json\n", "\n```", section)
    return NamedCalls(begin, end, after=between, section=section)


def _mistral(marks: Marks) -> NamedCalls:
    marks("[CALL_ID]")  # some versions have it between the name and the arguments
    return NamedCalls(marks("[TOOL_CALLS]"), after=marks("[ARGS]"))


def _kimi(marks: Marks) -> NamedCalls:
    begin, after, end = (
        marks(f"<|{name}|>") for name in ("tool_call_begin", "tool_call_argument_begin", "tool_call_end")
    )
    section = marks(_KIMI_SECTION[0]), marks(_KIMI_SECTION[1])
    return NamedCalls(begin, end, "functions.", f":0{after}", section=section)


def _qwen_coder(marks: Marks) -> TaggedCalls:
    return TaggedCalls(
        marks("<tool_call>"),
        marks("</tool_call>"),
        name=("<function=", ">\n"),
        key=("<parameter=", ">"),
        value=("\n", "\n</parameter>"),
        close="</function>",
    )


def _glm(marks: Marks) -> TaggedCalls:
    return TaggedCalls(
        marks("<tool_call>"),
        marks("</tool_call>"),
        name=("", "\n"),
        key=(marks("<arg_key>"), marks("</arg_key>")),
        value=(marks("\n<arg_value>"), marks("</arg_value>")),
    )
