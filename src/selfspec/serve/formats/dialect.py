"""How one model answers: what its chat template takes, and what the text of an answer means."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from selfspec.constraint import Constraint
from selfspec.serve.formats.calls import CallFormat
from selfspec.serve.formats.choose import Thinking, choose_calls, choose_thinking
from selfspec.serve.formats.harmony import Harmony
from selfspec.serve.formats.lark import Rules
from selfspec.serve.formats.marks import Marks
from selfspec.serve.formats.scanner import Scanner, Steps, Tools
from selfspec.text_encoder import template_of

_KEY, _SAID = "argument", "what was said"

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that templates have for the reasoning of a message."""

_KNOWN = ("tools", "reasoning_effort", "enable_thinking", *REASONING)
"""Variables of templates, and keys of messages, that a template may read."""


@dataclass(frozen=True)
class Asked:
    """What a chat asks of the form of its answer.

    Attributes:
        tools: those that may be called.
        must_call: whether one has to be.
        parallel: whether several may be.
        strict: whether calls have to follow the schemas of the tools, though none has to be made.
        form: what the text of the answer has to be.
    """

    tools: Tools
    must_call: bool = False
    parallel: bool = True
    strict: bool = False
    form: Constraint | None = None


class Dialect:
    """How a model writes calls and reasoning, by its tokenizer's chat template.

    Args:
        tokenizer: of the model.

    Attributes:
        short_ids: whether the template takes ids of calls of nine characters alone, as Mistral's do.
        arguments_as_text: whether it adds the arguments of calls to texts, and does not write an object as JSON itself.
        takes_system: whether it writes a system message that is the first one, which Gemma 2's refuses.
        takes_late_system: whether it writes one that is not.
        alternates: whether it takes no message of the user after another one, as Mistral's and Gemma's.
        takes_several_calls: whether it writes two calls of a message; Llama 3's refuses them, gpt-oss's drops one.
        text_or_reasoning: whether it takes no text and reasoning together in a message with calls, as that of gpt-oss.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._marks = tokenizer, Marks(tokenizer)
        self.template = template_of(tokenizer)
        self._reads = _names_in(self.template)
        self._calls = choose_calls(self.template, self._marks)
        self._thinking = choose_thinking(self.template, self._marks)
        self.short_ids = "[TOOL_CALLS]" in self.template
        one, two = (_render(tokenizer, [{"role": "user", "content": "a"}] * count) for count in (1, 2))
        self.alternates = one is not None and two is None
        self.takes_system = one is None or _takes_system(tokenizer)  # some take no chat without tools
        self.takes_late_system = _takes_system(tokenizer, "system", "user", "assistant")
        self.arguments_as_text = not _writes(tokenizer, {_KEY: 1}) and _writes(tokenizer, json.dumps({_KEY: 1}))
        arguments = json.dumps({_KEY: 1}) if self.arguments_as_text else {_KEY: 1}
        none, one, two = (_render(tokenizer, _calling(arguments, count)) for count in range(3))
        self.takes_several_calls = one in (None, none) or two not in (None, one)
        said = ({"content": "a"}, {"content": "a", **dict.fromkeys(REASONING, "b")})
        text, both = (_render(tokenizer, _calling(arguments, more=each)) for each in said)
        self.text_or_reasoning = both is None and text is not None

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable, or a key of messages."""
        return name in self._reads

    def is_thinking(self, prompt: Sequence[int], prefilled: str = "") -> bool:
        """Whether an answer begins within reasoning: the prompt, or the beginning of the answer in it, begins it."""
        if self._thinking is None:
            return False
        begin, end = self._thinking.names
        return prefilled.rfind(begin) > prefilled.rfind(end) or self._end_of(prompt).endswith(begin)

    def reader(self, asked: Asked, *, thinks: bool) -> Scanner | None:
        """Reads an answer; ``None`` where its text is all there can be."""
        if not asked.tools and self._thinking is None and not isinstance(self._calls, Harmony):
            return None
        scan = Scanner(self._marks, asked.tools, parallel=asked.parallel)
        scan.begin(_read_answer(scan, self._calls, self._thinking, thinks=thinks))
        return scan

    def constraint(self, asked: Asked, prompt: Sequence[int], *, thinks: bool) -> Constraint | None:
        """What the output has to be, calls and reasoning included; ``None`` for any text."""
        if asked.form is None and not asked.must_call and not asked.strict:
            return None
        rules, calls, thinking = Rules(self._marks), self._calls, self._thinking
        if asked.form is not None and not asked.tools and thinking is None and not isinstance(calls, Harmony):
            return asked.form
        bodies = []
        if asked.form is not None and not asked.must_call:
            body = _form(rules, asked.form)
            bodies.append(calls.final(rules, body) if isinstance(calls, Harmony) else body)
        if asked.tools:
            rule = calls.rule(rules, asked.tools, parallel=asked.parallel)
            bodies.append(rule if asked.must_call or asked.form is not None else self._among_text(rules, rule, asked))
        start = rules.one_of(bodies)
        if isinstance(calls, Harmony):
            start = f"{calls.thinking(rules)}? {start}"
        elif thinking is not None and thinks:
            start = f"{rules.up_to(thinking.end)} {rules.space()} {start}"
        elif thinking is not None and not self._end_of(prompt).endswith(thinking.names[1]):
            start = f"({rules.text(thinking.begin)} {rules.up_to(thinking.end)} {rules.space()})? {start}"
        return Constraint("grammar", _with_form(rules.whole(start), asked.form))

    def _among_text(self, rules: Rules, calls: str, asked: Asked) -> str:
        """The rule of any text with calls in it."""
        return rules.add(f"{rules.any()} ({calls} {rules.any()}){'*' if asked.parallel else '?'}")

    def can_be_strict(self) -> bool:
        """Whether calls can be told from the text before them by a token, so that they alone can follow a grammar."""
        calls = self._calls
        return not isinstance(calls, Harmony) and bool(calls.openers) and self._marks.is_mark(calls.openers[0][:1])

    def _end_of(self, prompt: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False)).rstrip()


