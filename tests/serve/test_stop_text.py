"""Stop strings in texts, however these are cut into pieces."""

import hypothesis.strategies as st
from hypothesis import example, given

from selfspec.serve.stop_text import StopText


def before_stop(text: str, stops: list[str], *, include: bool) -> str:
    """The text up to the stop string that ends first: the slow oracle, a character at a time."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: end if include else min(begins)]
    return text


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
@example(["a", "ab"], ["aab", "b"], False)
def test_pieces_join_to_the_text_before_the_stop(pieces: list[str], stops: list[str], include: bool) -> None:
    stopped = StopText(stops, include=include)
    given = [stopped.push(piece) for piece in pieces]
    given.append(stopped.flush())
    assert "".join(given) == before_stop("".join(pieces), stops, include=include)


def test_no_more_is_held_back_than_a_stop_string_can_begin_with() -> None:
    stopped = StopText(["END", "</s>"])
    assert [stopped.push(piece) for piece in ("one E", "D two <", "/s", "x")] == ["one ", "ED two ", "", "</sx"]


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopText([]).push("all of it") == "all of it"
