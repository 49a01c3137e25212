"""Which questions stand for a category where not all of them are asked."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites.types import Question


@dataclass(frozen=True)
class Selection:
    """At most ``limit`` questions of every category, spread evenly over it.

    Files are often sorted by difficulty or source, so the first questions of a category would not stand for it. The
    category is divided into as many equal stretches as there are questions to choose, and one is taken from the same
    place of each (systematic sampling).

    Attributes:
        limit: questions a category, at least 1; ``None`` takes all.
        seed: decides the place in the stretches.
    """

    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InvalidParameterError(
                f"limit must be at least 1 question a category, not {self.limit}; leave it out for all of them"
            )

    def choose(self, questions: Sequence[Question]) -> tuple[Question, ...]:
        """The chosen questions, in the order they had."""
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
        """Where ``count`` pieces of ``length`` begin that lie evenly spread over ``total``, none over another.

        Args:
            total: length of the whole.
            length: length of a piece; ``count * length`` is at most ``total``.
            count: number of pieces, at least 1.
        """
        assert 0 < count * length <= total
        offset = random.Random(self.seed).random() * (total / count - length)
        return [int(number * total / count + offset) for number in range(count)]
