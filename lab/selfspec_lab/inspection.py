"""What ``selfspec inspect`` shows: the rounds of an output, equal neighbours merged."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from selfspec.types import Generation, PhaseSeconds, Round

DraftKind = Literal["layers", "tokens", "none"]
"""How a round was drafted: by sublayers of the target, by token lookup (no sublayers), or not at all."""

PHASES = ("draft", "verify", "select", "other")
"""The phases of a round, named as in ``PhaseSeconds``, in display order."""


def draft_kind(record: Round) -> DraftKind:
    """How a round was drafted; ``none`` if it drafted no token, even if it had a kept set."""
    if not record.candidates:
        return "none"
    return "tokens" if record.kept is None else "layers"


@dataclass(frozen=True)
class Stretch:
    """Consecutive rounds, at least one, shown as one line; rounds are counted from 1."""

    first: int
    rounds: tuple[Round, ...]

    @property
    def last(self) -> int:
        """Number of the last round."""
        return self.first + len(self.rounds) - 1

    @cached_property
    def kind(self) -> DraftKind:
        """How most of the rounds were drafted."""
        return Counter(map(draft_kind, self.rounds)).most_common(1)[0][0]

    @cached_property
    def kept_shares(self) -> tuple[float, ...]:
        """For each sublayer the share, 0 to 1, of layer-drafted rounds that kept it; empty without such a round."""
        kept = [record.kept for record in self.rounds if draft_kind(record) == "layers" and record.kept is not None]
        counts = Counter(index for layers in kept for index in layers.sublayers)
        return tuple(counts[index] / len(kept) for index in range(kept[0].total)) if kept else ()

    @property
    def attention_share(self) -> float | None:
        """Kept share of attention sublayers, mean over layer-drafted rounds; ``None`` without such a round."""
        return _mean(self.kept_shares[::2])

    @property
    def mlp_share(self) -> float | None:
        """Kept share of MLP sublayers, mean over layer-drafted rounds; ``None`` without such a round."""
        return _mean(self.kept_shares[1::2])

    @property
    def drafted(self) -> float:
        """Mean number of draft tokens per round."""
        return sum(record.drafted for record in self.rounds) / len(self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted; ``None`` if nothing was drafted."""
        drafted = sum(record.drafted for record in self.rounds)
        return sum(record.accepted for record in self.rounds) / drafted if drafted else None

    @property
    def mean_generated_length(self) -> float:
        """Committed tokens ÷ rounds."""
        return sum(len(record.token_ids) for record in self.rounds) / len(self.rounds)

    @property
    def threshold(self) -> float | None:
        """Mean confidence threshold of the rounds that had one; ``None`` if none had."""
        return _mean([record.threshold for record in self.rounds if record.threshold is not None])


def merge_equal(records: Sequence[Round]) -> list[Stretch]:
    """Merges consecutive rounds with the same kept set, or of the same kind where no sublayers drafted."""
    stretches: list[Stretch] = []
    first = 1
    for _, group in groupby(records, key=lambda record: (kind := draft_kind(record), kind == "layers" and record.kept)):
        stretches.append(Stretch(first, tuple(group)))
        first = stretches[-1].last + 1
    return stretches


def condense(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """Joins short neighbours until at most ``2 most + 1`` stretches are left; joins nothing up to ``most``."""
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
    """An output, and the model and device that generated it; the target has ``sublayers`` sublayers."""

    model: str
    dtype: str
    device: str
    sublayers: int
    generation: Generation

    @property
    def whole(self) -> Stretch | None:
        """All rounds as one stretch; ``None`` if the output has only its first token."""
        records = self.generation.rounds
        return Stretch(1, records) if records else None

    @property
    def seconds(self) -> PhaseSeconds:
        """Seconds of all rounds by phase."""
        return add_seconds(self.generation.rounds)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``selfspec inspect --json`` prints.

        Returns:
            Everything of ``Generation.to_dict``, and:

            * ``model`` (its name), ``dtype``, ``device`` and ``sublayers`` (their number, ``2L``);
            * ``prefill_seconds``: wall time up to the first token;
            * ``phase_seconds``: by phase (``draft``, ``verify``, ``select``, ``other``) the seconds of all rounds;
            * ``attention_share``, ``mlp_share``: kept share of the attention and the MLP sublayers, 0 to 1, mean over
              layer-drafted rounds; null without such a round;
            * ``rounds``: the rounds in order, each with ``kind`` (``layers``, ``tokens`` or ``none``), ``kept`` (the
              sublayers that drafted, ascending; null unless the kind is ``layers``), ``drafted``, ``candidates``,
              ``accepted``, ``token_ids``, ``threshold`` (null without a confidence threshold), ``seconds`` by phase,
              ``guessed`` (draft tokens that took no forward of the draft), ``drafted_by`` (the part of the method
              that drafted; null where it has no parts), ``precision`` (of the weights that drafted; null for the
              model's own weights), ``forecast`` (what the method expected; null where it makes no forecasts) and
              ``probes`` (rows without a token).
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
            "rounds": [_describe(record) for record in self.generation.rounds],
        }


def add_seconds(records: Sequence[Round]) -> PhaseSeconds:
    """Seconds of several rounds, summed by phase."""
    return PhaseSeconds(**{phase: sum(getattr(record.seconds, phase) for record in records) for phase in PHASES})


def shares(seconds: PhaseSeconds) -> dict[str, float]:
    """For each phase its share of the total time, 0 to 1."""
    total = sum(asdict(seconds).values())
    return {phase: getattr(seconds, phase) / total if total else 0.0 for phase in PHASES}


def _describe(record: Round) -> dict[str, Any]:
    kind = draft_kind(record)
    kept = list(record.kept.sublayers) if kind == "layers" and record.kept is not None else None
    return {"kind": kind, **record.to_dict(), "kept": kept}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
