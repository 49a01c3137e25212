"""How likely draft tokens are accepted: tables that every verified token updates, and prompt lookup scored by them."""

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from selfspec.decoding.suffixes import KnownText, Match, SuffixAutomaton
from selfspec.errors import StateError
from selfspec.planning.plans import MOST_DRAFTED, MOST_GUESSES, PADDING, Outlook, best_guesses
from selfspec.runtimes.costs.rows import CostTable


@dataclass(frozen=True)
class Feature:
    """A number that tells likely draft tokens from unlikely ones, cut into buckets."""

    edges: tuple[float, ...]
    """Ascending; bucket ``i`` ends before ``edges[i]``, the last one has no end."""
    prior: tuple[float, ...]
    """Acceptance to expect in each bucket before anything is known."""
    shares: tuple[float, ...] = ()
    """Share of all tokens to expect in each bucket before anything is known; equal ones where nothing is said."""

    def __post_init__(self) -> None:
        assert len(self.prior) == len(self.edges) + 1
        assert not self.shares or (len(self.shares) == len(self.prior) and abs(sum(self.shares) - 1) < 1e-6)

    @property
    def mean(self) -> float:
        """Acceptance to expect of any token."""
        return sum(share * prior for share, prior in zip(self.shares, self.prior, strict=True))

    def bucket(self, value: float) -> int:
        """The bucket of a value."""
        return bisect_right(self.edges, value)


MATCH_LENGTH = Feature(edges=(2, 3, 4, 5, 7, 10, 16, 24), prior=(0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.93))
"""Tokens of the match after which lookup finds a token."""

AGREED = Feature(edges=(2, 4, 8), prior=(0.8, 0.85, 0.92, 0.97))
"""The same where the same token was chosen after a probe."""

SPELLING = Feature(edges=(), prior=(0.95,))
"""Of tokens that spell what a grammar forces: a model may spell it by others."""

CONFIDENCE = Feature(
    edges=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995),
    prior=(0.1, 0.25, 0.4, 0.5, 0.58, 0.66, 0.74, 0.81, 0.88, 0.94, 0.97, 0.985, 0.995),
    shares=(0.0, 0.02, 0.05, 0.06, 0.06, 0.06, 0.06, 0.06, 0.07, 0.07, 0.07, 0.09, 0.33),
)
"""Largest probability of the draft at a token."""

LOW_BIT_CONFIDENCE = Feature(
    edges=CONFIDENCE.edges,
    prior=(0.5, 0.6, 0.7, 0.8, 0.86, 0.92, 0.96, 0.985, 0.99, 0.995, 0.995, 0.998, 0.998),
    shares=(0.01, 0.03, 0.05, 0.06, 0.06, 0.07, 0.07, 0.07, 0.09, 0.07, 0.08, 0.1, 0.24),
)
"""The same where all layers draft, at few bits: such a draft is mostly right even where it is unsure.

In 211 answers of SmolLM2 at 6 bits and 15 of Qwen2.5-Coder with 1.5 billion parameters at 4 bits, as
``benchmarks/auto_replay.py record`` writes them, 0.71 to 0.85 of the tokens at 0.3 to 0.4 were the model's own, and
0.99 and more from 0.7 on.
"""

PROBABILITY = Feature(
    edges=(0.2, 0.4, 0.6, 0.8, 0.9, 0.97),
    prior=(0.08, 0.2, 0.27, 0.32, 0.42, 0.52, 0.65),
    shares=(0.15, 0.2, 0.2, 0.18, 0.1, 0.09, 0.08),
)
"""Largest probability after a probe."""

OTHERS = Feature(
    edges=(0.03, 0.06, 0.12, 0.25),
    prior=(0.03, 0.05, 0.08, 0.12, 0.16),
    shares=(0.13, 0.25, 0.36, 0.2, 0.06),
)
"""Probability of the next likeliest tokens after a probe."""

BESIDE = Feature(edges=(), prior=(0.0,))
"""Of rounds after a probe, in which one of these may be accepted."""


class ProbedToken(NamedTuple):
    """A token that may come after the pending one, and its probability; none without a token."""

    token: int | None = None
    confidence: float = 0.0
    others: Sequence[tuple[int, float]] = ()  # the next likeliest, with their probabilities
    mask: int = 0  # the kind of mask embedding that it was made with


_SHARED_VISITS = 24.0
"""Tokens for which the shares of all requests count within a request."""


