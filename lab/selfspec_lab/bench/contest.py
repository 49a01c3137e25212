"""Contenders that take turns on the same prompts; one that fails drops out and leaves the others alone."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from selfspec.timing import in_turn
from selfspec.types import Generation


@dataclass(frozen=True)
class Sample:
    """What came of one prompt.

    Attributes:
        token_ids: the output.
        seconds: from the first token to the last, without the prefill.
        peak_bytes: peak memory of the run.
        generation: the output with its rounds, where a selfspec engine wrote it.
    """

    token_ids: tuple[int, ...]
    seconds: float
    peak_bytes: int
    generation: Generation | None = None


Contender = Callable[[Sequence[int]], Sample]
"""Writes the output for a prompt, given as token ids."""


@dataclass
class Outcome:
    """What came of a contest.

    Attributes:
        samples: by contender its repeats, each with one sample a prompt; those that failed are not there.
        failures: by contender why it failed.
    """

    samples: dict[str, list[list[Sample]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def hold_contest(
    contenders: Mapping[str, Contender],
    prompts: Sequence[Sequence[int]],
    repeats: int,
    *,
    before_repeat: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Lets every contender write every prompt ``repeats`` times.

    Each is warmed up on the longest prompt. Then they take turns prompt by prompt, another one first each time.

    Args:
        contenders: by name.
        prompts: as token ids.
        repeats: how often each prompt is written by each contender.
        before_repeat: runs before each repeat, to measure what else is to be measured.
        progress: is told what goes on.
    """
    outcome = Outcome()
    for name, contender in contenders.items():
        progress(f"warm-up: {name}")
        outcome.samples[name] = []
        _attempt(outcome, name, contender, max(prompts, key=len), [])
    turn = 0
    for repeat in range(repeats):
        before_repeat()
        for samples in outcome.samples.values():
            samples.append([])
        for number, prompt in enumerate(prompts, start=1):
            progress(f"repeat {repeat + 1} of {repeats}, prompt {number} of {len(prompts)}")
            for name in in_turn(list(outcome.samples), turn):
                _attempt(outcome, name, contenders[name], prompt, outcome.samples[name][-1])
            turn += 1
    return outcome


def explain(error: Exception) -> str:
    """An exception in one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" …")


def _attempt(outcome: Outcome, name: str, contender: Contender, prompt: Sequence[int], samples: list[Sample]) -> None:
    try:
        samples.append(contender(prompt))
    except Exception as error:  # a method or a compiler may fail in any way, and the others are still to be measured
        outcome.failures[name] = explain(error)
        del outcome.samples[name]
