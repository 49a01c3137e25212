"""Which cases of a matrix `make test` runs."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.covering import covering

pytest_plugins = ["pytester"]

Case = tuple[tuple[str, type, int], ...]


def matrix(*sizes: int) -> list[Case]:
    return [
        tuple((f"p{index}", int, value) for index, value in enumerate(values))
        for values in itertools.product(*map(range, sizes))
    ]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.randoms())
def test_every_value_of_every_parameter_is_there(sizes: list[int], dice: random.Random) -> None:
    cases = [case for case in matrix(*sizes) if dice.random() < 0.8] or matrix(*sizes)
    part = covering(cases)
    assert 0 < len(part) == len(set(part))
    assert {value for place in part for value in cases[place]} == {value for case in cases for value in case}


def test_values_take_their_turns() -> None:
    cases = matrix(44, 14)
    part = covering(cases)
    assert len(part) == 44
    assert set(Counter(cases[place][1] for place in part).values()) == {3, 4}


def test_one_parameter_is_no_matrix() -> None:
    assert covering(matrix(5)) == list(range(5))
    assert covering([(), ()]) == [0, 1]


def test_what_is_left_out_is_slow(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest
        from helpers.covering import mark_the_rest

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            mark_the_rest(items)
        """
    )
    pytester.makeini("[pytest]\naddopts = -m 'not slow'\nmarkers =\n    slow: takes long\n    in_turn(n): every n-th")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("second", range(4))
        @pytest.mark.parametrize("first", "abc")
        def test_matrix(first, second): pass

        @pytest.mark.in_turn(3)
        @pytest.mark.parametrize("first", range(12))
        def test_list(first): pass

        @pytest.mark.parametrize("first", range(12))
        def test_whole(first): pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=4 + 4 + 12, deselected=8 + 8)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-m", "")
    result.assert_outcomes(passed=12 + 12 + 12)
