"""Jacobi decoding: a block of guessed tokens, replaced by the target's choices until they agree."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from selfspec.methods.api import (
    Draft,
    Drafter,
    Feedback,
    Method,
    MethodSettings,
    Prefill,
    Target,
    TokenDraft,
    TokenTree,
    setting,
)

Guess = Callable[[], int]
"""Returns the first guess for a position."""


@dataclass(frozen=True)
class JacobiSettings(MethodSettings):
    """Settings of ``jacobi``."""

    block_size: int = setting(5, "guessed tokens of a round", minimum=1, maximum=256)
    initial: str = setting(
        "pad",
        "first guesses: pad, the PAD token as in the paper (or else EOS, or else as prompt); prompt, random tokens of "
        "the prompt",
        choices=("pad", "prompt"),
    )


def random_guesses(token_ids: tuple[int, ...]) -> Guess:
    """First guesses drawn from some tokens, with a fixed seed."""
    generator = random.Random(0)
    return lambda: generator.choice(token_ids)


class Jacobi(Method):
    """Parallel decoding with a sliding block (Santilli et al. 2023, Algorithms 1 and 2).

    A round is one Jacobi iteration: the target runs over the whole block, the guesses that it confirms are committed,
    and its choices after the other ones are the next guesses, y_i ← arg max p(y | y_1 … y_(i-1)). The paper finishes a
    block before it begins the next (PGJ); here the block moves forward by the committed tokens and is always full.
    """

    name = "jacobi"
    summary = "Jacobi iteration on a block of guessed tokens"
    source = "parallel decoding (Santilli et al. 2023)"
    Settings = JacobiSettings
    settings: JacobiSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        pad = _pad_tokens(self.target) if self.settings.initial == "pad" else ()
        return _Jacobi(self.settings.block_size, random_guesses(pad[:1] or prefill.prompt_ids))


def _pad_tokens(target: Target) -> tuple[int, ...]:
    """The PAD token and the EOS tokens that the model has an embedding for."""
    eos = getattr(target.config, "eos_token_id", None)
    tokens = (getattr(target.config, "pad_token_id", None), *(eos if isinstance(eos, list) else [eos]))
    return tuple(token for token in tokens if token is not None and 0 <= token < target.vocab_size)


class _Jacobi(Drafter):
    def __init__(self, block_size: int, guess: Guess) -> None:
        self._block_size = block_size
        self._guess = guess
        self._guesses: list[int] = []

    def plan(self) -> Draft:
        """Drafts the remaining guesses, filled up with new ones."""
        missing = self._block_size - len(self._guesses)
        self._guesses += [self._guess() for _ in range(missing)]
        return TokenDraft(tuple(self._guesses), TokenTree.chain(self._block_size))

    def learn(self, feedback: Feedback) -> None:
        """Keeps the target's choices after the accepted tokens as the next guesses."""
        # The last accepted row chose the pending token. The rows after it predict what follows their guesses.
        rejected = feedback.target_scores[feedback.accepted + 1 :]
        self._guesses = rejected.argmax(-1).tolist()

    def observe(self, feedback: Feedback) -> None:
        """Drops the guesses of committed positions."""
        self._guesses = self._guesses[len(feedback.acceptance.token_ids) :]
