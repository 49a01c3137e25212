"""Which choice of bits, and which draft length, promise the most tokens a second."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from selfspec.methods.api import KeptSet
from selfspec.methods.objective import tokens_per_time
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.runtimes.precision import FULL_BITS
from selfspec_lab.methods.mixed.losses import SKIP
from selfspec_lab.methods.mixed.multiple_choice import Choice, Filling, best_fillings
from selfspec_lab.methods.mixed.precision import MixedPrecision

_UNITS = 1000
"""Weight of the whole model at full bits: the resolution of the knapsack."""

_FIRST_TRIALS = (0.9, 0.5, 0.2)
"""Acceptance that the fillings tried first would have if it were 1 - √loss."""
_MOST_TRIALS = 8


@dataclass(frozen=True)
class Plan:
    """A draft from mixed precisions.

    Attributes:
        bits: of each sublayer, ``SKIP`` for one that does not run, and of the LM head, which comes last.
        draft_length: tokens of a draft.
        acceptance: expected probability that a draft token is accepted.
        seconds: of a draft step.
        tokens_per_second: expected.
    """

    bits: tuple[int, ...]
    draft_length: int
    acceptance: float
    seconds: float
    tokens_per_second: float

    @property
    def kept(self) -> KeptSet:
        """The sublayers that run."""
        sublayers = self.bits[:-1]
        return KeptSet(tuple(index for index, bits in enumerate(sublayers) if bits != SKIP), len(sublayers))

    def precision(self, group: int) -> MixedPrecision:
        """The precision of all components; a sublayer that does not run has 16 bits and so needs no low-bit weights."""
        sublayers = tuple(FULL_BITS if bits == SKIP else bits for bits in self.bits[:-1])
        return MixedPrecision(head=self.bits[-1], group=group, sublayers=sublayers)


def part_seconds(profiles: Mapping[int, LatencyProfile], layers: int, context: int) -> list[Mapping[int, float]]:
    """By component, the head last, its seconds by bits; layout and embedding are not included."""
    attention = {SKIP: 0.0} | {bits: profile.attention(context) for bits, profile in profiles.items()}
    mlp = {SKIP: 0.0} | {bits: profile.mlp for bits, profile in profiles.items()}
    return [*[attention, mlp] * layers, {bits: profile.head for bits, profile in profiles.items()}]


def fill(losses: Sequence[Mapping[int, float]], seconds: Sequence[Mapping[int, float]]) -> list["Candidate"]:
    """The knapsack over all components: for every budget of time the bits of least loss."""
    unit = sum(each[FULL_BITS] for each in seconds) / _UNITS
    offered = [[bits for bits in loss if bits in time] for loss, time in zip(losses, seconds, strict=True)]
    items = [
        [Choice(round(seconds[part][bits] / unit), losses[part][bits]) for bits in choices]
        for part, choices in enumerate(offered)
    ]
    return [_candidate(filling, offered, seconds) for filling in best_fillings(items)]


@dataclass(frozen=True)
class Candidate:
    """A filling of the knapsack: bits as in ``Plan``, and the sums of losses and times."""

    bits: tuple[int, ...]
    loss: float
    seconds: float


def _candidate(filling: Filling, offered: Sequence[Sequence[int]], seconds: Sequence[Mapping[int, float]]) -> Candidate:
    bits = tuple(choices[index] for choices, index in zip(offered, filling.choices, strict=True))
    return Candidate(bits, filling.loss, sum(each[chosen] for each, chosen in zip(seconds, bits, strict=True)))


def expected_acceptance(loss: float, tried: Mapping[float, float]) -> float:
    """The acceptance at a loss, interpolated from tried losses.

    Linear in ``√loss``, which by Pinsker's inequality bounds how often two distributions differ; 1 at loss 0, never
    increasing, and beyond the last tried loss on the line through it and 0.
    """
    roots = [0.0, *(math.sqrt(each) for each in sorted(tried))]
    rates = np.minimum.accumulate([1.0, *(tried[each] for each in sorted(tried))])
    root = math.sqrt(loss)
    if root <= roots[-1]:
        return float(np.interp(root, roots, rates))
    slope = (rates[-1] - 1.0) / roots[-1] if roots[-1] else -1.0
    return max(0.0, float(rates[-1] + slope * (root - roots[-1])))


def choose_plan(
    candidates: Sequence[Candidate],
    accepts: Callable[[float], float],
    verify: Callable[[float], float],
    *,
    outside: float,
    longest: int,
) -> Plan:
    """The candidate and draft length of most tokens a second (KnapSpec, equation 4, with measured verifications).

    ``accepts`` gives the acceptance of a loss, ``verify`` the seconds of a forward of some rows; ``outside`` is the
    time of a draft step outside of its components.
    """
    alphas = torch.tensor([accepts(candidate.loss) for candidate in candidates], dtype=torch.float64)
    steps = torch.tensor([candidate.seconds + outside for candidate in candidates], dtype=torch.float64)
    lengths = torch.arange(1, longest + 1)
    verifications = torch.tensor([verify(1 + length) for length in lengths.tolist()], dtype=torch.float64)
    speeds = tokens_per_time(alphas[:, None], lengths, steps[:, None], verifications)
    chosen, length = divmod(int(speeds.argmax()), longest)
    return Plan(
        bits=candidates[chosen].bits,
        draft_length=length + 1,
        acceptance=float(alphas[chosen]),
        seconds=float(steps[chosen]),
        tokens_per_second=float(speeds[chosen, length]),
    )


def search_plan(
    candidates: Sequence[Candidate],
    measure: Callable[[Candidate], float],
    verify: Callable[[float], float],
    *,
    outside: float,
    longest: int,
) -> Plan:
    """Tries a few candidates, then repeatedly the best by the acceptances so far, until the best has been tried.

    Losses rank candidates but do not give their acceptance, which ``measure`` does.
    """
    by_bits = {candidate.bits: candidate for candidate in candidates}
    firsts = [min(candidates, key=lambda each: abs(1 - math.sqrt(each.loss) - rate)) for rate in _FIRST_TRIALS]
    tried = {each.loss: measure(each) for each in dict.fromkeys(firsts)}

    def accepts(loss: float) -> float:
        return expected_acceptance(loss, tried)

    while True:
        plan = choose_plan(candidates, accepts, verify, outside=outside, longest=longest)
        best = by_bits[plan.bits]
        if best.loss in tried or len(tried) >= _MOST_TRIALS:
            return plan
        tried[best.loss] = measure(best)
