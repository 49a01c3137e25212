"""The counts that ``/stats`` shows: tokens, seconds and draft tokens of answers."""

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.engine import Stream
    from selfspec.types import TextPiece


@dataclass(frozen=True)
class Counts:
    """Counts of one or more answers; they can be added.

    Attributes:
        answers: number of answers.
        tokens: tokens of the answers.
        seconds: wall-clock seconds after the first token of each answer.
        rounds: number of rounds.
        committed: tokens committed by the rounds.
        drafted: draft tokens.
        accepted: accepted draft tokens.
        cached: prompt tokens that were not read again.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __str__(self) -> str:
        speed = (self.tokens - self.answers) / self.seconds if self.seconds else 0.0
        rate = self.accepted / self.drafted if self.drafted else 0.0
        length = self.committed / self.rounds if self.rounds else 0.0
        known = f", {self.cached} prompt tokens not read again" if self.cached else ""
        return (
            f"{self.tokens} tokens, {speed:.1f} tokens/s, {self.accepted} of {self.drafted} draft tokens accepted "
            f"({rate:.0%}), mean generated length {length:.2f}{known}"
        )


class AnswerLog:
    """Records the pieces of one answer, so that a stopped answer is counted too."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._first = self._last = 0.0

    def note(self, piece: "TextPiece") -> None:
        """Records the next piece."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._texts.append(piece.text)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def counts(self, stream: "Stream") -> Counts:
        """The counts of the answer.

        Args:
            stream: the stream of the pieces.
        """
        records = stream.rounds
        return Counts(
            answers=1,
            tokens=len(self._texts),
            seconds=self._last - self._first,
            rounds=len(records),
            committed=sum(len(record.token_ids) for record in records),
            drafted=sum(record.drafted for record in records),
            accepted=sum(record.accepted for record in records),
            cached=stream.cached_prompt_tokens,
        )
