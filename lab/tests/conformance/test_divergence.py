"""The first differing token of two texts, and its margin."""

import pytest

from selfspec_lab.conformance.answer import Answer, Token
from selfspec_lab.conformance.divergence import find_divergence


def scored(*tokens: tuple[str, float, dict[str, float]]) -> Answer:
    """An answer whose tokens have a log-probability and those of others."""
    made = tuple(Token(text, logprob, tuple(others.items())) for text, logprob, others in tokens)
    return Answer("".join(token.text for token in made), "length", made)


ONE = scored((" a", -0.1, {}), (" red", -0.5, {" red": -0.5, " blue": -0.75, " bl": -3.0}), (" cat", -0.1, {}))
SPLIT = scored((" an", -0.5, {" and": -1.5, " a": -2.0}), ("d", -0.1, {"t": -0.2}), (" so", -0.1, {}))


@pytest.mark.parametrize(
    ("expected", "found", "answer", "known"),
    [
        (" a red cat", " a blue cat", ONE, (1, " red", " blue", 0.25)),
        (" a blue cat", " a red cat", ONE, (1, " blue", " red", -0.25)),  # the server repeats what came, not the other
        (" a red cat", " a green cat", ONE, (1, " red", " green cat", None)),  # not among the alternatives
        (" a red cat", " a red", ONE, (2, " cat", "", None)),  # the text that came ends
        (" a red", " a red cat", ONE, (2, "", " cat", None)),
        (" ant so", " and so", SPLIT, (1, "t", "d", 0.1 - 0.2)),
        (" and so", " another", SPLIT, (1, "d", "other", None)),
        (
            " an",
            " and",
            scored((" an", -0.5, {" and": -1.5})),
            (None, "", "d", None),
        ),  # it ended
        (" a red cat", " a blue cat", scored((" the", -0.5, {})), (None, "red cat", "blue cat", None)),  # a third text
        (" a red cat", " a blue cat", None, (None, "red cat", "blue cat", None)),
    ],
)
def test_the_first_differing_token(
    expected: str, found: str, answer: Answer | None, known: tuple[int | None, str, str, float | None]
) -> None:
    divergence = find_divergence("prompt", expected, found, answer)
    assert divergence is not None
    assert (divergence.token, divergence.expected_token, divergence.found_token) == known[:3]
    assert divergence.margin == (None if known[3] is None else pytest.approx(known[3]))


def test_a_token_that_begins_before_the_first_differing_character() -> None:
    """``an``, ``t`` and ``and`` first differ in their tokens at ``an``, in their characters after it."""
    answer = scored((" an", -0.5, {" and": -1.5}), ("t", -0.1, {"s": -0.2}))
    divergence = find_divergence("prompt", " ant", " and", answer)
    assert divergence is not None
    assert (divergence.place, divergence.token) == (3, 0)
    assert (divergence.expected_token, divergence.found_token, divergence.margin) == (" an", " and", 1.0)


def test_equal_texts() -> None:
    assert find_divergence("prompt", " a red cat", " a red cat", ONE) is None
