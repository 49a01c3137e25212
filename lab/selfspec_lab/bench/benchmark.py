"""Measures candidates in turns on the same prompts; a candidate that fails is dropped, the others continue."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from selfspec.types import Generation
from selfspec_lab.measuring import in_turn


@dataclass(frozen=True)
class Sample:
    """The output for one prompt.

    Attributes:
        token_ids: the output.
        seconds: time from the first token to the last.
        peak_bytes: peak memory of the run, in bytes.
        generation: the output with its rounds; ``None`` for peers.
    """

    token_ids: tuple[int, ...]
    seconds: float
    peak_bytes: int
    generation: Generation | None = None


NO_TIME = "there was no time for it"
"""The failure of a candidate that did not run."""

Candidate = Callable[[Sequence[int]], Sample]
"""Generates the output for a prompt, given as token ids."""


@dataclass
class Outcome:
    """The results of a benchmark.

    Attributes:
        samples: by candidate a list of repeats, each with one sample per prompt; without those that failed.
        failures: by candidate the reason of its failure.
    """

    samples: dict[str, list[list[Sample]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def run_benchmark(
    candidates: Mapping[str, Candidate],
    prompts: Sequence[Sequence[int]],
    repeats: int,
    *,
    before_repeat: Callable[[], None] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Runs every candidate on every prompt ``repeats`` times.

    Each is warmed up on the longest prompt. Then they take turns prompt by prompt, with another one first each time.

    Args:
        candidates: the candidates by name.
        prompts: prompts as token ids.
        repeats: repeats per prompt and candidate.
        before_repeat: is called before each repeat, for other measurements.
        is_over: tells whether there is no time for more. What is not warmed up then has failed, and a repeat that is
            not complete does not count.
        progress: is called with a line of text before each step.
    """
    outcome = Outcome()
    for name, candidate in candidates.items():
        if is_over():
            outcome.failures[name] = NO_TIME
            continue
        progress(f"warm-up: {name}")
        outcome.samples[name] = []
        _attempt(outcome, name, candidate, max(prompts, key=len), [])
    turn = 0
    for repeat in range(repeats):
        before_repeat()
        for samples in outcome.samples.values():
            samples.append([])
        for number, prompt in enumerate(prompts, start=1):
            if is_over():
                outcome.samples = {name: samples[:-1] for name, samples in outcome.samples.items()}
                return outcome
            progress(f"repeat {repeat + 1} of {repeats}, prompt {number} of {len(prompts)}")
            for name in in_turn(list(outcome.samples), turn):
                _attempt(outcome, name, candidates[name], prompt, outcome.samples[name][-1])
            turn += 1
    return outcome


def explain(error: Exception) -> str:
    """An exception as one line of text."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" …")


def _attempt(outcome: Outcome, name: str, candidate: Candidate, prompt: Sequence[int], samples: list[Sample]) -> None:
    try:
        samples.append(candidate(prompt))
    except Exception as error:  # a method or a compiler may raise anything; the others continue
        outcome.failures[name] = explain(error)
        del outcome.samples[name]
