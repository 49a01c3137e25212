"""One measurement of ``selfspec bench run``: a candidate's output for a prompt. A line of ``results.jsonl``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any

from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import Precision
from selfspec.types import Forecast, Generation, PhaseSeconds, Round
from selfspec_lab.bench.cost import DecodingBytes, decoding_bytes
from selfspec_lab.measuring import StepBytes
from selfspec_lab.methods.mixed.precision import MixedPrecision


@dataclass(frozen=True)
class Measurement:
    """The output of one candidate for one prompt in one repeat.

    Attributes:
        prompt: key of the prompt, unique in its suite; ``81/2`` is turn 2 of question 81.
        category: of the prompt, as the suite has it.
        candidate: name of a method or of a peer.
        repeat: index of the repeat, from 0.
        turn: its index in the order in which the candidates ran on this prompt, from 0.
        position: index of the prompt in the suite, from 0; each turn of a question is a prompt.
        error: why there is no output, or ``None``. With an error, all fields below are empty.
        prompt_token_count: tokens of the prompt.
        token_ids: the output.
        identical: whether its tokens are those of plain decoding; ``None`` for the sampled output of a peer and for
            speculative sampling, which need not be.
        prefill_seconds: seconds to the first token.
        decode_seconds: seconds from the first token to the last.
        peak_memory_bytes: peak memory of the run, in bytes.
        bytes: the least that decoding has to read; ``None`` for peers.
        rounds: the rounds; ``None`` for peers.
    """

    prompt: str
    category: str
    candidate: str
    repeat: int
    turn: int
    position: int
    error: str | None = None
    prompt_token_count: int = 0
    token_ids: tuple[int, ...] = ()
    identical: bool | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_memory_bytes: int = 0
    bytes: DecodingBytes | None = None
    rounds: tuple[Round, ...] | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies it in a run: prompt, candidate, repeat."""
        return self.prompt, self.candidate, self.repeat

    def to_dict(self) -> dict[str, Any]:
        """The object on a line of ``results.jsonl``: the attributes, rounds as ``Round.to_dict`` gives them."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["token_ids"] = list(self.token_ids)
        fields["bytes"] = None if self.bytes is None else asdict(self.bytes)
        fields["rounds"] = None if self.rounds is None else [record.to_dict() for record in self.rounds]
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], sublayers: int) -> "Measurement":
        """The measurement that ``to_dict`` described.

        Args:
            fields: the object; those of runs before ``candidate`` and ``Round.to_dict`` are read too.
            sublayers: number of sublayers of the model, ``2L``.

        Raises:
            KeyError, TypeError, ValueError: it is not such an object.
        """
        values = _current_form(fields)
        values["token_ids"] = tuple(int(token_id) for token_id in values["token_ids"])
        values["bytes"] = None if values["bytes"] is None else DecodingBytes(**values["bytes"])
        if values["rounds"] is not None:
            values["rounds"] = tuple(read_round(each, sublayers) for each in values["rounds"])
        return cls(**values)


def read_round(described: Mapping[str, Any], sublayers: int) -> Round:
    """The round that ``Round.to_dict`` described, of a model with ``sublayers`` sublayers; old ones lack fields.

    Raises:
        KeyError, TypeError, ValueError: it is not such an object.
    """
    values = {each.name: described[each.name] for each in fields(Round) if each.name in described}
    kept, precision, forecast = (values.get(name) for name in ("kept", "precision", "forecast"))
    return Round(
        **{
            **values,
            "token_ids": tuple(described["token_ids"]),
            "kept": None if kept is None else KeptSet(tuple(kept), sublayers),
            "seconds": PhaseSeconds(**described["seconds"]),
            "precision": None if precision is None else _read_precision(precision),
            "forecast": None if forecast is None else Forecast(**forecast),
        }
    )


def _read_precision(described: Mapping[str, Any]) -> Precision:
    if "sublayers" not in described:
        return Precision(**described)
    return MixedPrecision(**{**described, "sublayers": tuple(described["sublayers"])})


def output_fields(generation: Generation, costs: StepBytes, peak_memory_bytes: int) -> dict[str, Any]:
    """The fields of a measurement that come from a selfspec output."""
    read = decoding_bytes(costs, [generation])
    return {
        "prompt_token_count": generation.prompt_token_count,
        "token_ids": generation.token_ids,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.seconds - generation.prefill_seconds,
        "peak_memory_bytes": peak_memory_bytes,
        "bytes": read,
        "rounds": generation.rounds,
    }


def _current_form(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an older run by their present names, its rounds with tokens instead of their number."""
    values = dict(fields)
    if "contender" in values:
        values["candidate"] = values.pop("contender")
    if values["rounds"] and "tokens" in values["rounds"][0]:
        values["rounds"] = _with_token_ids(values["rounds"], values["token_ids"][1:])  # the first is of the prefill
    return values


def _with_token_ids(rounds: Sequence[Mapping[str, Any]], token_ids: Sequence[int]) -> list[dict[str, Any]]:
    if sum(each["tokens"] for each in rounds) != len(token_ids):
        raise ValueError("its rounds have other tokens than the output")
    remaining = iter(token_ids)
    return [{**each, "token_ids": list(islice(remaining, each["tokens"]))} for each in rounds]
