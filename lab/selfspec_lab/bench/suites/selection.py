"""Chooses questions of a category if not all are asked."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites.types import Question


@dataclass(frozen=True)
class Selection:
    """At most ``limit`` questions of every category, spread evenly over it.

    Files are often sorted by difficulty or source, so the first questions are not representative. The category is
    divided into ``limit`` equal parts, and one question is taken at the same offset of each (systematic sampling).

    Attributes:
        limit: most questions per category, at least 1; ``None`` for all.
        seed: seed of the offset.
    """

    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InvalidParameterError(
                f"limit must be at least 1 question per category, not {self.limit}; leave it out for all questions"
            )

    def choose(self, questions: Sequence[Question]) -> tuple[Question, ...]:
        """The chosen questions, in their original order."""
        if self.limit is None:
            return tuple(questions)
        by_category: dict[str, list[int]] = {}
        for number, question in enumerate(questions):
            by_category.setdefault(question.category, []).append(number)
        chosen = [
            numbers[place]
            for numbers in by_category.values()
            for place in self.places(len(numbers), 1, min(self.limit, len(numbers)))
        ]
        return tuple(questions[number] for number in sorted(chosen))

    def places(self, total: int, length: int, count: int) -> list[int]:
        """Starts of ``count`` pieces of ``length``, evenly spread over ``total`` without overlap.

        Args:
            total: total length.
            length: length of a piece; ``count * length`` is at most ``total``.
            count: number of pieces, at least 1.
        """
        assert 0 < count * length <= total
        offset = random.Random(self.seed).random() * (total / count - length)
        return [int(number * total / count + offset) for number in range(count)]
