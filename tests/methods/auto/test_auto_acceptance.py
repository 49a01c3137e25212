"""How likely ``auto`` takes a draft token to be accepted."""

from functools import reduce
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.decoding.suffixes import Match, continuation
from selfspec.errors import StateError
from selfspec.planning.acceptance_tables import (
    CONFIDENCE,
    MATCH_LENGTH,
    AcceptanceRate,
    Feature,
    Lookup,
    LookupToAppend,
    LookupToConfirm,
)

TWO = Feature(edges=(0.5,), prior=(0.2, 0.8))


@pytest.mark.parametrize("feature", [CONFIDENCE, MATCH_LENGTH])
def test_more_confidence_and_longer_matches_promise_more(feature: Feature) -> None:
    assert list(feature.edges) == sorted(feature.edges)
    assert list(feature.prior) == sorted(feature.prior)
    assert [feature.bucket(edge) for edge in feature.edges] == list(range(1, len(feature.prior)))


def test_acceptance_goes_from_its_prior_to_what_was_seen() -> None:
    shared = AcceptanceRate(TWO)
    assert (shared.rate(0), shared.rate(1)) == (0.2, 0.8)
    for _ in range(200):
        shared.note(False, 1)
    assert shared.rate(1) < 0.02
    assert shared.rate(0) == 0.2


def test_a_request_counts_its_own_tokens_more_than_all_others() -> None:
    shared = AcceptanceRate(TWO)
    for _ in range(300):
        shared.note(True, 0)
    request, other = shared.of_request(), shared.of_request()
    for _ in range(20):
        request.note(False)
    assert request.rate() < 0.3
    assert other.rate() > 0.85
    request.fade(1.0)
    assert request.rate() == other.rate()


def test_old_tokens_are_forgotten() -> None:
    request = AcceptanceRate(TWO).of_request(weight=0.01, memory=10)
    for accepted in [True] * 50 + [False] * 30:
        request.note(accepted)
    assert request.rate() < 0.1


def test_what_was_learned_is_loaded_again() -> None:
    shared, again = AcceptanceRate(TWO), AcceptanceRate(TWO)
    for accepted in (True, True, False):
        shared.note(accepted, 1)
    again.restore(shared.to_lists())
    assert again.to_lists() == shared.to_lists()


@pytest.mark.parametrize(
    "damaged", [None, [], [[1.0]], [[1, 1], [2, 0]], [["a", 1], [1, 1]], [[0, 0], [0, 0]], [[1], [1]]]
)
def test_damaged_states_are_refused(damaged: object) -> None:
    with pytest.raises(StateError, match="damaged"):
        AcceptanceRate(TWO).restore(damaged)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), max_size=30))
def test_every_token_of_the_text_scores_lookup(prompt: list[int], output: list[int]) -> None:
    shared = AcceptanceRate(MATCH_LENGTH)
    lookup = Lookup(prompt, shared.of_request())
    expected = AcceptanceRate(MATCH_LENGTH)
    text = list(prompt)
    for token in output:
        match = longest_match(text)
        assert lookup.match_length == match
        if match:
            assert any(lookup.tokens(lookup.match_after(), 1) == [text[end]] for end in ends(text, match))
            expected.note(lookup.tokens(lookup.match_after(), 1) == [token], match)
        text.append(token)
        lookup.extend([token])
    assert shared.to_lists() == expected.to_lists()


def longest_match(text: list[int]) -> int:
    """Length of the longest suffix that has occurred before, the slow way."""
    return max((length for length in range(len(text)) if ends(text, length)), default=0)


def ends(text: list[int], length: int) -> list[int]:
    """The positions after earlier occurrences of the text's suffix of a length."""
    suffix = text[len(text) - length :]
    return [end for end in range(length, len(text)) if text[end - length : end] == suffix]


def test_the_probability_of_copied_tokens_falls_with_their_number() -> None:
    lookup = Lookup([1, 2, 3, 4, 1, 2, 3], AcceptanceRate(MATCH_LENGTH).of_request())
    survival = lookup.survival(lookup.match_after(), 4)
    assert lookup.match_length == 3
    prior = MATCH_LENGTH.prior
    assert survival == pytest.approx(
        [prior[2], prior[2] * prior[3], prior[2] * prior[3] * prior[4], prior[2] * prior[3] * prior[4] ** 2]
    )
    assert lookup.tokens(lookup.match_after(), 4) == [4, 1, 2, 3] == continuation([1, 2, 3, 4, 1, 2, 3], 3, 4)
    assert without_match([1, 2, 3]) == []


def without_match(text: list[int]) -> list[float]:
    lookup = Lookup(text, AcceptanceRate(MATCH_LENGTH).of_request())
    return lookup.survival(lookup.match_after(), 4)


@given(st.integers(1, 40), st.integers(0, 32))
def test_what_is_hardly_likely_is_left_out(match: int, count: int) -> None:
    acceptance = AcceptanceRate(MATCH_LENGTH).of_request()
    lookup = Lookup([0], acceptance)
    survival = lookup.survival(Match(match, 0), count)
    every = list(accumulate((acceptance.rate(match + copied) for copied in range(count)), mul))
    assert survival == pytest.approx([probability for probability in every if probability >= 0.02])
    assert not lookup.survival(Match(0, 0), count)


SECONDS = st.lists(st.floats(0.5, 2.0), min_size=36, max_size=36).map(lambda seconds: (0.0, *seconds))


@given(SECONDS, st.floats(0.1, 3.0), st.floats(0.3, 0.99), st.lists(st.floats(0.3, 1.0), min_size=1, max_size=9))
def test_as_many_tokens_follow_a_draft_as_are_worth_most(
    verify: tuple[float, ...], rate: float, acceptance: float, confidences: list[float]
) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    drafted = text[: len(confidences)]
    lookup = Lookup(text, AcceptanceRate(Feature((), (acceptance,))).of_request())
    confirm, longest = LookupToConfirm(lookup, (0.0, *[0.1] * 36), 0.0), 0.1 * len(drafted) + 1.6
    appended = LookupToAppend(lookup, confirm, lambda confidence: confidence, verify, rate, longest)(
        drafted, confidences
    )
    right, rows = reduce(mul, confidences), 1 + len(drafted)

    def worth(count: int) -> float:
        return right * sum(acceptance**more for more in range(1, count + 1)) - rate * verify[rows + count]

    most = len(lookup.survival(lookup.match_after(drafted), 32 - len(drafted)))
    allowed = [count for count in range(1, most + 1) if verify[rows + count] <= 1.6]
    assert worth(len(appended)) == pytest.approx(max(map(worth, [0, *allowed])))
    assert not appended or verify[rows + len(appended)] <= 1.6
    assert list(appended) == (3 * text)[len(drafted) : len(drafted) + len(appended)]


def test_nothing_follows_a_draft_after_which_lookup_finds_none() -> None:
    lookup = Lookup([1, 2, 3], AcceptanceRate(MATCH_LENGTH).of_request())
    verify = (0.0, *[1.0] * 36)
    append = LookupToAppend(lookup, LookupToConfirm(lookup, verify, 0.0), lambda _: 1.0, verify, 1.0, 9.0)
    assert append([4], [1.0]) == ()
    assert append([1], [1.0]) == (2, 3)
