"""The format of gpt-oss: every message has a channel; reasoning is on one, calls are messages to a function."""

import re
from dataclasses import dataclass

from selfspec.serve.formats.lark import Rules, object_schema
from selfspec.serve.formats.marks import Marks
from selfspec.serve.formats.scanner import Scanner, Steps

_NAME = re.compile(r"to=functions\.([\w.-]+)")


@dataclass(frozen=True)
class Harmony:
    """Messages of an answer; all marks are tokens.

    Attributes:
        marks: of the tokenizer.
    """

    marks: Marks

    def read(self, scan: Scanner) -> Steps[None]:
        """Reads the messages of an answer, after ``<|start|>assistant``."""
        channel, message, *ends = (
            self.marks(name)
            for name in ("<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>")
        )
        found = yield from scan.until((channel, message, *ends), scan.text)
        while found:
            header: list[str] = []
            if found != message:
                found = yield from scan.until((message, *ends[:3]), header.append)
            if found != message:
                found = (yield from scan.until((channel, message, *ends), scan.text)) if found else ""
                continue
            head = "".join(header)
            call = _NAME.search(head)
            if call is not None:
                scan.begin_call(call[1])
                give = scan.arguments
            else:
                give = scan.reasoning if _channel(head, channel) == "analysis" else scan.text
            found = yield from scan.until((*ends, channel), give)
            if found and call is not None:
                scan.end_call()
            if give == scan.reasoning:
                scan.end_reasoning()

    def rule(self, rules: Rules, scan: Scanner, *, parallel: bool) -> str:
        """The rule of a call."""
        return rules.one_of(
            f"{rules.text(self.marks(f'<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>'))} "
            f"{rules.json(object_schema(schema))}"
            for name, schema in scan.tools.items()
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


def _channel(header: str, mark: str) -> str:
    """The channel of a message, by its header after ``<|start|>`` or ``<|channel|>``."""
    words = header.rpartition(mark)[2].split()
    return words[0] if words else ""
