"""Search for a set of skipped sublayers: random search, and Bayesian optimisation over {0, 1}^free.

A *point* is a bool array ``[free]`` over the sublayers that may be skipped, true for a skipped one: coordinate ``j`` is
sublayer ``free[j]``. SWIFT searches points with a fixed number of skipped sublayers during generation. Draft & Verify
searches all points, offline.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from selfspec.errors import MissingPackageError, StateError

Point = npt.NDArray[np.bool_]
"""Bool ``[free]``."""

KAPPA = 2.5
"""Weight of the deviation in the upper confidence bound (SWIFT's code)."""

DRAFT_VERIFY_KAPPA = 2.576
"""The same in Draft & Verify's code, which takes the default of the bayesian-optimization package of its time."""

MOST_OBSERVATIONS = 256
"""Most observations of the Gaussian process, the last ones. The time to fit it grows with the cube of their number."""

_NOISE = 1e-2  # alpha of both papers' code, in units of the scores' variance
_LENGTH_SCALES = (0.25, 0.5, 1.0, 2.0)
_POOL, _ROUNDS = 256, 4


def point_of(skipped: Iterable[int], free: range) -> Point:
    """The point of skipped sublayer indices."""
    point = np.zeros(len(free), dtype=np.bool_)
    point[[index - free.start for index in skipped]] = True
    return point


def skipped_by(point: Point, free: range) -> tuple[int, ...]:
    """The sublayer indices that a point skips, ascending."""
    return tuple(free[index] for index in np.flatnonzero(point))


def generator_of(seed: int, step: int) -> np.random.Generator:
    """The random generator of one step of a search. Each step has its own, so a loaded search continues as it would."""
    return np.random.default_rng((seed, step))


def random_point(free: int, count: int, generator: np.random.Generator) -> Point:
    """Random search: a point that skips ``count`` sublayers, all such points being equally likely."""
    point: Point = discretise(generator.random((1, free)), count)[0]
    return point


def discretise(values: npt.NDArray[np.float64], count: int | None) -> npt.NDArray[np.bool_]:
    """Rounds continuous vectors ``[points, free]`` to points, bool ``[points, free]``.

    Skips the ``count`` coordinates of highest value (SWIFT's code); for ``None`` those above 0.5 (Draft & Verify's).
    """
    if count is None:
        return values > 0.5
    ranks = (-values).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return ranks < count


class Observations:
    """The last scored points, oldest first."""

    def __init__(self, free: int) -> None:
        self.free = free
        self._scored: deque[tuple[Point, float]] = deque(maxlen=MOST_OBSERVATIONS)

    def __len__(self) -> int:
        return len(self._scored)

    def add(self, point: Point, score: float) -> None:
        """Adds a scored point; removes the oldest one above ``MOST_OBSERVATIONS``."""
        self._scored.append((point, score))

    @property
    def scores(self) -> list[float]:
        """The scores alone."""
        return [score for _, score in self._scored]

    def table(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        """Points ``[n, free]`` and scores ``[n]``."""
        points = np.array([point for point, _ in self._scored], dtype=np.bool_).reshape(-1, self.free)
        return points, np.array([score for _, score in self._scored], dtype=np.float64)

    def tensors(self) -> dict[str, torch.Tensor]:
        """As a state file has them: ``points`` uint8 ``[n, free]`` and ``scores`` float64 ``[n]``."""
        points, scores = self.table()
        return {
            "points": torch.tensor(points, dtype=torch.uint8),
            "scores": torch.tensor(scores.tolist(), dtype=torch.float64),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], free: int) -> "Observations":
        """Observations of ``free`` coordinates from ``tensors``; refuses any others."""
        points, scores = tensors.get("points"), tensors.get("scores")
        if points is None or scores is None or points.dtype != torch.uint8 or scores.dtype != torch.float64:
            raise StateError("the state has no observations of a search; learn it again")
        fits = points.dim() == 2 and points.shape[1] == free and scores.shape == points.shape[:1]
        if not fits or int(points.amax() if points.numel() else 0) > 1 or not bool(scores.isfinite().all()):
            raise StateError(f"the state's observations are not of {free} sublayers; learn it again")
        observations = cls(free)
        for point, score in zip(points.bool().numpy(), scores.tolist(), strict=True):
            observations.add(point, score)
        return observations


def require_gaussian_process(remedy: str = "") -> None:
    """Imports scikit-learn, so that no request waits for the import; the error says how to install it."""
    try:
        import sklearn.gaussian_process  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "Bayesian optimisation needs scikit-learn; install it by `pip install 'selfspec[search]'`" + remedy
        ) from error


def suggest_point(
    points: npt.NDArray[np.bool_],
    scores: npt.NDArray[np.float64],
    count: int | None,
    generator: np.random.Generator,
    kappa: float = KAPPA,
) -> Point:
    """Bayesian optimisation: the point of highest upper confidence bound under a Gaussian process.

    The bound ``mean + kappa · deviation`` is maximised over continuous vectors, at the points that they are rounded to
    (``discretise``): first over [0, 1]^free, then around the best point scored so far, then around the point of highest
    bound.

    ``points``, ``[n, free]``, and ``scores``, ``[n]``, are those so far, at least one. The result skips ``count``
    sublayers (``None``: any number), and is not scored yet, if such a point was found.
    """
    require_gaussian_process()
    process = _fit(points, scores)
    values = generator.random((_POOL, points.shape[1]))
    leader: Point = discretise(values[:1], count)[0]
    highest = -np.inf
    centre = points[scores.argmax()]
    for _ in range(_ROUNDS):
        pool = discretise(values, count)
        mean, deviation = process.predict(_scaled(pool), return_std=True)
        bound = np.where(_known(pool, points), -np.inf, mean + kappa * deviation)
        if bound.max() > highest:
            leader, highest = pool[bound.argmax()], bound.max()
        spread = generator.uniform(0.2, 0.8, (_POOL, 1))
        values = centre + spread * generator.standard_normal((_POOL, points.shape[1]))
        centre = leader
    return leader


def _fit(points: npt.NDArray[np.bool_], scores: npt.NDArray[np.float64]) -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    process = GaussianProcessRegressor(
        Matern(nu=2.5), alpha=_NOISE, normalize_y=True, optimizer=_most_likely_length_scale
    )
    return process.fit(_scaled(points), scores)


def _most_likely_length_scale(negative_log_likelihood: Any, *_: Any, **__: Any) -> tuple[Any, float]:
    """The kernel's one parameter, from a short list: a gradient method would take dozens of factorisations."""
    thetas = [np.log([length]) for length in _LENGTH_SCALES]
    losses = [float(negative_log_likelihood(theta, eval_gradient=False)) for theta in thetas]
    best = int(np.argmin(losses))
    return thetas[best], losses[best]


def _scaled(points: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Points scaled to distances of 0 to 1, so that the length scales fit any number of layers."""
    scaled: npt.NDArray[np.float64] = points / np.sqrt(points.shape[1])
    return scaled


def _known(pool: npt.NDArray[np.bool_], points: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether each of the pool ``[pool, free]`` is among the points: bool ``[pool]``."""
    return cast("npt.NDArray[np.bool_]", (pool[:, None] == points[None]).all(axis=2).any(axis=1))
