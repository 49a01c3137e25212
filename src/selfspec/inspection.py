"""What ``selfspec inspect`` shows: an output's rounds, with consecutive ones merged where nothing changes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from selfspec.types import Generation, PhaseSeconds, Round

DraftKind = Literal["layers", "tokens", "none"]
"""What drafted a round: sublayers of the target, tokens found elsewhere, or nothing."""

PHASES = ("draft", "verify", "select", "other")
"""The phases of a round, as ``PhaseSeconds`` names them, in the order in which they are shown."""


def draft_kind(record: Round) -> DraftKind:
    """What drafted a round. A kept set that got to draft no token, as at the end of an output, is none."""
    if not record.candidates:
        return "none"
    return "tokens" if record.kept is None else "layers"


@dataclass(frozen=True)
class Stretch:
    """Consecutive rounds, shown as one.

    Attributes:
        first: number of the first of them, counted from 1.
        rounds: the rounds, at least one.
    """

    first: int
    rounds: tuple[Round, ...]

    @property
    def last(self) -> int:
        """Number of the last round."""
        return self.first + len(self.rounds) - 1

    @cached_property
    def kind(self) -> DraftKind:
        """What drafted most of the rounds."""
        return Counter(map(draft_kind, self.rounds)).most_common(1)[0][0]

    @cached_property
    def kept_shares(self) -> tuple[float, ...]:
        """By sublayer the share, 0 to 1, of the rounds drafted by layers that kept it; empty without such a round."""
        kept = [record.kept for record in self.rounds if draft_kind(record) == "layers" and record.kept is not None]
        counts = Counter(index for layers in kept for index in layers.sublayers)
        return tuple(counts[index] / len(kept) for index in range(kept[0].total)) if kept else ()

    @property
    def attention_share(self) -> float | None:
        """Kept share of attention sublayers, mean over the rounds drafted by layers; ``None`` without such a round."""
        return _mean(self.kept_shares[::2])

    @property
    def mlp_share(self) -> float | None:
        """Kept share of MLP sublayers, mean over the rounds drafted by layers; ``None`` without such a round."""
        return _mean(self.kept_shares[1::2])

    @property
    def drafted(self) -> float:
        """Draft tokens a round, on average."""
        return sum(record.drafted for record in self.rounds) / len(self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted; ``None`` where nothing was drafted."""
        drafted = sum(record.drafted for record in self.rounds)
        return sum(record.accepted for record in self.rounds) / drafted if drafted else None

    @property
    def mean_generated_length(self) -> float:
        """Committed tokens ÷ rounds."""
        return sum(len(record.token_ids) for record in self.rounds) / len(self.rounds)

    @property
    def threshold(self) -> float | None:
        """Confidence threshold, mean over the rounds that had one; ``None`` without any."""
        return _mean([record.threshold for record in self.rounds if record.threshold is not None])


def merge_equal(records: Sequence[Round]) -> list[Stretch]:
    """The rounds, consecutive ones merged where the same sublayers drafted, or the same kind of draft without them."""
    stretches: list[Stretch] = []
    first = 1
    for _, group in groupby(records, key=lambda record: (kind := draft_kind(record), kind == "layers" and record.kept)):
        stretches.append(Stretch(first, tuple(group)))
        first = stretches[-1].last + 1
    return stretches


def condense(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """Joins short neighbours, so that of many stretches at most ``2 most + 1`` are left. Long ones stay as they are.

    Args:
        stretches: consecutive stretches.
        most: up to so many stretches nothing is joined.
    """
    if len(stretches) <= most:
        return list(stretches)
    shortest = -(-sum(len(stretch.rounds) for stretch in stretches) // most)
    joined: list[Stretch] = []
    for stretch in stretches:
        if joined and max(len(joined[-1].rounds), len(stretch.rounds)) < shortest:
            joined[-1] = Stretch(joined[-1].first, joined[-1].rounds + stretch.rounds)
        else:
            joined.append(stretch)
    return joined


@dataclass(frozen=True)
class Inspection:
    """An output, taken apart.

    Attributes:
        model: name of the model.
        dtype: of its weights, as ``float32``.
        device: where it ran, as torch names it.
        sublayers: the target's sublayers, ``2L``.
        generation: the output with its rounds.
    """

    model: str
    dtype: str
    device: str
    sublayers: int
    generation: Generation

    @property
    def whole(self) -> Stretch | None:
        """All rounds as one; ``None`` where the output ended with its first token."""
        records = self.generation.rounds
        return Stretch(1, records) if records else None

    @property
    def seconds(self) -> PhaseSeconds:
        """Where the time of all rounds went."""
        return add_seconds(self.generation.rounds)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``selfspec inspect --json`` prints.

        Returns:
            Everything of ``Generation.to_dict``, and:

            * ``model``: its name, with its ``dtype``, its ``device`` and how many ``sublayers`` it has, ``2L``;
            * ``prefill_seconds``: wall time up to the first token;
            * ``phase_seconds``: by phase (``draft``, ``verify``, ``select``, ``other``) the seconds of all rounds;
            * ``attention_share``, ``mlp_share``: kept share of either kind of sublayer, 0 to 1, mean over the rounds
              drafted by layers; null without such a round;
            * ``records``: the rounds in order, each with ``kind`` (``layers``, ``tokens`` or ``none``), ``kept`` (the
              sublayers that drafted, ascending; null unless the kind is ``layers``), ``drafted``, ``candidates``,
              ``accepted``, ``token_ids``, ``threshold`` (null without such a rule) and ``seconds`` by phase.
        """
        whole = self.whole
        return {
            **self.generation.to_dict(),
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "sublayers": self.sublayers,
            "prefill_seconds": self.generation.prefill_seconds,
            "phase_seconds": asdict(self.seconds),
            "attention_share": whole.attention_share if whole else None,
            "mlp_share": whole.mlp_share if whole else None,
            "records": [_describe(record) for record in self.generation.rounds],
        }


def add_seconds(records: Sequence[Round]) -> PhaseSeconds:
    """The seconds of several rounds, phase by phase."""
    return PhaseSeconds(**{phase: sum(getattr(record.seconds, phase) for record in records) for phase in PHASES})


def shares(seconds: PhaseSeconds) -> dict[str, float]:
    """Each phase's share of the time of all four, 0 to 1, by its name."""
    total = sum(asdict(seconds).values())
    return {phase: getattr(seconds, phase) / total if total else 0.0 for phase in PHASES}


def _describe(record: Round) -> dict[str, Any]:
    kind = draft_kind(record)
    return {
        "kind": kind,
        "kept": list(record.kept.sublayers) if kind == "layers" and record.kept is not None else None,
        "drafted": record.drafted,
        "candidates": record.candidates,
        "accepted": record.accepted,
        "token_ids": list(record.token_ids),
        "threshold": record.threshold,
        "seconds": asdict(record.seconds),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
