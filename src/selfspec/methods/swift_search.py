"""SWIFT's search over a stream of requests: what it tries next, what it keeps, when it ends."""

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from selfspec.errors import StateError
from selfspec.methods.layer_search import (
    Observations,
    Point,
    check_skipped,
    free_sublayers,
    generator_of,
    point_of,
    random_point,
    skipped_by,
    starting_set,
    suggest_point,
)
from selfspec.methods.settings import MethodSettings, setting
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet

_RATIO_STEP = 0.05


@dataclass(frozen=True)
class SwiftSearchSettings(MethodSettings):
    """Settings of SWIFT's search."""

    skip_ratio: float = setting(
        0.45, "share of the sublayers between first and last layer that drafts skip (r)", minimum=0.0, maximum=1.0
    )
    max_optimization_steps: int = setting(1000, "longest search, in steps of one forward each (S)", minimum=0)
    bayesian_interval: int = setting(
        25, "every so-manieth step asks the Gaussian process, the others try a random set (β)", minimum=1
    )
    patience: int = setting(300, "steps without a better set that end the search", minimum=1)
    max_matchness: float = setting(0.95, "matchness above which the search ends", minimum=0.0, maximum=1.0)
    min_skip_ratio: float = setting(
        0.4, "the ratio steps down to this while too little is accepted", minimum=0.0, maximum=1.0
    )
    acceptance_tolerance: float = setting(
        0.7, "acceptance rate under which the ratio steps down; 0 never does", minimum=0.0, maximum=1.0
    )
    adjustment_interval: int = setting(
        100, "rounds of the search after which acceptance is looked at (the paper leaves it open)", minimum=1
    )
    recheck_interval: int = setting(
        0, "rounds between checks of the set once the search has ended; 0 never checks it, as in the paper", minimum=0
    )
    reopen_below: float = setting(
        0.8, "matchness in such a check under which the search begins anew", minimum=0.0, maximum=1.0
    )
    seed: int = setting(0, "fixes the sets that the search tries", minimum=0)


