"""The latencies that KnapSpec selects by, of the model and of the weights that draft."""

import threading
from typing import Any

from selfspec.errors import StateError
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.latency import LatencyProfile, device_name, measure_latencies
from selfspec.runtimes.latency_check import LatencyCheck
from selfspec.runtimes.latency_store import keep_latencies, kept_latencies, read_latencies
from selfspec.runtimes.precision import AnyPrecision
from selfspec.runtimes.target import Target

_PROFILE = "latency_profile"


class Latencies:
    """Latency profiles of a model, measured when they are first needed. May be used by several threads.

    Args:
        target: the model.
        precision: of the weights that draft; ``None`` for the model's own.
    """

    def __init__(self, target: Target, precision: AnyPrecision | None) -> None:
        self._target, self._precision = target, precision
        self._check = LatencyCheck()
        self._lock = threading.Lock()
        self._profile: LatencyProfile | None = None
        self._draft_profile: LatencyProfile | None = None

    @property
    def of_target(self) -> LatencyProfile:
        """The latencies of the model: kept ones, or else measured when first needed and kept.

        They are measured again where live rounds contradict them.
        """
        with self._lock:
            if self._profile is None:
                self._profile = read_latencies(self._target) or self._measure()
            elif self._check.fails:
                self._profile = self._measure()
            return self._profile

    @property
    def of_drafts(self) -> LatencyProfile:
        """The latencies of the weights that draft: kept ones, or else measured when first needed and kept."""
        if self._precision is None:
            return self.of_target
        with self._lock:
            if self._draft_profile is None:
                self._draft_profile = kept_latencies(self._target, self._precision)
            return self._draft_profile

    def _measure(self) -> LatencyProfile:
        latencies = measure_latencies(self._target)
        self._check.reset()
        keep_latencies(self._target, latencies)
        return latencies

    def note_round(self, kept: KeptSet | None, drafted: int, context: int, seconds: float) -> None:
        """Compares the time of a round with the latencies.

        Args:
            kept: what drafted; ``None`` where nothing did.
            drafted: its draft tokens.
            context: tokens in the cache.
            seconds: what the round took. In a batch this is the time of all requests' rounds.
        """
        with self._lock:
            profile = self._profile
            draft_profile = self._draft_profile or profile
        if profile is not None and draft_profile is not None:
            drafting = drafted * draft_profile.draft_step(kept, context) if kept is not None else 0.0
            self._check.note(drafting + profile.target_step(context), seconds)

    def adopt(self, profile: LatencyProfile | None) -> None:
        """Takes a profile of the model that was read from a state; with ``None`` it is measured when next needed."""
        with self._lock:
            self._check.reset()
            self._profile = profile

    def values(self) -> dict[str, Any]:
        """The profile of the model as values of a ``LearnedState``, if there is one yet; see ``read_profile``."""
        with self._lock:
            return {_PROFILE: None if self._profile is None else self._profile.to_dict()}


def read_profile(state: LearnedState, target: Target) -> LatencyProfile | None:
    """The profile in a saved state; ``None`` if it was saved before there was one.

    Args:
        state: with what ``Latencies.values`` gave.
        target: the model that the profile has to be of.

    Raises:
        StateError: it is damaged, or was measured on another device or in another dtype.
    """
    values: Any = state.values.get(_PROFILE, {})
    if values is None:  # it was saved before the method ran
        return None
    try:
        profile = LatencyProfile.from_dict(values)
    except ValueError as error:
        raise StateError(f"the state holds no latency profile: {error}; learn it again") from error
    if not profile.fits(target):
        raise StateError(
            f"the latencies were measured on {profile.device} with {profile.layers} layers in {profile.dtype}, not for "
            f"this model on {device_name(target.device)}; learn them again"
        )
    return profile