class AcceptanceRate:
    """Acceptance by bucket: over all requests of a method (from several threads), or within one request.

    Over all requests, each bucket starts with the feature's prior as ``weight`` tokens, and forgets: it never weighs
    more than ``memory`` tokens. Within a request (``of_request``) what all requests have seen is the prior, and stays:
    own tokens count more, the latest most, since texts differ more than their parts do.
    """

    def __init__(
        self, feature: Feature, weight: float = 4.0, memory: float = 400.0, shared: "AcceptanceRate | None" = None
    ) -> None:
        self.feature = feature
        self._weight, self._memory, self._shared = weight, memory, shared
        self._lock: threading.Lock = threading.Lock() if shared is None else shared._lock
        started = weight if shared is None else 0.0  # within a request the prior is no part of the counts
        self._trials = [started] * len(feature.prior)
        self._accepted = [started * prior for prior in feature.prior]
        self._rates: list[float] = list(feature.prior) if shared is None else shared._rates  # over all requests
        shares = feature.shares or (1 / len(feature.prior),) * len(feature.prior)
        self._visits = [share * weight for share in shares] if shared is None else [0.0] * len(shares)
        last = int(max(feature.edges, default=0))
        self._buckets = [feature.bucket(value) for value in range(last + 1)]

    def of_request(self, weight: float = 3.0, memory: float = 24.0) -> "AcceptanceRate":
        """The acceptance within a new request."""
        return AcceptanceRate(self.feature, weight, memory, shared=self)

    def rate(self, value: float = 0.0) -> float:
        """Acceptance to expect at a value of the feature, 0 to 1."""
        return self._rate(self.feature.bucket(value))

    def rates(self, first: int, count: int) -> Iterator[float]:
        """Acceptance to expect at ``count`` successive whole numbers of the feature."""
        buckets, last = self._buckets, len(self._buckets) - 1
        for value in range(first, first + count):
            yield self._rate(buckets[min(value, last)])

    def _rate(self, bucket: int) -> float:
        shared = self._rates[bucket]  # one read needs no lock
        if self._shared is None:
            return shared
        return (self._weight * shared + self._accepted[bucket]) / (self._weight + self._trials[bucket])

    def outlook(self) -> Outlook:
        """What the next tokens will be like, kind by kind of token."""
        visits = self._visits
        if self._shared is not None:
            shared = self._shared._visits
            each = _SHARED_VISITS / sum(shared)
            visits = [own + each * its for own, its in zip(visits, shared, strict=True)]
        total = sum(visits)
        return Outlook([own / total for own in visits], list(map(self._rate, range(len(visits)))))

    def note(self, accepted: bool, value: float = 0.0) -> None:
        """Counts a verified token at a value of the feature."""
        bucket, shared = self.feature.bucket(value), self if self._shared is None else self._shared
        with self._lock:
            shared._count(bucket, accepted)
            self._rates[bucket] = shared._accepted[bucket] / shared._trials[bucket]
        if shared is not self:
            self._count(bucket, accepted)

    def _count(self, bucket: int, accepted: bool) -> None:
        trials = self._trials[bucket]
        kept = (self._memory - 1) / trials if trials > self._memory - 1 else 1.0
        self._trials[bucket] = trials * kept + 1
        self._accepted[bucket] = self._accepted[bucket] * kept + accepted
        self._visits[bucket] += 1
        if (visits := sum(self._visits)) > self._memory:
            self._visits = [self._memory / visits * each for each in self._visits]

    def fade(self, share: float) -> None:
        """Forgets a share of the own tokens, 0 to 1, so that what failed is tried again some time."""
        kept = 1 - share
        for bucket in range(len(self._trials)):
            self._trials[bucket] *= kept
            self._accepted[bucket] *= kept
            self._visits[bucket] *= kept

    def to_lists(self) -> list[list[float]]:
        """Tokens, accepted tokens and latest tokens of each bucket, for a state file."""
        with self._lock:
            return [list(self._trials), list(self._accepted), list(self._visits)]

    def restore(self, lists: Sequence[Sequence[float]]) -> None:
        """Loads what ``to_lists`` gave; raises ``StateError`` if it is damaged."""
        try:
            trials, accepted, visits = ([float(number) for number in numbers] for numbers in lists)
        except (TypeError, ValueError):
            raise StateError("the state's acceptance is damaged: it needs three lists of numbers; delete it") from None
        fits = len(trials) == len(accepted) == len(visits) == len(self.feature.prior)
        if (
            not fits
            or not all(
                0 <= yes <= all_ and 0 < all_ <= 1e9 and 0 <= latest <= 1e9
                for yes, all_, latest in zip(accepted, trials, visits, strict=True)
            )
            or not sum(visits)
        ):
            raise StateError("the state's acceptance is damaged: accepted tokens exceed trials; delete it")
        with self._lock:
            self._trials, self._accepted, self._visits = trials, accepted, visits
            self._rates[:] = [yes / all_ for yes, all_ in zip(accepted, trials, strict=True)]


