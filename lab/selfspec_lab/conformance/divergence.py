"""Where two texts diverge: the first token that differs, and by how much it was the more probable one."""

from dataclasses import dataclass
from typing import Any

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
    known = _locate(expected, found, place, scored)
    if known is None:
        rest = expected[place : place + _SHOWN], found[place : place + _SHOWN]
        return Divergence(prompt, expected, found, place, None, *rest, None)
    return Divergence(prompt, expected, found, place, *known)


def _locate(expected: str, found: str, place: int, scored: Answer | None) -> tuple[int, str, str, float | None] | None:
    """Index of the first differing token, both tokens, and their margin; ``None`` if ``scored`` has it not."""
    start = 0
    for index, token in enumerate(scored.tokens or () if scored is not None else ()):
        if start + len(token.text) > place:
            return _compare(index, token, expected[start:], found[start:])
        if expected[start : start + len(token.text)] != token.text:
            return None  # the server wrote a third text, or does not name tokens by their texts
        start += len(token.text)
    return None


def _compare(index: int, token: Token, expected: str, found: str) -> tuple[int, str, str, float | None] | None:
    """As ``_locate``: a token that one of the texts goes on with, and the token of the other one."""
    follows = expected.startswith(token.text)
    if not follows and not found.startswith(token.text):
        return None
    other = found if follows else expected
    fitting = [each for each in token.alternatives if each[0] and each[0] != token.text and other.startswith(each[0])]
    text, logprob = max(fitting, key=lambda each: each[1], default=(other[:_SHOWN], None))
    gap = None if logprob is None else token.logprob - logprob
    if follows:
        return index, token.text, text, gap
    return index, text, token.text, None if gap is None else -gap
