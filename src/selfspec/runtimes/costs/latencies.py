"""Latency profiles of the target and of what drafts, measured again where rounds disagree with them."""

import threading
from typing import Any

from selfspec.errors import StateError
from selfspec.model.kept import KeptSet
from selfspec.runtimes.accelerators import device_name
from selfspec.runtimes.costs.parts import LatencyProfile, measure_latencies
from selfspec.runtimes.costs.store import keep_latencies, kept_latencies, read_latencies
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

_WEIGHT = 0.1
_FARTHEST = 1.5

CLEARLY_FASTER = 1.5
"""Latencies are measured again once rounds take less than their predicted seconds divided by this."""

_PROFILE = "latency_profile"


class Latencies:
    """Latency profiles of the target and of the weights that draft: kept ones, or else measured when first needed.

    A profile holds minima, so no round should be faster than it predicts. The target's is measured again if live
    rounds are clearly faster (``CLEARLY_FASTER``): then it was measured while the machine was busy or throttled, which
    also distorts the ratio of attention and MLP. Slower rounds change nothing. May be used by several threads.

    How much slower rounds are moves by a tenth of the way with each. Ratios beyond 1.5 count as 1.5, so that one
    disturbed round moves it little.
    """

    def __init__(self, target: Target, precision: Precision | None) -> None:
        self._target, self._precision = target, precision
        self._load = 1.0
        self._lock = threading.Lock()
        self._profile: LatencyProfile | None = None
        self._draft_profile: LatencyProfile | None = None

    @property
    def of_target(self) -> LatencyProfile:
        """The latencies of the model."""
        with self._lock:
            if self._profile is None:
                self._profile = read_latencies(self._target) or self._measure()
            elif self._load < 1 / CLEARLY_FASTER:
                self._profile = self._measure()
            return self._profile

    @property
    def of_drafts(self) -> LatencyProfile:
        """The latencies of the weights that draft."""
        if self._precision is None:
            return self.of_target
        with self._lock:
            if self._draft_profile is None:
                self._draft_profile = kept_latencies(self._target, self._precision)
            return self._draft_profile

    def _measure(self) -> LatencyProfile:
        latencies = measure_latencies(self._target)
        self._load = 1.0
        keep_latencies(self._target, latencies)
        return latencies

    def note_round(self, kept: KeptSet | None, drafted: int, context: int, seconds: float) -> None:
        """Compares the seconds of a round, in a batch those of all requests' rounds, with the latencies."""
        with self._lock:
            profile = self._profile
            if profile is not None:
                drafts = self._draft_profile or profile
                drafting = drafted * drafts.draft_step(kept, context) if kept is not None else 0.0
                ratio = seconds / (self._load * (drafting + profile.target_step(context)))
                self._load *= 1 + _WEIGHT * (min(_FARTHEST, max(1 / _FARTHEST, ratio)) - 1)

    def adopt(self, profile: LatencyProfile | None) -> None:
        """Uses a profile of the model from a saved state; with ``None`` it is read or measured when next needed."""
        with self._lock:
            self._load, self._profile = 1.0, profile

    def values(self) -> dict[str, Any]:
        """The profile of the model as values of a saved state, if there is one yet; see ``saved_latencies``."""
        with self._lock:
            return {_PROFILE: None if self._profile is None else self._profile.to_dict()}


def saved_latencies(values: Any, target: Target) -> LatencyProfile | None:
    """The profile in the values of a saved state (``Latencies.values``); ``None`` if there was none yet."""
    saved = values.get(_PROFILE, {})
    if saved is None:
        return None
    try:
        profile = LatencyProfile.from_dict(saved)
    except ValueError as error:
        raise StateError(f"the state holds no latency profile: {error}; learn it again") from error
    if not profile.fits(target):
        raise StateError(
            f"the latencies were measured on {profile.device} with {profile.layers} layers in {profile.dtype}, not for "
            f"this model on {device_name(target.device)}; learn them again"
        )
    return profile
