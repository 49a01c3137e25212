"""Where two texts diverge: the first token that differs, and by how much it was the more probable one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from selfspec_lab.conformance.answer import Answer, Token
from selfspec_lab.conformance.interfaces import Prompt

_SHOWN = 24
"""Characters of a text from where it differs, where its tokens are not known."""


@dataclass(frozen=True)
class Divergence:
    """Two answers to one request that are not the same.

    Attributes:
        prompt: the text or messages.
        expected: the text that was expected.
        found: the text that came.
        place: characters that they have in common.
        token: index of the first differing token; ``None`` if the server gives no log-probabilities, or if it did not
            repeat one of the texts when asked for them.
        expected_token: the token of the text that was expected, or the next characters if it is not known; empty at
            the end of the text.
        found_token: the same of the text that came.
        margin: log-probability of ``expected_token`` less that of ``found_token``, as the server gives them with the
            common text before them; ``None`` if it does not give both.
    """

    prompt: Prompt
    expected: str
    found: str
    place: int
    token: int | None
    expected_token: str
    found_token: str
    margin: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dict(vars(self))


def find_divergence(prompt: Prompt, expected: str, found: str, scored: Answer | None) -> Divergence | None:
    """Compares two texts.

    Args:
        prompt: what both answer.
        expected: a text.
        found: another text.
        scored: an answer to the same request with log-probabilities, if there is one.

    Returns:
        Their divergence, ``None`` if they are the same.
    """
    if expected == found:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    place = next((index for index, (one, other) in pairs if one != other), min(len(expected), len(found)))
    spans = _spans(scored, expected, found, place)
    if spans is None:
        return Divergence(prompt, expected, found, place, None, *_rests(expected, found, place), None)
    scores_expected = expected.startswith(spans[-1].token.text, spans[-1].start)
    index, own, other, margin = _compare(spans, found if scores_expected else expected, place)
    if scores_expected:
        return Divergence(prompt, expected, found, place, index, own, other, margin)
    return Divergence(prompt, expected, found, place, index, other, own, None if margin is None else -margin)


class _Span(NamedTuple):
    """A token, and where it starts in its text."""

    token: Token
    start: int


def _spans(scored: Answer | None, expected: str, found: str, place: int) -> list[_Span] | None:
    """The tokens up to the one that has the first differing character; ``None`` if ``scored`` has neither text."""
    start, spans = 0, []
    for token in scored.tokens or () if scored is not None else ():
        spans.append(_Span(token, start))
        if not any(text.startswith(token.text, start) for text in (expected, found)):
            return None  # the server wrote a third text, or does not name tokens by their texts
        start += len(token.text)
        if start > place:
            return spans
    return None  # that text ended where the other one goes on


def _compare(spans: Sequence[_Span], other: str, place: int) -> tuple[int, str, str, float | None]:
    """Index of the first differing token, the scored one, the other text's, and their margin.

    The other text's is the most probable token that it goes on with. If there is none, it may have begun before, as
    ``and`` instead of ``an``, ``d``.
    """
    for index in range(len(spans) - 1, -1, -1):
        token, start = spans[index]
        least = 1 if index == len(spans) - 1 else place + 1 - start
        fitting = [
            (text, logprob)
            for text, logprob in token.alternatives
            if text != token.text and len(text) >= least and other.startswith(text, start)
        ]
        if fitting:
            text, logprob = max(fitting, key=lambda each: each[1])
            return index, token.text, text, token.logprob - logprob
    token, start = spans[-1]
    return len(spans) - 1, token.text, other[start : start + _SHOWN], None


def _rests(expected: str, found: str, place: int) -> tuple[str, str]:
    return expected[place : place + _SHOWN], found[place : place + _SHOWN]
