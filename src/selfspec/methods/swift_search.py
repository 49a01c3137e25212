"""SWIFT's search over a stream of requests: its candidates, its best set, and when it ends."""

import statistics
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from selfspec.errors import StateError
from selfspec.methods.layer_search import (
    Observations,
    Point,
    generator_of,
    point_of,
    random_point,
    require_gaussian_process,
    skipped_by,
    suggest_point,
)
from selfspec.methods.settings import MethodSettings, fraction, setting
from selfspec.methods.skipping import (
    ENDS_HELP,
    RATIO_HELP,
    alternately_skipped,
    check_skipped,
    free_sublayers,
    starting_set,
)
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet

_RATIO_STEP = 0.05
_FEWEST_SCORES = 3


@dataclass(frozen=True)
class SwiftSearchSettings(MethodSettings):
    """Settings of SWIFT's search."""

    skip_ratio: float | None = fraction(
        None, f"share of the sublayers between first and last layer that drafts skip (r); {RATIO_HELP}"
    )
    ratio_rule: str = setting(
        "ours",
        "skip_ratio where none is given: by measurements (ours), or 0.45 and from 30 billion parameters on 0.5 (paper)",
        choices=("ours", "paper"),
    )
    fixed_ends: bool = setting(True, ENDS_HELP)
    start: str = setting(
        "even",
        "the first set: as many sublayers as the ratio says (even), or every second layer (alternate, authors' code)",
        choices=("even", "alternate"),
    )
    score_start: bool = setting(
        True,
        "score the first set in the first step (ours); false leaves it with the first candidate that predicts a token "
        "(equation 2)",
    )
    max_optimization_steps: int = setting(1000, "longest search, in steps of one forward each (S)", minimum=0)
    bayesian_interval: int = setting(
        25, "every n-th candidate comes from the Gaussian process, others are random (β)", minimum=1
    )
    patience: int = setting(300, "steps without a better set that end the search", minimum=1)
    max_matchness: float = fraction(0.95, "matchness above which the search ends")
    min_skip_ratio: float = fraction(0.4, "smallest ratio to which it is lowered while too little is accepted")
    acceptance_tolerance: float = fraction(0.7, "acceptance rate below which the ratio is lowered; 0 never lowers it")
    adjustment_interval: int = setting(100, "rounds between two such checks (the paper names none)", minimum=1)
    recheck_interval: int = setting(
        0, "rounds between checks of the set after the search; 0 never checks (the paper)", minimum=0
    )
    reopen_below: float = fraction(0.8, "matchness in such a check below which the search starts again")
    seed: int = setting(0, "fixes the sets that the search tries", minimum=0)


@dataclass
class _Progress:
    """The state of a search without the observations."""

    skip_ratio: float
    skipped: list[int]  # the best set so far, as sublayer indices
    matchness: float | None = None  # its score
    steps: int = 0
    begun: int = 0  # steps before the search last started again
    without_gain: int = 0  # steps since the last better score
    rounds: int = 0  # since the last check of acceptance; after the search's end, since the last check of the set
    drafted: int = 0  # tokens of these rounds
    accepted: int = 0


def expected_improvement(best: float, mean: float, deviation: float) -> float:
    """``E[max(0, X - best)]`` of a normally distributed ``X``."""
    if deviation == 0:
        return max(0.0, mean - best)
    normal, lead = statistics.NormalDist(), (mean - best) / deviation
    return deviation * (lead * normal.cdf(lead) + normal.pdf(lead))


