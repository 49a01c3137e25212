"""What ``auto`` finds out about a model and a machine before the first request, once, and keeps."""

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from selfspec.errors import NoCopiesWarning, OutOfMemoryError, UnsupportedModelError
from selfspec.memory import available_bytes
from selfspec.methods.auto.assignments import Assignment, Trial, candidates, choose, try_assignments
from selfspec.methods.auto.own_text import write_text
from selfspec.methods.auto.row_costs import RowCosts, measure_row_costs
from selfspec.model.kept import KeptSet
from selfspec.runtimes.latency_store import profile_path, read_kept, write_kept
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

_FORMAT = 3
"""Of what is kept; raised where trials or their meaning change, so that all machines find out again."""

_TEXT = 192
_SHARE_FOR_TEXT = 0.25
_FREE_SHARE = 0.5


@dataclass(frozen=True)
class LayerTrial:
    """The layer draft that promised most, and what was seen of it.

    Attributes:
        assignment: what drafts.
        agreement: share of its choices that were the target's, on a text of the model's own.
        costs: of its forwards.
        confidences: at each token of that text its largest probability, and whether its choice was the target's.
    """

    assignment: Assignment
    agreement: float
    costs: RowCosts
    confidences: tuple[tuple[float, bool], ...]


@dataclass(frozen=True)
class Preparation:
    """What is known before the first request.

    Attributes:
        verify: costs of the target's forward.
        layers: the layer draft to take; ``None`` where every one is slower than plain decoding.
        lacking_bytes: what low-bit copies take at least, where none were tried since there is no memory for them;
            0 otherwise.
    """

    verify: RowCosts
    layers: LayerTrial | None
    lacking_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preparation":
        """From the result of ``to_dict``.

        Raises:
            ValueError, TypeError, KeyError: it is not that.
        """
        layers = values["layers"]
        found = None if layers is None else _layer_trial(layers)
        return cls(_costs(values["verify"]), found, int(values["lacking_bytes"]))


@dataclass(frozen=True)
class Terms:
    """What a preparation may try.

    Attributes:
        group: inputs of a weight row that share a scale.
        most_bytes: of low-bit copies; ``None`` is half of the memory that is available.
        most_seconds: begin no further trial after this time.
    """

    group: int = 32
    most_bytes: float | None = None
    most_seconds: float = 10.0


def prepare(
    target: Target,
    terms: Terms,
    progress: Callable[[str], None] = lambda _: None,
) -> Preparation:
    """Reads what was found out about this model on this machine; without it, finds it out and keeps it.

    Args:
        target: the model.
        terms: what may be tried.
        progress: is told what goes on, before each part that may take long.

    Returns:
        What was found out. Where there is no memory for low-bit copies, ``NoCopiesWarning`` says so, unless ``terms``
        ask for none.
    """
    kept = _read(target, terms)
    if kept is None:
        kept = _find_out(target, terms, progress)
        write_kept(_path(target), target, {"format": _FORMAT, "terms": asdict(terms), **kept.to_dict()})
    kept = with_copies(target, kept, progress)
    if kept.lacking_bytes and terms.most_bytes != 0:
        warnings.warn(_complaint(kept.lacking_bytes, terms.most_bytes), NoCopiesWarning, stacklevel=2)
    return kept


def _complaint(needed: int, most_bytes: float | None) -> str:
    limit = "the memory that is available allows" if most_bytes is None else "memory_limit allows"
    return (
        f"auto drafts without low-bit copies of the weights: they take {needed / 2**20:.0f} MiB, more than {limit}; "
        "raise memory_limit or free memory, or set memory_limit=0 to do without them"
    )


def _find_out(target: Target, terms: Terms, progress: Callable[[str], None]) -> Preparation:
    progress("forwards of several rows")
    verify = measure_row_costs(target, range(target.sublayer_count))
    limit = _limit(terms)
    length = max(16, min(_TEXT, int(_SHARE_FOR_TEXT * terms.most_seconds / verify(1)), target.context_limit))
    progress("drafts on a text of the model's own")
    trials = try_assignments(
        target,
        candidates(target, group=terms.group),
        write_text(target, min(length, target.context_limit)),
        verify,
        most_seconds=terms.most_seconds,
        fits=lambda assignment: target.low_bit_bytes(assignment.precision) <= limit,
    )
    best = choose(trials)
    chosen = best if best is not None and best.tokens_per_second > 1 / verify(1) else None
    target.release_copies(None if chosen is None else chosen.assignment.precision)
    return Preparation(verify, None if chosen is None else _as_layer_trial(chosen), _lacking(target, terms, limit))


def _limit(terms: Terms) -> float:
    """Most bytes of low-bit copies."""
    available = available_bytes()
    most = math.inf if terms.most_bytes is None else terms.most_bytes
    share = _FREE_SHARE if terms.most_bytes is None else 1.0
    return most if available is None else min(most, share * available)


def _lacking(target: Target, terms: Terms, limit: float) -> int:
    """Bytes of the smallest low-bit copies that candidates draft with, if they exceed the limit, else 0."""
    needed = []
    for assignment in candidates(target, group=terms.group):
        with contextlib.suppress(UnsupportedModelError):
            needed.append(target.low_bit_bytes(assignment.precision))
    smallest = min(filter(None, needed), default=0)
    return smallest if smallest > limit else 0


def _as_layer_trial(trial: Trial) -> LayerTrial:
    return LayerTrial(trial.assignment, trial.agreement, trial.costs, trial.confidences)


def with_copies(
    target: Target, preparation: Preparation, progress: Callable[[str], None] = lambda _: None
) -> Preparation:
    """Makes the copies that draft.

    Args:
        target: the model.
        preparation: says which.
        progress: is told before it begins.

    Returns:
        The preparation; without its layer draft where there is no memory for the copies now.
    """
    precision = None if preparation.layers is None else preparation.layers.assignment.precision
    if precision is None:
        return preparation
    needed = target.low_bit_bytes(precision)
    progress(f"low-bit copies of {needed / 2**20:.0f} MiB")
    try:
        with torch.inference_mode():
            target.at(precision)
    except OutOfMemoryError:
        return replace(preparation, layers=None, lacking_bytes=needed)
    return preparation


def _read(target: Target, terms: Terms) -> Preparation | None:
    kept = read_kept(_path(target), target)
    if kept is None or (kept.get("format"), kept.get("terms")) != (_FORMAT, asdict(terms)):
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        return Preparation.from_dict(kept)
    return None


def _path(target: Target) -> Any:
    return profile_path(target).parent.with_name("auto") / profile_path(target).name


def _costs(values: dict[str, Any]) -> RowCosts:
    return RowCosts(tuple(map(int, values["rows"])), tuple(map(float, values["seconds"])))


def _layer_trial(values: dict[str, Any]) -> LayerTrial:
    assignment = values["assignment"]
    kept = KeptSet(tuple(assignment["kept"]["sublayers"]), assignment["kept"]["total"])
    precision = None if assignment["precision"] is None else Precision(**assignment["precision"])
    confidences = tuple((float(confidence), bool(agrees)) for confidence, agrees in values["confidences"])
    return LayerTrial(Assignment(kept, precision), float(values["agreement"]), _costs(values["costs"]), confidences)