_UNLIKELY = 0.02
"""Probability below which a token is not worth its row on any machine."""


class Lookup:
    """Prompt lookup: what followed the longest suffix of the text that has occurred before, as in ``suffix``.

    The acceptance of a token depends on the length of the match before it, in which tokens that were found count.
    Every token of the text scores it, whether it was drafted or not. ``earlier`` has texts of earlier requests.
    """

    def __init__(
        self, token_ids: Sequence[int], acceptance: AcceptanceRate, earlier: SuffixAutomaton | None = None
    ) -> None:
        self._text = KnownText(token_ids, earlier)
        self._acceptance = acceptance
        self.match_after = self._text.match_after
        self.tokens = self._text.copy

    @property
    def match_length(self) -> int:
        """Tokens of the match; 0 without one."""
        return self.match_after().length

    @property
    def likelihood(self) -> float:
        """The probability that the next token is the one found; 0 without a match."""
        length = self.match_length
        return self._acceptance.rate(length) if length else 0.0

    def survival(self, match: Match, count: int) -> list[float]:
        """By number of tokens the probability that all are right; at most ``count``, as long as worth a row."""
        likely: list[float] = []
        if match.length:
            probability = 1.0
            for rate in self._acceptance.rates(match.length, count):
                probability *= rate
                if probability < _UNLIKELY:
                    break
                likely.append(probability)
        return likely

    def read(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the text that nothing is learned from: those of a prompt."""
        self._text.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the text, and learns from each whether lookup was right."""
        for token_id in token_ids:
            match = self.match_after()
            if match.length:
                self._acceptance.note(self.tokens(match, 1) == [token_id], match.length)
            self._text.extend((token_id,))


class LookupToConfirm:
    """Guesses of what a layer draft drafts next, by prompt lookup: as many as make drafting cheapest.

    ``most_seconds`` is what their rows may cost, and ``seconds`` what they cost so far.
    """

    def __init__(self, lookup: Lookup, costs: CostTable, most_seconds: float) -> None:
        self._lookup = lookup
        self._costs = costs
        self._most_seconds = most_seconds
        self.seconds = 0.0

    def spent(self, drafted: int) -> float:
        """Most seconds that the forwards of a draft took, with the rows of guesses, by the tokens that it drafted."""
        return drafted * self._costs[1] + self.seconds

    def __call__(self, drafted: Sequence[int]) -> Sequence[int]:
        """The guesses after the text and the tokens drafted so far."""
        match = self._lookup.match_after(drafted)
        count, _ = best_guesses(self._costs, self._lookup.survival(match, MOST_GUESSES))
        seconds = self.seconds + self._costs[1 + count] - self._costs[1]
        if not count or seconds > self._most_seconds:
            return ()
        self.seconds = seconds
        return self._lookup.tokens(match, count, drafted)


class LookupToAppend:
    """Tokens that lookup finds after the last one of a layer draft: as many as are worth their rows.

    Args:
        lookup: in the text.
        confirm: the guesses of the same draft, whose rows take time, too.
        confident: the acceptance of a drafted token by its confidence.
        verify: seconds of a round by its rows.
        rate: tokens that a second is worth.
        longest: most seconds of the round, drafts included.
        filled: the rows that a number of them is filled up to.
    """

    def __init__(
        self,
        lookup: Lookup,
        confirm: LookupToConfirm,
        confident: Callable[[float], float],
        verify: CostTable,
        rate: float,
        longest: float,
        filled: Callable[[int], int] = lambda rows: rows,
    ) -> None:
        self._lookup, self._confirm, self._confident = lookup, confirm, confident
        self._verify, self._rate, self._longest, self._filled = verify, rate, longest, filled

    def __call__(self, drafted: Sequence[int], confidences: Sequence[float]) -> Sequence[int]:
        """The tokens after the text and the drafted ones, and padding."""
        match, rows = self._lookup.match_after(drafted), 1 + len(drafted)
        right = math.prod(map(self._confident, confidences))
        most = self._longest - self._confirm.spent(len(drafted))
        best, highest, gained = 0, 0.0, 0.0
        for count, chance in enumerate(self._lookup.survival(match, MOST_DRAFTED - len(drafted)), start=1):
            gained += right * chance
            worth = gained - self._rate * (self._verify[rows + count] - self._verify[rows])
            if worth >= highest and self._verify[rows + count] <= most:
                best, highest = count, worth
        found = tuple(self._lookup.tokens(match, best, drafted)) if best else ()
        return found + (PADDING,) * (self._filled(rows + best) - rows - len(found))
