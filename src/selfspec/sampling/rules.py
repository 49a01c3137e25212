"""The three sampling rules, with one interface for drafting and acceptance, and the noise that draft and target share.

A rule takes *processed scores*: logits after the request's logits processors, including temperature. A filtered token
has score ``-inf``. Autoregressive decoding is ``accept`` with an empty tree.

Coupled sampling is the Gumbel-max trick: ``argmax(log p + G)`` with independent Gumbel noise ``G`` is a draw from
``p``. If draft and target use the same ``G`` at the same position, they draw the same token where their distributions
agree, and the target's draw does not depend on the draft. So the noise depends only on (seed, position, token). Its
numbers come from splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") used as a
counter-based generator: each position has a key that starts a stream, and token ``t`` takes number ``t + 1`` of it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Protocol

import torch

from selfspec.model import transfer
from selfspec.params import SamplingParams
from selfspec.sampling.acceptance import Acceptance, DraftedTree, Verdict, accept_matching, accept_rejection
from selfspec.sampling.processors import ScoreProcessor


class Rule(Protocol):
    """How tokens are chosen. Every rule reproduces the target's output (greedy) or its distribution (the other two).

    No method synchronises with the device.
    """

    needs_draft_probs: bool
    """Whether ``accept`` needs the scores that ``preferences`` drafted from."""

    chooses_best: bool
    """Whether the rule is ``Greedy``: draft and target take the tokens of the largest scores."""

    def preferences(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """The preference for each token at one position; ``best`` and ``next_best`` pick tokens to draft from it.

        Args:
            scores: float ``[vocab]``, the draft's processed scores.
            position: absolute position of the token to draft.

        Returns:
            float ``[vocab]`` on the device of the scores; ``-inf`` where the score is ``-inf``.
        """

    def accept(self, drafted: DraftedTree, target_scores: torch.Tensor, positions: Sequence[int]) -> Verdict:
        """Determines the accepted tokens and the token after them.

        Args:
            drafted: the draft of ``n`` tokens, with its scores if ``needs_draft_probs``.
            target_scores: float ``[n + 1, vocab]``, the target's processed scores after each verification row.
            positions: ``[n + 1]``, the absolute position of the token that each row chooses.

        Returns:
            The accepted path and the next token, still on the device.
        """


class Greedy:
    """The target's argmax, ties resolved as ``torch.argmax`` does."""

    needs_draft_probs = False
    chooses_best = True

    def preferences(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """The scores themselves; see ``Rule.preferences``."""
        return scores

    def accept(self, drafted: DraftedTree, target_scores: torch.Tensor, positions: Sequence[int]) -> Verdict:
        """Accepts the path of the target's argmaxes; see ``Rule.accept``."""
        return accept_choices(drafted, target_scores.argmax(-1))


class Coupled:
    """Sampling with noise that depends only on (seed, position, token) and is shared by draft and target.

    The output is a function of the seed and the target: the same tokens with any draft, or without one. ``key`` is the
    hash of the seed, an unsigned integer of 64 bits.
    """

    needs_draft_probs = False
    chooses_best = False

    def __init__(self, seed: int) -> None:
        self.seed, self.key = seed, seed_key(seed)
        self._kept: dict[int, torch.Tensor] = {}

    def preferences(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """The perturbed scores; see ``Rule.preferences``."""
        return scores + self._noise([position], scores)[0]

    def accept(self, drafted: DraftedTree, target_scores: torch.Tensor, positions: Sequence[int]) -> Verdict:
        """Accepts the path of the target's own draws; see ``Rule.accept``."""
        perturbed = target_scores + self._noise(positions, target_scores)
        self._kept = {position: noise for position, noise in self._kept.items() if position > positions[0]}
        return accept_choices(drafted, perturbed.argmax(-1))

    def _noise(self, positions: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """The noise of each position, float32 ``[n, vocab]``.

        A position is drafted, verified, and where a token before it was rejected, drafted again: its noise is kept.
        """
        kept = self._kept
        if missing := [position for position in dict.fromkeys(positions) if position not in kept]:
            noise = gumbel_noise(self.seed, transfer.send(missing, scores.device), scores.shape[-1])
            kept.update(zip(missing, noise.unbind(), strict=True))
        return torch.stack([kept[position] for position in positions])


class Speculative:
    """Speculative sampling (Leviathan et al. 2023): the draft is sampled, rejection restores the target's distribution.

    Args:
        generator: the request's random number generator, on the device of the scores (``seeded_generator``).
    """

    needs_draft_probs = True
    chooses_best = False

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def preferences(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """Gumbel top-k: the order is a draw from softmax(scores) without replacement; see ``Rule.preferences``."""
        exponential = torch.empty_like(scores, dtype=torch.float64).exponential_(generator=self.generator)
        return scores - exponential.log_()

    def accept(self, drafted: DraftedTree, target_scores: torch.Tensor, positions: Sequence[int]) -> Verdict:
        """Accepts by rejection sampling; see ``Rule.accept``."""
        uniforms = torch.rand(
            len(drafted.tree) + 1, dtype=torch.float64, device=target_scores.device, generator=self.generator
        )
        probs = None if drafted.scores is None else drafted.scores.softmax(-1)
        return accept_rejection(replace(drafted, scores=probs), target_scores.softmax(-1), uniforms)


def seeded_generator(seed: int, device: torch.device | str) -> torch.Generator:
    """A new generator for ``Speculative`` on the scores' device; the seed is any integer, also beyond 64 bits."""
    return torch.Generator(device).manual_seed(seed_key(seed))


def rule_of(params: SamplingParams, device: torch.device, processor: ScoreProcessor) -> Rule:
    """The sampling rule of a request.

    Args:
        params: how to choose tokens.
        device: where random numbers are drawn.
        processor: what makes scores of logits.
    """
    if not params.samples:
        return Greedy()
    seed = params.seed if params.seed is not None else int(torch.randint(2**62, (1,)))
    # Kernels of a CPU draw with shared noise, which is faster by more than what rejection sampling accepts more often.
    draws = params.seed is not None or (device.type == "cpu" and processor.temperature is not None)
    if params.acceptance == "coupled" or (params.acceptance == "auto" and draws):
        return Coupled(seed)
    return Speculative(seeded_generator(seed, device))


def accept_choices(drafted: DraftedTree, choices: torch.Tensor) -> Verdict:
    """``accept_matching`` on the device, with the target's ``choices``, long ``[n + 1]``."""

    def interpret(tokens: list[int], chosen: list[int]) -> Acceptance:
        return accept_matching(drafted.tree, tokens, chosen)

    if not drafted.tree:
        return Verdict((choices,), partial(interpret, []))
    return Verdict((drafted.token_ids, choices), interpret)


def best(preferences: torch.Tensor) -> torch.Tensor:
    """The token to draft, exactly the argmax: float ``[vocab]`` to long ``[1]``."""
    return preferences.argmax(-1, keepdim=True)


def next_best(preferences: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
    """The next candidates after the best token ``first``, long ``[1]``, best first: long ``[count]``, distinct tokens.

    ``count`` has to be less than the number of ``possible`` tokens.
    """
    # topk breaks ties in an unspecified order, so argmax chooses the best token and topk only the others.
    return preferences.index_fill(0, first, -torch.inf).topk(count).indices


def possible(preferences: torch.Tensor) -> torch.Tensor:
    """The number of tokens with a preference above ``-inf``: float ``[vocab]`` to float ``[]``."""
    # Summed as floats, which is exact up to 2^24; summing booleans takes several times as long on a CPU.
    return torch.gt(preferences, -torch.inf, out=torch.empty_like(preferences)).sum()


GAMMA = 0x9E3779B97F4A7C15
"""Increment of splitmix64: 2^64 divided by the golden ratio, rounded to an odd number."""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = (1 << 64) - 1


def gumbel_noise(seed: int, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary at each position.

    The underlying 64-bit numbers come from integer arithmetic. They are the same on every device, for any grouping of
    the positions and for any padding of the vocabulary. Only the two logarithms (float64, rounded to float32) may
    differ between devices, by at most one float32 rounding. Does not synchronise with the device.

    Args:
        seed: any integer.
        positions: long ``[n]``, the absolute position of the token to choose.
        vocab_size: number of tokens ``V``.

    Returns:
        float32 ``[n, V]``, finite, on the device of ``positions``.
    """
    # On a CPU one position at a time: its numbers stay in the cache, which is several times as fast.
    parts = positions[:, None].unbind() if positions.device.type == "cpu" else (positions,)
    rows = [uniforms(seed, part, vocab_size).log_().neg_().log_().neg_().float() for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def uniforms(seed: int, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The uniform numbers of ``gumbel_noise``: float64 ``[n, V]``, odd multiples of 2^-53, inside (0, 1)."""
    keys = _mix_((positions + 1).mul_(_signed(GAMMA)).add_(_signed(seed_key(seed))))
    bits = _mix_(keys[:, None] + _counters(vocab_size, positions.device))
    # 52 bits plus one half: with 53 bits the largest value plus one half would round to 1.
    return _shift_right(bits, 12, bits).double().add_(0.5).mul_(2.0**-52)


@lru_cache(maxsize=8)
def _counters(vocab_size: int, device: torch.device) -> torch.Tensor:
    """What each token adds to the key of a position, long ``[V]``; not to be changed."""
    return torch.arange(1, vocab_size + 1, device=device).mul_(_signed(GAMMA))


def seed_key(seed: int) -> int:
    """Hashes any integer to an unsigned 64-bit key; an integer beyond 64 bits is hashed word by word."""
    words = seed.bit_length() // 64 + 1
    data = seed.to_bytes(8 * words, "little", signed=True)
    key = 0
    for start in range(0, len(data), 8):
        key = _mix_int((key + GAMMA + int.from_bytes(data[start : start + 8], "little")) & MASK)
    return key


def _mix_int(value: int) -> int:
    """The finaliser of splitmix64 on an unsigned Python integer."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        value = ((value ^ (value >> shift)) * multiplier) & MASK
    return value ^ (value >> SHIFTS[-1])


def _mix_(values: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, in place. int64 arithmetic wraps around, so it is modulo 2^64."""
    shifted = torch.empty_like(values)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        values.bitwise_xor_(_shift_right(values, shift, shifted)).mul_(_signed(multiplier))
    return values.bitwise_xor_(_shift_right(values, SHIFTS[-1], shifted))


def _shift_right(values: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Logical right shift: torch shifts int64 arithmetically, so the mask clears the copies of the sign bit."""
    return torch.bitwise_right_shift(values, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value
