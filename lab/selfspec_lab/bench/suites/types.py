"""Questions and suites."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Encode = Callable[[str], list[int]]
"""Token ids of a text, with the tokens that the tokenizer puts before a prompt."""


@dataclass(frozen=True)
class Question:
    """One question of a suite.

    Attributes:
        key: unique in the suite: ``math-3``, ``81``, ``HumanEval/0``.
        category: group of the results: ``math``, a category of Spec-Bench, the stem of a text's file name.
        turns: the user's texts, in order; most questions have one.
        token_ids: the prompt, if it was cut by tokens; ``turns`` is then empty.
        messages: the user's messages in a chat, one per turn; if empty, the ``turns``.
        answer: the answer that the data set has to the first turn, for examples before other questions; may be empty.
    """

    key: str
    category: str
    turns: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    messages: tuple[str, ...] = ()
    answer: str = ""


@dataclass(frozen=True)
class Suite:
    """An ordered collection of questions.

    Attributes:
        name: the spec without folders: ``spec-bench:spec_bench.jsonl``.
        questions: in the order of the file or the stream.
        ordered: whether it is a stream, whose order matters.
        chat: whether all questions are chat messages. Otherwise some are beginnings of a text; in a chat, the message
            asks the model to continue it.
    """

    name: str
    questions: tuple[Question, ...]
    ordered: bool
    chat: bool


class Part(Protocol):
    """A group of questions, checked; some need a tokenizer to become prompts."""

    @property
    def chat(self) -> bool:
        """Whether turns are chat messages."""

    def questions(self, encode: Encode, context: int) -> tuple[Question, ...]:
        """The questions.

        Args:
            encode: the model's tokenizer.
            context: length of a passage of ``text:FILE``, in tokens.
        """


@dataclass(frozen=True)
class ReadyPart:
    """Questions that need no tokenizer.

    Attributes:
        ready: the questions.
        chat: whether their turns are chat messages.
    """

    ready: tuple[Question, ...]
    chat: bool = False

    def questions(self, encode: Encode, context: int) -> tuple[Question, ...]:
        """The questions."""
        return self.ready