def _read_answer(scan: Scanner, calls: CallFormat | Harmony, thinking: Thinking | None, *, thinks: bool) -> Steps[None]:
    """Reads an answer into parts; ``thinks`` says that it begins within reasoning."""
    if isinstance(calls, Harmony):
        yield from calls.read(scan)
        return
    if thinking is not None:
        yield from _read_thinking(scan, thinking, thinks=thinks)
    openers: Sequence[str] = ()
    silent: Sequence[str] = ()
    if scan.tools:
        openers, silent = calls.openers, calls.silent
        if calls.bare:
            yield from scan.attempt(calls.read(scan, ""))
    while found := (yield from scan.until((*openers, *silent), scan.text)):
        if found in openers:
            yield from scan.attempt(calls.read(scan, found), found)


def _read_thinking(scan: Scanner, thinking: Thinking, *, thinks: bool) -> Steps[None]:
    """Reads the reasoning that an answer begins with, if it does."""
    blank = yield from scan.space()
    begun = yield from scan.accept(thinking.begin)  # some write it though the prompt ends with it
    if not begun and not thinks:
        scan.text(blank)
        return
    scan.thinking = True
    yield from scan.until((thinking.end,), scan.reasoning)
    scan.end_reasoning()


def _form(rules: Rules, form: Constraint) -> str:
    """The rule of a text that has a form."""
    if form.kind == "json_schema":
        return rules.add(rules.json(json.loads(form.text)))
    if form.kind == "regex":
        return rules.regex(form.text)
    return "@form"


def _with_form(grammar: str, form: Constraint | None) -> str:
    """The grammar together with the one of the answer's form that it names."""
    if form is None or form.kind != "grammar":
        return grammar
    return json.dumps({"grammars": [{"lark_grammar": grammar}, {"name": "form", "lark_grammar": form.text}]})


def _takes_system(tokenizer: PreTrainedTokenizerBase, *before: str) -> bool:
    """Whether the chat template writes a system message after others; some refuse it, or leave out one of two."""
    turns = [(role, f"{_SAID} {index}") for index, role in enumerate((*before, "system", "user"))]
    text = _render(tokenizer, [{"role": role, "content": said} for role, said in turns])
    return text is not None and all(said in text for role, said in turns if role == "system")


def _writes(tokenizer: PreTrainedTokenizerBase, arguments: object) -> bool:
    """Whether the chat template can write the arguments of a call, given in this form, and not in Python's notation."""
    text = _render(tokenizer, _calling(arguments))
    return text is not None and f"'{_KEY}'" not in text


def _calling(arguments: object, count: int = 1, more: Mapping[str, str] | None = None) -> list[Any]:
    """A chat with calls of a tool, and more in their message."""
    call = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", **(more or {}), "tool_calls": [call] * count}
    return [{"role": "user", "content": "a"}, answer]


def _render(tokenizer: PreTrainedTokenizerBase, chat: list[Any]) -> str | None:
    """The text of a chat; ``None`` for one that the template refuses."""
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # templates raise whatever they like
        return None


def _names_in(template: str) -> set[str]:
    """Names of the variables and keys that a template reads, of those that matter here."""
    try:
        variables = meta.find_undeclared_variables(Environment().parse(template))
    except TemplateError:  # a template with extensions of transformers; its words have to do
        variables = set(_KNOWN)
    keys = {name for name in _KNOWN if name in template}
    return keys & (variables | {*REASONING})
