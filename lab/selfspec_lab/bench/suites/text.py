"""Passages of a long text, cut by tokens, to be continued."""

from dataclasses import dataclass
from pathlib import Path

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites.files import read_text
from selfspec_lab.bench.suites.selection import Selection
from selfspec_lab.bench.suites.types import Encode, Question

PASSAGES = 8
"""Default number of passages of a text."""


@dataclass(frozen=True)
class TextPart:
    """A text whose passages are prompts.

    Attributes:
        path: the file.
        text: its contents.
        selection: number of passages (``PASSAGES`` without a limit) and their places.
        chat: always false: passages are to be continued, not answered.
    """

    path: Path
    text: str
    selection: Selection
    chat: bool = False

    def questions(self, encode: Encode, context: int) -> tuple[Question, ...]:
        """Passages of exactly ``context`` tokens without overlap; fewer if the text is short.

        Each begins with the tokens that the tokenizer puts before a text (BOS for many models), as some models need
        them to write sensible text.

        Raises:
            InvalidParameterError: the text is shorter than a passage, or ``context`` has no place for text.
        """
        prefix = shared_prefix(encode)
        length = context - len(prefix)
        if length < 1:
            raise InvalidParameterError(
                f"a context of {context} tokens leaves no place for text after the {len(prefix)} that the tokenizer "
                "starts with; choose a longer context"
            )
        tokens = encode(self.text)[len(prefix) :]
        count = min(self.selection.limit or PASSAGES, len(tokens) // length)
        if count == 0:
            raise InvalidParameterError(
                f"'{self.path}' has {len(prefix) + len(tokens)} tokens, which is shorter than a passage of {context}; "
                "choose a shorter context or a longer text"
            )
        starts = self.selection.places(len(tokens), length, count)
        stem = self.path.stem
        return tuple(
            Question(f"{stem}-{number}", stem, token_ids=(*prefix, *tokens[start : start + length]))
            for number, start in enumerate(starts, 1)
        )


def text_part(path: Path, selection: Selection) -> TextPart:
    """Reads a text file.

    Raises:
        InvalidParameterError: the file cannot be read, is not UTF-8, or holds no text.
    """
    text = read_text(path)
    if not text.strip():
        raise InvalidParameterError(f"'{path}' is empty; give a text of at least one passage")
    return TextPart(path, text, selection)


def shared_prefix(encode: Encode) -> list[int]:
    """The tokens that every text starts with: the common prefix of two different texts."""
    shared = []
    for one, other in zip(encode("a"), encode("5"), strict=False):
        if one != other:
            break
        shared.append(one)
    return shared
