"""Sampled texts for experiments, and candidates that generate the same texts in turns."""

from collections.abc import Mapping, Sequence

from selfspec import Engine
from selfspec.types import Generation, SamplingParams
from selfspec_lab.experiments.lab import Lab, generate_in_turn, warm_up

TEMPERATURE = 0.8
"""Temperature of the texts. Greedy texts of the bundled checkpoints repeat themselves, so every draft is right, and a
selection of layers never gets old."""


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
    requests = [
        (
            prompt,
            SamplingParams(max_new_tokens=max_new_tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True),
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    return generate_in_turn(engines, requests, progress=lab.progress)
