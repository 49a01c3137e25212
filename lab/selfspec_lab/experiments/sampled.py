"""Texts that models write for experiments, sampled, and contenders that write the same ones in turns."""

from collections.abc import Mapping, Sequence

from selfspec.engine import Engine
from selfspec.timing import in_turn
from selfspec.types import Generation, SamplingParams
from selfspec_lab.experiments.lab import Lab

TEMPERATURE = 0.8
"""Of the texts. The bundled checkpoints' greedy ones come to repeat themselves, which makes every draft right, and
where nothing changes no choice of layers ages."""

_WARM_UP = 8


def write_in_turn(
    lab: Lab, engines: Mapping[str, Engine], prompts: Sequence[str], max_new_tokens: int, *, seeds: Sequence[int]
) -> dict[str, list[Generation]]:
    """Lets engines write the same texts to full length, each prompt by all of them before the next one.

    Args:
        lab: is told how far it is.
        engines: by name.
        prompts: beginnings of the texts.
        max_new_tokens: length of every output.
        seeds: one a prompt; a text depends on its seed alone, whichever engine writes it.

    Returns:
        By name the outputs, one a prompt.
    """
    for engine in engines.values():
        engine.generate(prompts[0], max_new_tokens=min(_WARM_UP, max_new_tokens), ignore_eos=True)
    written: dict[str, list[Generation]] = {name: [] for name in engines}
    for turn, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        lab.progress(f"{len(engines)} contenders on prompt {turn + 1} of {len(prompts)}")
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
        for name in in_turn(list(engines), turn):
            written[name].append(engines[name].generate(prompt, params))
    return written
