"""Single figures in a sentence: ``1.4<!-- =FILE KEY -->``, a number and where it is from.

``FILE`` is the name of a JSON file in ``benchmarks/results`` without its ending, ``KEY`` the path to a number in it, as
``figures/tokens_per_second/auto/median``, or two with `` ÷ `` between them, and `` × N`` after that for another unit.
The number before the mark is written anew, with as many decimals as it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MARK = re.compile(r"(\d[\d,]*(?:\.\d+)?)<!-- =(\S+) (.+?) -->")

Read = Callable[[str], Any]
"""Reads a results file by its name."""


def fill(page: str, read: Read) -> str:
    """A page with the numbers of its marks written anew.

    Raises:
        KeyError: a file has no such key.
        OSError: there is no such file.
    """

    def written(match: re.Match[str]) -> str:
        number, name, key = match.groups()
        decimals = len(number.partition(".")[2])
        return f"{value(read(name), key):,.{decimals}f}<!-- ={name} {key} -->"

    return MARK.sub(written, page)


def value(result: Any, key: str) -> float:
    """The number that a key stands for.

    Args:
        result: of a file.
        key: ``PATH``, ``PATH ÷ PATH``, and either with `` × N``.

    Raises:
        KeyError: there is no such path.
    """
    paths, _, factor = key.partition(" × ")
    over, _, under = paths.partition(" ÷ ")
    quotient = _at(result, over) / (_at(result, under) if under else 1.0)
    return quotient * float(factor or 1)


def _at(result: Any, path: str) -> float:
    for part in path.split("/"):
        result = result[int(part)] if isinstance(result, list) else result[part]
    return float(result)
