"""Rounds and outputs written by hand."""

from selfspec.model.kept import KeptSet
from selfspec.types import Generation, PhaseSeconds, Round


def record(drafted: int, accepted: int, kept: KeptSet | None = None, seconds: PhaseSeconds | None = None) -> Round:
    tokens = tuple(range(accepted + 1))
    return Round(drafted, drafted, accepted, tokens, kept, None, seconds or PhaseSeconds())


def output(*records: Round, prompt_tokens: int = 9) -> Generation:
    tokens = (0, *(token for each in records for token in each.token_ids))
    return Generation("", tokens, (), prompt_tokens, "x", {}, "length", 3.0, 1.0, records, 0)
