"""Drafts that copy what followed an earlier occurrence. Shared by ``prompt-lookup`` and ``suffix``."""

from collections.abc import Sequence
from typing import NamedTuple

from selfspec.decoding.draft import Draft, NoDraft, TokenDraft
from selfspec.sampling.tree import TokenTree


class Match(NamedTuple):
    """The longest suffix of a text, or of a text and drafted tokens after it, that occurs in the text before.

    Attributes:
        length: of the suffix, in tokens; 0 if none occurs.
        end: the position in the text after the occurrence.
    """

    length: int
    end: int


def continuation(tokens: Sequence[int], start: int, count: int, drafted: Sequence[int] = ()) -> list[int]:
    """The tokens that followed an earlier occurrence of the text's suffix.

    If the text ends before ``count`` tokens are copied, the copy repeats: the text is then likely to be periodic, with
    the distance of the suffix to its earlier occurrence as the period.
    """
    piece = [*tokens[start : start + count], *drafted][:count]
    repeats = -(-count // len(piece))
    return (piece * repeats)[:count]


def chain_draft(tokens: Sequence[int]) -> Draft:
    """A draft of successive tokens; ``NoDraft`` for an empty sequence."""
    return TokenDraft(tuple(tokens), TokenTree.chain(len(tokens))) if tokens else NoDraft()
