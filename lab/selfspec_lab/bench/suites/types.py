"""What a suite is: questions in order, each with the prompts that make it up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Encode = Callable[[str], list[int]]
"""Token ids of a text, with whatever the tokenizer begins a prompt with."""


@dataclass(frozen=True)
class Question:
    """One question of a suite.

    Attributes:
        key: unique in the suite: ``math-3``, ``81``, ``HumanEval/0``.
        category: what results are grouped by: ``math``, a category of Spec-Bench, the stem of a text's file name.
        turns: what the user says, in order; most questions have one turn.
        token_ids: the prompt, where it was cut by tokens; ``turns`` is empty then.
        messages: what the user says in a chat instead, as many; where it is empty, the ``turns``.
    """

    key: str
    category: str
    turns: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """Questions to measure on.

    Attributes:
        name: the spec it was read from, without folders: ``spec-bench:spec_bench.jsonl``.
        questions: in the order of the file or the stream.
        ordered: whether it is a stream, whose order means something.
        chat: whether all questions were written as chat messages. Otherwise some are beginnings of a text that the
            model goes on with; in a chat, the user asks for that.
    """

    name: str
    questions: tuple[Question, ...]
    ordered: bool
    chat: bool


class Part(Protocol):
    """A run of questions, checked; some need a tokenizer to become prompts."""

    @property
    def chat(self) -> bool:
        """Whether turns were written as chat messages."""

    def questions(self, encode: Encode, context: int) -> tuple[Question, ...]:
        """The questions.

        Args:
            encode: the tokenizer of the model.
            context: length of a passage of ``text:FILE``, in tokens.
        """


@dataclass(frozen=True)
class ReadyPart:
    """Questions that are text already.

    Attributes:
        ready: the questions.
        chat: whether their turns were written as chat messages.
    """

    ready: tuple[Question, ...]
    chat: bool = False

    def questions(self, encode: Encode, context: int) -> tuple[Question, ...]:
        """The questions, whatever the tokenizer."""
        return self.ready
