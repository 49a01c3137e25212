"""Passages of a long text, cut by tokens: continuation at a chosen context length."""

from dataclasses import dataclass
from pathlib import Path

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites.files import read_text
from selfspec_lab.bench.suites.selection import Selection
from selfspec_lab.bench.suites.types import Encode, Question

PASSAGES = 8
"""Passages of a text where no limit says how many."""


@dataclass(frozen=True)
class TextPart:
    """A text whose passages are prompts.

    Attributes:
        path: its file.
        text: what is in it.
        selection: how many passages, ``PASSAGES`` without a limit, and where they lie.
        chat: passages are to be continued, not answered.
    """

    path: Path
    text: str
    selection: Selection
    chat: bool = False

    def questions(self, encode: Encode, context: int) -> tuple[Question, ...]:
        """Passages of exactly ``context`` tokens that do not overlap, fewer where the text has no more.

        Each begins like a prompt of its own, with the tokens that the tokenizer puts before a text (BOS for many
        models): some models write nonsense without them, and then nothing measured means anything.

        Raises:
            InvalidParameterError: the text is shorter than a passage, or a passage has no room for text.
        """
        prefix = _prefix(encode)
        length = context - len(prefix)
        if length < 1:
            raise InvalidParameterError(
                f"a context of {context} tokens leaves no room for text behind the {len(prefix)} that the tokenizer "
                "begins with; choose a longer one"
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
    """A text file, to be cut once there is a tokenizer.

    Raises:
        InvalidParameterError: the file cannot be read, is not UTF-8, or holds no text.
    """
    text = read_text(path)
    if not text.strip():
        raise InvalidParameterError(f"'{path}' is empty; give a text of at least one passage")
    return TextPart(path, text, selection)


def _prefix(encode: Encode) -> list[int]:
    """The tokens that every text begins with, found as what two texts without a common beginning share."""
    shared = []
    for one, other in zip(encode("a"), encode("5"), strict=False):
        if one != other:
            break
        shared.append(one)
    return shared
