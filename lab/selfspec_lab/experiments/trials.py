"""Outputs as experiments store them: speed by the clock, and rounds, to replay them on the paper's machine."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec import Engine
from selfspec.methods.papers import PAPERS
from selfspec.types import Generation, SamplingParams
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.papers.costs import paper_machine
from selfspec_lab.replay import Played, play, replayed_speedup

CLOCK, MACHINE = "by the clock here", "on the paper's machine"


def trial(generation: Generation, *, drops: bool = False) -> Data:
    """An output, ready for JSON.

    Args:
        generation: the output.
        drops: whether they are DEL's, whose drafts end with a token that is drafted, but not verified
            (``drop_unsure``). Then the output has as many tokens as it might.

    Returns:
        ``prompt_tokens``, ``tokens_per_second``, ``drafted``, ``accepted``, ``rounds`` as ``Played``, and ``trace``,
        which two outputs share if every round of theirs drafted the same tokens with the same sublayers.
    """
    longest = PAPERS["del"].values()["d_max"] if drops else None
    told = [
        [record.kept and record.kept.sublayers, record.candidates, record.accepted, record.token_ids]
        for record in generation.rounds
    ]
    return {
        "prompt_tokens": generation.prompt_token_count,
        "tokens_per_second": generation.tokens_per_second,
        "drafted": generation.drafted,
        "accepted": generation.accepted,
        "rounds": [
            list(each) for each in play(generation.rounds, new_tokens=generation.new_token_count, longest=longest)
        ],
        "trace": hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16],
    }


def count(
    lab: Lab, engines: Mapping[str, Engine], requests: Sequence[tuple[str | Sequence[int], SamplingParams]]
) -> dict[str, list[Data]]:
    """Outputs whose rounds are compared, but not their times: those of an engine are generated in a batch.

    The rounds of a sequence are those that it has alone. A method that selects needs ``share_kept_set`` off for that.

    Args:
        lab: the lab, for progress.
        engines: engines by name, which write the same texts.
        requests: prompts (text or token ids) with their sampling parameters.

    Returns:
        By engine what ``trial`` returns for every request, without ``tokens_per_second``.
    """
    counted: dict[str, list[Data]] = {}
    texts: list[tuple[int, ...]] | None = None
    for name, engine in engines.items():
        lab.progress(f"counting the rounds of {len(requests)} outputs: {name}")
        written = engine.generate_each(requests)
        texts = texts or [each.token_ids for each in written]
        assert [each.token_ids for each in written] == texts, f"{name} writes another text than {next(iter(engines))}"
        counted[name] = [trial(each) for each in written]
        for each in counted[name]:
            del each["tokens_per_second"]
    return counted


def rounds_of(each: Mapping[str, Any]) -> list[Played]:
    """The rounds of an output."""
    return [Played(*row) for row in each["rounds"]]


def replayed(each: Mapping[str, Any], method: str) -> float:
    """The speedup over plain decoding that the rounds of an output have on the machine of a method's paper."""
    return replayed_speedup(rounds_of(each), each["prompt_tokens"], paper_machine(method))


def mean_length(each: Mapping[str, Any]) -> float:
    """Committed tokens ÷ rounds of an output with rounds."""
    return float(sum(row[-1] for row in each["rounds"]) / len(each["rounds"]))


def acceptance(each: Mapping[str, Any]) -> float:
    """Accepted ÷ drafted tokens of an output, 0 if it drafted none."""
    return float(each["accepted"] / each["drafted"]) if each["drafted"] else 0.0


def speed_gains(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], where: str, method: str
) -> tuple[list[float], int]:
    """Logarithms of the ratios of speeds of two settings, prompt by prompt.

    Args:
        one: outputs of one setting.
        other: those of the other setting for the same prompts.
        where: ``CLOCK`` or ``MACHINE``.
        method: whose paper's machine it is.

    Returns:
        The logarithms, without prompts on which both ran the same rounds, and the number of these.
    """
    different = [pair for pair in zip(one, other, strict=True) if pair[0]["trace"] != pair[1]["trace"]]
    gains = [
        math.log(mine["tokens_per_second"] / theirs["tokens_per_second"])
        if where == CLOCK
        else math.log(replayed(mine, method) / replayed(theirs, method))
        for mine, theirs in different
    ]
    return gains, len(one) - len(different)
