"""Which cases of a large matrix `make test` runs: a part in which each value of each parameter occurs.

A test with several parameters is a matrix, and most of its cases differ from others in nothing that breaks alone. The
cases that are left out are marked ``slow``: `make test-slow` runs all of them. The part is the same every time.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

IN_TURN = "in_turn"
"""A marker with a number n: of what is left of the test's cases, `make test` runs every n-th. Tests begin with
different ones, so that a family of models that one of them leaves out is in others."""

_Value = tuple[str, type, Any]


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what `make test` leaves out of each test's cases.

    Args:
        items: all that were collected. Of a test that is asked for by the names of its cases there are only these.
    """
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        part = covering([_values(case) for case in cases])
        marker = cases[0].get_closest_marker(IN_TURN)
        if marker is not None:
            (step,) = marker.args
            part = part[zlib.crc32(name.encode()) % min(step, len(part)) :: step]
        for place in set(range(len(cases))) - set(part):
            cases[place].add_marker(pytest.mark.slow)


def covering(cases: Sequence[Sequence[_Value]]) -> list[int]:
    """Places of cases that together have all values of all cases, each of them about as often as the others.

    Args:
        cases: the values of each case, with the names of their parameters.
    """
    counts = Counter(value for case in cases for value in case)
    varying = [{value for value in case if counts[value] < len(cases)} for case in cases]
    missing = set().union(*varying)
    if not missing:
        return list(range(len(cases)))
    part: list[int] = []
    taken: Counter[_Value] = Counter()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda place: (len(varying[place] & missing), -sum(taken[value] for value in varying[place])),
        )
        part.append(best)
        taken.update(varying[best])
        missing -= varying[best]
    return sorted(part)


def _values(case: Any) -> list[_Value]:
    """A case's values; those that have no hash by their places among the parameter's."""
    values: list[_Value] = []
    for name, value in case.callspec.params.items():
        try:
            hash(value)
        except TypeError:
            value = case.callspec.indices[name]
        values.append((name, type(value), value))
    return values
