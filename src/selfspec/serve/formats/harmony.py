"""The format of gpt-oss: every message has a channel; reasoning is on one, calls are messages to a function."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.serve.formats.lark import Rules, object_schema
from selfspec.serve.formats.marks import Marks
from selfspec.serve.formats.scanner import Scanner, Steps, Tools

_RECIPIENT = "to="
_NAME = re.compile(rf"{_RECIPIENT}(functions\.)?([\w.-]{{1,128}})", re.ASCII)


@dataclass(frozen=True)
class Harmony:
    """Messages of an answer; all marks are tokens.

    Attributes:
        marks: of the tokenizer.
    """

    marks: Marks

    def read(self, scan: Scanner) -> Steps[None]:
        """Reads the messages of an answer, after ``<|start|>assistant``, which the recipient of a call may follow."""
        channel, message, *ends = (
            self.marks(name)
            for name in ("<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>")
        )
        found, header = yield from _begin(scan, channel, message, ends)
        while found:
            if found != message:
                header += [found] if found == channel else []
                found = yield from scan.until((message, *ends[:3]), header.append)
            head, header = "".join(header), []
            if found != message:
                found = (yield from scan.until((channel, message, *ends), scan.text)) if found else ""
                continue
            name = _called(head, scan)
            if name is not None:
                scan.begin_call(name)
                give = scan.arguments
            else:
                give = scan.reasoning if _channel(head, channel) == "analysis" else scan.text
            found = yield from scan.until((*ends, channel), give)
            if found and name is not None:
                scan.end_call()
            if give == scan.reasoning:
                scan.end_reasoning()

    def rule(self, rules: Rules, tools: Tools, *, parallel: bool) -> str:
        """The rule of a call."""
        return rules.one_of(
            f"{rules.text(self.marks(f'<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>'))} "
            f"{rules.json(object_schema(schema))}"
            for name, schema in tools.items()
        )

    def final(self, rules: Rules, body: str) -> str:
        """The rule of an answer without calls."""
        return f"{rules.text(self.marks('<|channel|>final<|message|>'))} {body}"

    def thinking(self, rules: Rules) -> str:
        """The rule of reasoning and of how the message after it begins."""
        analysis = rules.text(self.marks("<|channel|>analysis<|message|>"))
        return rules.add(
            f"{analysis} {rules.up_to(self.marks('<|end|>'))} {rules.text(self.marks('<|start|>assistant'))}"
        )


def _begin(scan: Scanner, channel: str, message: str, ends: Sequence[str]) -> Steps[tuple[str, list[str]]]:
    """Reads up to the first mark; returns it with the header before it: the recipient, where the answer begins so."""
    header = [(yield from scan.space()), (yield from scan.accept(_RECIPIENT))]
    if not header[-1]:
        scan.text(header[0])
        return (yield from scan.until((channel, message, *ends), scan.text)), []
    found = yield from scan.until((channel, message, *ends), header.append)
    if found in (channel, message):
        return found, header
    scan.text("".join(header))
    return found, []


def _called(header: str, scan: Scanner) -> str | None:
    """The tool that a message is for, by its header; a name without ``functions.`` is one if it is offered."""
    found = _NAME.search(header)
    return found[2] if found is not None and (found[1] or found[2] in scan.tools) else None


def _channel(header: str, mark: str) -> str:
    """The channel of a message, by its header after ``<|start|>`` or ``<|channel|>``."""
    words = header.rpartition(mark)[2].split()
    return words[0] if words else ""
