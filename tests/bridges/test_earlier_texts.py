"""What is kept of texts that have ended: the latest tokens, and no more than a bound."""

from hypothesis import given
from hypothesis import strategies as st

from selfspec.bridges.earlier_texts import EarlierTexts
from selfspec.decoding.suffixes import SEPARATOR

TEXT = st.lists(st.integers(0, 9), max_size=40)


@given(st.lists(TEXT, max_size=30), st.integers(1, 50))
def test_the_latest_texts_are_kept_within_the_bound(texts: list[list[int]], most: int) -> None:
    earlier = EarlierTexts(most)
    for text in texts:
        earlier.keep(text)
        assert len(earlier.automaton.tokens) <= max(2 * most, 2 * most + len(texts))
    kept = [tokens for each in texts if (tokens := each[-most:])]
    joined = [token for text in kept for token in (*text, SEPARATOR)]
    assert joined[len(joined) - len(earlier.automaton.tokens) :] == earlier.automaton.tokens
    assert len(earlier.automaton.tokens) >= min(most, len(joined))


def test_many_texts_take_bounded_memory() -> None:
    earlier = EarlierTexts(1000)
    sizes = []
    for number in range(200):
        earlier.keep([(number * 31 + place) % 997 for place in range(100)])
        sizes.append(len(earlier.automaton.tokens))
    assert max(sizes) <= 2000
    assert max(sizes[100:]) <= max(sizes[:100])
    assert earlier.automaton.tokens[-2] == (199 * 31 + 99) % 997


def test_a_text_in_use_keeps_the_texts_that_it_began_with() -> None:
    earlier = EarlierTexts(4)
    earlier.keep([1, 2, 3])
    used = earlier.automaton
    for number in range(10):
        earlier.keep([number, number, number])
    assert used.tokens[:3] == [1, 2, 3]
    assert earlier.automaton is not used


def test_nothing_is_kept_without_room() -> None:
    earlier = EarlierTexts(0)
    earlier.keep([1, 2, 3])
    assert earlier.automaton.tokens == []