class SwiftSearch:
    """The optimisation of SWIFT (section 4.1.2), shared by all requests of a stream and safe from several threads.

    The first set, uniform skipping, is scored in the first step. That is ours: by equation 2 and in the authors' code
    every step tries a candidate, and the first one that predicts a token replaces it (``score_start=false``).

    Its state belongs to the stream of requests, as in the authors' code and figure 6. Scores of different requests are
    compared directly: a set stays until another one has a higher score, on any request, and is not scored again before
    that.

    The skip ratio is lowered by 0.05 if less than ``acceptance_tolerance`` of the draft tokens of
    ``adjustment_interval`` rounds was accepted during the search (footnote in C.2; step and interval are ours). The
    search then continues from an evenly spread part of its best set, which is scored again.

    Paper and code do not define how a search that has ended adapts to other text, as figure 7 shows. With
    ``recheck_interval`` (ours) its set is scored again every n rounds, on the text of that time. If the score is too
    low the search starts again, and scores this set first.

    Attributes:
        start: the sublayers that the first set keeps.
        kept: those that the best set so far keeps; before any score ``start``.
    """

    def __init__(self, layer_count: int, settings: SwiftSearchSettings) -> None:
        assert settings.skip_ratio is not None, "the caller knows the model's size"
        self._settings = settings
        self._start_ratio: float = settings.skip_ratio
        self._layers = layer_count
        self._free = free_sublayers(layer_count, settings.fixed_ends)
        skipped = starting_set(layer_count, self._start_ratio, settings.fixed_ends)
        if settings.start == "alternate":
            skipped = alternately_skipped(layer_count)
        self.start = KeptSet.skipping(skipped, 2 * layer_count)
        self._lock = threading.Lock()
        self._observations = Observations(len(self._free))
        progress = _Progress(self._start_ratio, list(skipped))
        self._require_packages(progress)
        self._become(progress)

    @property
    def _count(self) -> int:
        """Sublayers that a candidate skips."""
        return max(1, int(len(self._free) * self._progress.skip_ratio))

    def skipped_by(self, point: Point) -> tuple[int, ...]:
        """The sublayer indices that a candidate skips, ascending."""
        return skipped_by(point, self._free)

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

    def expected_improvement(self) -> float | None:
        """By how much the next candidate is expected to raise the best score (Jones et al. 1998).

        Scores so far are taken as draws from a normal distribution.
        """
        with self._lock:
            best, scores = self._progress.matchness, self._observations.scores
        if best is None or len(scores) < _FEWEST_SCORES:
            return None
        return expected_improvement(best, statistics.fmean(scores), statistics.stdev(scores))

    def next_candidate(self) -> Point | None:
        """The set to score in this step (equation 2), or ``None`` once the search has ended."""
        with self._lock:
            if self.finished:
                return None
            progress = self._progress
            progress.steps += 1
            step, count = progress.steps, self._count
            # A set of a lowered ratio is always scored; the very first one only if it is to be.
            if progress.matchness is None and (self._settings.score_start or len(self._observations)):
                return point_of(progress.skipped, self._free)
            bayesian = step % self._settings.bayesian_interval == 0 and len(self._observations) > 0
            known = self._observations.table() if bayesian else None
        # Outside the lock, so that other requests do not wait for the Gaussian process.
        generator = generator_of(self._settings.seed, step)
        if known is None:
            return random_point(len(self._free), count, generator)
        return suggest_point(*known, count, generator)

    def observe(self, point: Point, matchness: float) -> None:
        """Records a candidate's score."""
        with self._lock:
            progress = self._progress
            self._observations.add(point, matchness)
            skipped = self.skipped_by(point)
            if len(skipped) not in (self._count, len(progress.skipped)):
                return  # a candidate from before the ratio was lowered
            # A first set that is not scored counts as one that predicts nothing.
            unscored = progress.matchness is None and skipped != tuple(progress.skipped)
            best = 0.0 if unscored else progress.matchness
            if best is None or matchness > best:
                progress.matchness, progress.without_gain = matchness, 0
                self._skip(skipped)
            else:
                progress.matchness = best
                progress.without_gain += 1

    def check_is_due(self) -> bool:
        """Whether the search has ended and its set is to be scored again; counts a round."""
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
        """Records the score of the set in use, and starts the search again if it is too low."""
        with self._lock:
            if not self.finished or matchness >= self._settings.reopen_below:
                return
            # Scores of other text no longer count. Steps continue, so that the random sets differ from those before.
            progress = self._progress
            progress.begun, progress.matchness, progress.without_gain = progress.steps, None, 0
            progress.rounds = progress.drafted = progress.accepted = 0
            self._observations = Observations(len(self._free))

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
        """The state of the search: progress as values, observations as tensors."""
        with self._lock:
            values = {"start_ratio": self._start_ratio, "layers": self._layers, **asdict(self._progress)}
            return LearnedState(values, self._observations.tensors())

    def restore(self, state: LearnedState) -> None:
        """Loads the state of a search of the same skip ratio over as many layers."""
        values = dict(state.values)
        for name, here in (("start_ratio", self._start_ratio), ("layers", self._layers)):
            if values.pop(name, None) != here:
                raise StateError(
                    f"the state was learned with another {name.replace('start', 'skip')} than {here}; learn it again"
                )
        progress = _check_progress(values, self._free)
        observations = Observations.from_tensors(state.tensors, len(self._free))
        self._require_packages(progress)
        with self._lock:
            self._observations = observations
            self._become(progress)

    def _require_packages(self, progress: _Progress) -> None:
        """Checks, before any request, that scikit-learn is installed if the search will need it."""
        interval, most = self._settings.bayesian_interval, self._settings.max_optimization_steps
        in_this_search = (progress.begun + most) // interval > progress.steps // interval
        in_a_later_one = most > 0 and self._settings.recheck_interval > 0
        if in_this_search or in_a_later_one:
            require_gaussian_process(
                "; or set max_optimization_steps below bayesian_interval and recheck_interval to 0"
            )

    def _become(self, progress: _Progress) -> None:
        self._progress = progress
        self._skip(tuple(progress.skipped))

    def _skip(self, skipped: tuple[int, ...]) -> None:
        self._progress.skipped = list(skipped)
        self.kept = KeptSet.skipping(skipped, 2 * self._layers)

    def _step_down(self) -> None:
        progress = self._progress
        ratio = max(self._settings.min_skip_ratio, progress.skip_ratio - _RATIO_STEP)
        if ratio >= progress.skip_ratio:
            return
        progress.skip_ratio = ratio
        if (count := self._count) < len(progress.skipped):
            spread = np.linspace(0, len(progress.skipped) - 1, count).round().astype(int)
            self._skip(tuple(progress.skipped[index] for index in spread))
            progress.matchness, progress.without_gain = None, 0


def _check_progress(values: Mapping[str, Any], free: range) -> _Progress:
    """Progress from a state's values, all of them checked."""
    if values.keys() != {field.name for field in fields(_Progress)}:
        raise StateError("the state is not of this version of SWIFT's search; learn it again")
    counts = [values[name] for name in ("steps", "begun", "without_gain", "rounds", "drafted", "accepted")]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise StateError("the state's counts are no whole numbers; learn it again")
    shares = [values["skip_ratio"], 0.0 if values["matchness"] is None else values["matchness"]]
    if not all(type(share) is float and 0 <= share <= 1 for share in shares):
        raise StateError("the state's skip ratio or matchness is no share; learn it again")
    skipped = check_skipped(values["skipped"], free, 1, len(free))
    return _Progress(**{**values, "skipped": list(skipped)})