@dataclass
class _Progress:
    """Where a search stands: all of it but the observations.

    Attributes:
        skip_ratio: the present one.
        skipped: the best set so far, as sublayer indices.
        matchness: its score; ``None`` while it has none.
        steps: candidates handed out.
        begun: how many of them were handed out before the search began anew.
        without_gain: scores since the last better one.
        rounds: rounds of the search since acceptance was last looked at; after its end, since the set was last checked.
        drafted: their draft tokens.
        accepted: how many of those were accepted.
    """

    skip_ratio: float
    skipped: list[int]
    matchness: float | None = None
    steps: int = 0
    begun: int = 0
    without_gain: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class SwiftSearch:
    """The optimisation of SWIFT (section 4.1.2), shared by all requests of a stream and safe from several threads.

    The set to start from, uniform skipping, is scored first. That is ours: figure 6 draws its matchness, but the
    authors' code takes the first random set for better than it.

    The best set, its score, the steps, the steps without a gain and the Gaussian process's observations belong to the
    stream, not to a request, as in the authors' code and figure 6. (Section 4.1.1 says of an instance that it begins
    with uniform skipping; so does the stream.) Scores of different requests are compared as they are: a set stays until
    another scores higher on whatever request it is tried in, and is not scored anew in between.

    The skip ratio steps down by 0.05 where less than ``acceptance_tolerance`` of the draft tokens of
    ``adjustment_interval`` rounds was accepted while searching (footnote in C.2; step and interval are ours). The
    search then goes on from an evenly spread part of its best set, which is scored anew.

    Neither paper nor code says how a search that has ended notices that the text is of another kind now, as in figure
    7. With ``recheck_interval`` (ours) its set is scored again every so many rounds, on the text of then, and where it
    is no good the search begins anew, with this set as the first to beat.

    Args:
        layer_count: layers of the model.
        settings: those of the search.

    Raises:
        InvalidSettingError: the ratio skips nothing in this model.
    """

    def __init__(self, layer_count: int, settings: SwiftSearchSettings) -> None:
        self._settings = settings
        self._layers = layer_count
        self._free = free_sublayers(layer_count)
        skipped = starting_set(layer_count, settings.skip_ratio)
        self._lock = threading.Lock()
        self._observations = Observations(self._free)
        self._become(_Progress(settings.skip_ratio, list(skipped)))

    @property
    def kept(self) -> KeptSet:
        """What the best set so far leaves to run."""
        return self._kept

    @property
    def matchness(self) -> float | None:
        """The score of the best set so far; ``None`` while it has none."""
        return self._progress.matchness

    @property
    def skip_ratio(self) -> float:
        """The present skip ratio."""
        return self._progress.skip_ratio

    @property
    def steps(self) -> int:
        """Optimisation steps so far."""
        return self._progress.steps

    @property
    def finished(self) -> bool:
        """Whether the search has ended, by any of its three rules."""
        progress, settings = self._progress, self._settings
        good_enough = progress.matchness is not None and progress.matchness > settings.max_matchness
        out_of_steps = progress.steps - progress.begun >= settings.max_optimization_steps
        return good_enough or out_of_steps or progress.without_gain >= settings.patience

    def next_candidate(self) -> Point | None:
        """The set to score in this step (equation 2), or ``None`` once the search has ended."""
        with self._lock:
            if self.finished:
                return None
            progress = self._progress
            progress.steps += 1
            step, count = progress.steps, len(progress.skipped)
            if progress.matchness is None:
                return point_of(progress.skipped, self._free)
            bayesian = step % self._settings.bayesian_interval == 0 and len(self._observations) > 0
            known = self._observations.table() if bayesian else None
        # Outside the lock: other requests need not wait for a Gaussian process.
        generator = generator_of(self._settings.seed, step)
        if known is None:
            return random_point(self._free, count, generator)
        return suggest_point(*known, count, generator)

    def observe(self, point: Point, matchness: float) -> None:
        """Takes a candidate's score."""
        with self._lock:
            progress = self._progress
            self._observations.add(point, matchness)
            skipped = skipped_by(point)
            if len(skipped) != len(progress.skipped):
                return  # handed out before the ratio stepped down
            if progress.matchness is None or matchness > progress.matchness:
                progress.matchness, progress.without_gain = matchness, 0
                self._skip(skipped)
            else:
                progress.without_gain += 1

    def check_is_due(self) -> bool:
        """Whether the search has ended and, counting this round, its set is to be scored once more."""
        with self._lock:
            progress, settings = self._progress, self._settings
            if not settings.recheck_interval or not settings.max_optimization_steps or not self.finished:
                return False
            progress.rounds += 1
            due = progress.rounds >= settings.recheck_interval
            if due:
                progress.rounds = 0
            return due

    def note_check(self, matchness: float) -> None:
        """Takes the score of the set in use; begins anew where it is too low."""
        with self._lock:
            if not self.finished or matchness >= self._settings.reopen_below:
                return
            # Scores of other text count no more. Steps count on, so that other sets are tried than before.
            progress = self._progress
            progress.begun, progress.matchness, progress.without_gain = progress.steps, None, 0
            progress.rounds = progress.drafted = progress.accepted = 0
            self._observations = Observations(self._free)

    def note_round(self, drafted: int, accepted: int) -> None:
        """Counts a round's draft tokens and how many of them were accepted."""
        with self._lock:
            progress, settings = self._progress, self._settings
            if self.finished or not progress.steps or not drafted:
                return
            progress.rounds += 1
            progress.drafted += drafted
            progress.accepted += accepted
            if progress.rounds < settings.adjustment_interval:
                return
            if progress.accepted < settings.acceptance_tolerance * progress.drafted:
                self._step_down()
            progress.rounds = progress.drafted = progress.accepted = 0

    def state(self) -> LearnedState:
        """The search so far: progress as values, observations as tensors."""
        with self._lock:
            values = {"start_ratio": self._settings.skip_ratio, "layers": self._layers, **asdict(self._progress)}
            return LearnedState(values, self._observations.tensors())

    def restore(self, state: LearnedState) -> None:
        """Takes up a search.

        Raises:
            StateError: it is no search of this skip ratio over this many layers.
        """
        values = dict(state.values)
        for name, here in (("start_ratio", self._settings.skip_ratio), ("layers", self._layers)):
            if values.pop(name, None) != here:
                raise StateError(
                    f"the state was learned with another {name.replace('start', 'skip')} than {here}; learn it anew"
                )
        progress = _check_progress(values, self._free)
        observations = Observations.from_tensors(state.tensors, self._free)
        with self._lock:
            self._observations = observations
            self._become(progress)

    def _become(self, progress: _Progress) -> None:
        self._progress = progress
        self._skip(tuple(progress.skipped))

    def _skip(self, skipped: tuple[int, ...]) -> None:
        self._progress.skipped = list(skipped)
        self._kept = KeptSet.skipping(skipped, 2 * self._layers)

    def _step_down(self) -> None:
        progress = self._progress
        ratio = max(self._settings.min_skip_ratio, progress.skip_ratio - _RATIO_STEP)
        count = max(1, int(self._free * ratio))
        if ratio >= progress.skip_ratio:
            return
        progress.skip_ratio = ratio
        if count < len(progress.skipped):
            spread = np.linspace(0, len(progress.skipped) - 1, count).round().astype(int)
            self._skip(tuple(progress.skipped[index] for index in spread))
            progress.matchness, progress.without_gain = None, 0


def _check_progress(values: Mapping[str, Any], free: int) -> _Progress:
    """Progress from a state's values.

    Raises:
        StateError: a value is missing, of the wrong type or out of range.
    """
    if values.keys() != {field.name for field in fields(_Progress)}:
        raise StateError("the state is not of this version of SWIFT's search; learn it anew")
    counts = [values[name] for name in ("steps", "begun", "without_gain", "rounds", "drafted", "accepted")]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise StateError("the state's counts are no whole numbers; learn it anew")
    shares = [values["skip_ratio"], 0.0 if values["matchness"] is None else values["matchness"]]
    if not all(type(share) is float and 0 <= share <= 1 for share in shares):
        raise StateError("the state's skip ratio or matchness is no share; learn it anew")
    check_skipped(values["skipped"], free)
    return _Progress(**{**values, "skipped": list(values["skipped"])})
