"""Bytes that decoding reads, with and without drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.types import Generation, Round
from selfspec_lab.measuring import StepBytes


@dataclass(frozen=True)
class DecodingBytes:
    """Bytes that decoding reads for some tokens, without the prefill.

    Attributes:
        tokens: number of tokens.
        plain: bytes that plain decoding reads.
        draft_steps: number of draft forwards.
        draft: bytes that draft forwards read.
        verify: bytes that verifications read.
    """

    tokens: int
    plain: int
    draft_steps: int
    draft: int
    verify: int

    @property
    def plain_step(self) -> float:
        """Mean bytes of a plain decoding step at the contexts of these tokens."""
        return self.plain / self.tokens

    @property
    def ideal_speedup(self) -> float:
        """Speedup over plain decoding if reading memory took all the time.

        It equals SWIFT's equation 6, ``M α / ((M - 1) c + α)``, with ``c`` in bytes (head included), if every round
        drafts ``(M - 1) / α`` tokens at the same context.
        """
        return self.plain / (self.draft + self.verify)

    @property
    def cost_coefficient(self) -> float | None:
        """``c``: bytes of a draft step ÷ bytes of a plain step; ``None`` if no layers drafted."""
        return self.draft / self.draft_steps / self.plain_step if self.draft_steps else None


def decoding_bytes(costs: StepBytes, generations: Sequence[Generation]) -> DecodingBytes:
    """Counts the bytes of finished outputs, round by round.

    Args:
        costs: bytes of the model's steps.
        generations: outputs with their rounds.
    """
    tokens = plain = draft_steps = draft = verify = 0
    for generation in generations:
        length = generation.prompt_token_count + 1  # the first token comes from the prefill
        for record in generation.rounds:
            new = len(record.token_ids)
            plain += sum(costs.target_step(length + step) for step in range(new))
            verify += costs.target_step(length + record.candidates)
            draft += _draft_bytes(costs, record, length)
            draft_steps += record.drafted - record.guessed if record.kept is not None else 0
            tokens += new
            length += new
    return DecodingBytes(tokens, plain, draft_steps, draft, verify)


def _draft_bytes(costs: StepBytes, record: Round, length: int) -> int:
    """Every token of a layer draft that was not guessed is one forward; other drafts read no weights."""
    if record.kept is None:
        return 0
    steps = range(record.drafted - record.guessed)
    return sum(costs.step(record.kept.sublayers, length + step, record.precision) for step in steps)
