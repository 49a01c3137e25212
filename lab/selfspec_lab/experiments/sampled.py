"""Sampled texts for experiments: several of each prompt, or the same by several candidates in turns."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from selfspec import Engine
from selfspec.types import Generation, SamplingParams
from selfspec_lab.experiments.lab import Lab, generate_in_turn, warm_up

TEMPERATURE = 0.8
"""Temperature of the texts. Greedy texts of the bundled checkpoints repeat themselves, so every draft is right, and a
selection of layers never gets old."""

T = TypeVar("T")


def sampling(max_new_tokens: int, seed: int) -> SamplingParams:
    """Parameters of a text of ``max_new_tokens`` tokens, which depends on its seed, not on what drafts."""
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True)


def seeds_of(prompt: int, first: int, count: int) -> range:
    """The seeds of a prompt, by its index: ``count`` of its own, those of prompt 0 from ``first`` on."""
    return range(first + prompt * count, first + (prompt + 1) * count)


def by_prompt(values: Sequence[T], seeds: int) -> list[Sequence[T]]:
    """Splits the values of texts, prompt after prompt, into those of the ``seeds`` texts of each prompt."""
    assert len(values) % seeds == 0
    return [values[first : first + seeds] for first in range(0, len(values), seeds)]


def prompt_means(values: Sequence[float], seeds: int) -> list[float]:
    """Means over the ``seeds`` texts of each prompt. Prompts are independent, texts of one prompt are not."""
    return [fmean(each) for each in by_prompt(values, seeds)]


def write_in_turn(
    lab: Lab, engines: Mapping[str, Engine], prompts: Sequence[str], max_new_tokens: int, *, seeds: Sequence[int]
) -> dict[str, list[Generation]]:
    """Generates the same texts with all engines, each prompt with all of them before the next one.

    Args:
        lab: the lab, for progress.
        engines: engines by name.
        prompts: beginnings of the texts.
        max_new_tokens: length of every output, in tokens.
        seeds: one per prompt; a text depends on its seed only, not on the engine.

    Returns:
        The outputs by engine, one per prompt.
    """
    warm_up(engines, prompts[0], max_new_tokens)
    requests = [(prompt, sampling(max_new_tokens, seed)) for prompt, seed in zip(prompts, seeds, strict=True)]
    return generate_in_turn(engines, requests, progress=lab.progress)
