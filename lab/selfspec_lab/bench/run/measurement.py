"""One measurement of ``selfspec bench run``: a contender's output for a prompt. A line of ``results.jsonl``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from selfspec.inspection import PHASES
from selfspec.model.kept import KeptSet
from selfspec.types import Generation, PhaseSeconds, Round
from selfspec_lab.bench.cost import DecodingBytes, StepBytes, decoding_bytes


@dataclass(frozen=True)
class Measurement:
    """What one contender made of one prompt in one repeat.

    Attributes:
        prompt: key of the prompt, unique in its suite; ``81/2`` is the second turn of question 81.
        category: of the prompt, as the suite has it.
        contender: name of a method or of a peer.
        repeat: counted from 0.
        turn: in how manieth place of the prompt's contenders it ran, counted from 0.
        position: number of the prompt in the suite, counted from 0, turns of a question being prompts of their own.
        error: why there is no output; ``None`` where there is one. All that follows is then empty.
        prompt_token_count: tokens of the prompt.
        token_ids: the output.
        identical: whether its tokens are those of plain decoding; ``None`` where that says nothing, that is for the
            sampled output of a peer.
        prefill_seconds: time to the first token.
        decode_seconds: from the first token to the last.
        peak_memory_bytes: peak memory of the run.
        bytes: what decoding had to read at least, where selfspec wrote the output.
        rounds: what happened, round by round; ``None`` for peers.
    """

    prompt: str
    category: str
    contender: str
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
        """What identifies it in a run: prompt, contender, repeat."""
        return self.prompt, self.contender, self.repeat

    def to_dict(self) -> dict[str, Any]:
        """The object that a line of ``results.jsonl`` holds.

        A round is ``{"kept", "drafted", "candidates", "accepted", "tokens", "threshold", "seconds"}``: ``kept`` are the
        sublayers that drafted (null where none did), ``tokens`` how many were committed, ``seconds`` by phase.
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["token_ids"] = list(self.token_ids)
        fields["bytes"] = None if self.bytes is None else asdict(self.bytes)
        fields["rounds"] = None if self.rounds is None else [_describe(record) for record in self.rounds]
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], sublayers: int) -> "Measurement":
        """What ``to_dict`` gave.

        Args:
            fields: the object.
            sublayers: how many the model has, ``2L``.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        values = dict(fields)
        token_ids = tuple(int(token_id) for token_id in values["token_ids"])
        values["token_ids"] = token_ids
        values["bytes"] = None if values["bytes"] is None else DecodingBytes(**values["bytes"])
        if values["rounds"] is not None:
            values["rounds"] = _rounds(values["rounds"], token_ids, sublayers)
        return cls(**values)


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


def _describe(record: Round) -> dict[str, Any]:
    return {
        "kept": None if record.kept is None else list(record.kept.sublayers),
        "drafted": record.drafted,
        "candidates": record.candidates,
        "accepted": record.accepted,
        "tokens": len(record.token_ids),
        "threshold": record.threshold,
        "seconds": {phase: round(getattr(record.seconds, phase), 7) for phase in PHASES},
    }


def _rounds(described: list[dict[str, Any]], token_ids: tuple[int, ...], sublayers: int) -> tuple[Round, ...]:
    """Rounds as they were; their tokens are the output's, behind the first, which came from the prefill."""
    rounds, start = [], 1
    for each in described:
        end = start + each["tokens"]
        rounds.append(
            Round(
                drafted=each["drafted"],
                candidates=each["candidates"],
                accepted=each["accepted"],
                token_ids=token_ids[start:end],
                kept=None if each["kept"] is None else KeptSet(tuple(each["kept"]), sublayers),
                threshold=each["threshold"],
                seconds=PhaseSeconds(**each["seconds"]),
            )
        )
        start = end
    return tuple(rounds)
