"""How likely draft tokens are accepted: tables that learn from every verified token."""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from selfspec.errors import StateError


@dataclass(frozen=True)
class Feature:
    """A number that tells likely draft tokens from unlikely ones, cut into buckets.

    Attributes:
        edges: ascending; bucket ``i`` ends before ``edges[i]``, the last one has no end.
        prior: acceptance to expect in each bucket before anything is known.
    """

    edges: tuple[float, ...]
    prior: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.prior) == len(self.edges) + 1

    def bucket(self, value: float) -> int:
        """The bucket of a value."""
        return bisect_right(self.edges, value)


MATCH_LENGTH = Feature(edges=(2, 3, 4, 5, 7, 10, 16, 24), prior=(0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.93))
"""Tokens of a match in the text so far, after which a copied token stands."""

CONFIDENCE = Feature(
    edges=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995),
    prior=(0.1, 0.25, 0.4, 0.5, 0.58, 0.66, 0.74, 0.81, 0.88, 0.94, 0.97, 0.985, 0.995),
)
"""Largest probability of the draft at a token."""

ANY = Feature(edges=(), prior=(0.7,))
"""A layer draft's token before it is drafted, where nothing is known of it."""


class SharedAcceptance:
    """Acceptance by bucket over all requests of a method; from several threads.

    Each bucket starts with its prior as ``prior_weight`` tokens, and forgets: its weight never exceeds ``memory``.

    Args:
        feature: the buckets.
        prior_weight: tokens that the prior counts for.
        memory: tokens that it remembers.
    """

    def __init__(self, feature: Feature, prior_weight: float = 4.0, memory: float = 400.0) -> None:
        self.feature = feature
        self._memory = memory
        self._lock = threading.Lock()
        self._trials = [prior_weight] * len(feature.prior)
        self._accepted = [prior_weight * prior for prior in feature.prior]
        self._rates = list(feature.prior)

    def rate(self, bucket: int) -> float:
        """Acceptance to expect in a bucket, 0 to 1."""
        return self._rates[bucket]  # one read needs no lock, and every round reads many

    def note(self, bucket: int, accepted: bool) -> None:
        """Counts a verified token."""
        with self._lock:
            kept = min(1.0, (self._memory - 1) / self._trials[bucket])
            self._trials[bucket] = self._trials[bucket] * kept + 1
            self._accepted[bucket] = self._accepted[bucket] * kept + accepted
            self._rates[bucket] = self._accepted[bucket] / self._trials[bucket]

    def to_lists(self) -> list[list[float]]:
        """Trials and accepted tokens of each bucket, for a state file."""
        with self._lock:
            return [list(self._trials), list(self._accepted)]

    def restore(self, lists: Sequence[Sequence[float]]) -> None:
        """Loads what ``to_lists`` gave.

        Raises:
            StateError: it is not that.
        """
        try:
            trials, accepted = ([float(number) for number in numbers] for numbers in lists)
        except (TypeError, ValueError):
            raise StateError("the state's acceptance is damaged: it needs two lists of numbers; delete it") from None
        fits = len(trials) == len(accepted) == len(self.feature.prior)
        if not fits or not all(
            0 <= yes <= all_ and 0 < all_ <= 1e9 for yes, all_ in zip(accepted, trials, strict=True)
        ):
            raise StateError("the state's acceptance is damaged: accepted tokens exceed trials; delete it")
        with self._lock:
            self._trials, self._accepted = trials, accepted
            self._rates = [yes / all_ for yes, all_ in zip(accepted, trials, strict=True)]


class Acceptance:
    """Acceptance by bucket within one request.

    What all requests have seen is its prior. Its own tokens count more, the latest most, since texts differ more than
    their parts do.

    Args:
        shared: of all requests; learns with it.
        weight: own tokens that the shared rate counts for.
        memory: own tokens that a bucket remembers.
    """

    def __init__(self, shared: SharedAcceptance, weight: float = 3.0, memory: float = 24.0) -> None:
        self._shared = shared
        self._weight = weight
        self._memory = memory
        count = len(shared.feature.prior)
        self._trials, self._accepted = [0.0] * count, [0.0] * count
        last = int(max(shared.feature.edges, default=0))
        self._buckets = [shared.feature.bucket(value) for value in range(last + 1)]

    def rate(self, value: float = 0.0) -> float:
        """Acceptance to expect, 0 to 1.

        Args:
            value: of the feature.
        """
        return self._rate(self._shared.feature.bucket(value))

    def rates(self, first: int, count: int) -> Iterator[float]:
        """Acceptance to expect at successive whole numbers of the feature.

        Args:
            first: the first of them.
            count: how many.
        """
        rates, last = [self._rate(bucket) for bucket in range(len(self._trials))], len(self._buckets) - 1
        for value in range(first, first + count):
            yield rates[self._buckets[min(value, last)]]

    def _rate(self, bucket: int) -> float:
        prior = self._shared.rate(bucket)
        return (self._weight * prior + self._accepted[bucket]) / (self._weight + self._trials[bucket])

    def note(self, accepted: bool, value: float = 0.0) -> None:
        """Counts a verified token.

        Args:
            accepted: whether it was accepted.
            value: of the feature.
        """
        bucket = self._shared.feature.bucket(value)
        self._shared.note(bucket, accepted)
        self._fade(bucket, min(1.0, (self._memory - 1) / max(self._trials[bucket], 1e-9)))
        self._trials[bucket] += 1
        self._accepted[bucket] += accepted

    def fade(self, share: float) -> None:
        """Forgets a share of the own tokens, so that what failed is tried again some time.

        Args:
            share: 0 to 1.
        """
        for bucket in range(len(self._trials)):
            self._fade(bucket, 1 - share)

    def _fade(self, bucket: int, kept: float) -> None:
        self._trials[bucket] *= kept
        self._accepted[bucket] *= kept
