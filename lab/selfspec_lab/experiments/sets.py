"""Sets of skipped sublayers in experiments: fixed in SWIFT, and scored on held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfspec import Engine
from selfspec.methods.api import KeptSet, LearnedState, Needs, Probe
from selfspec.methods.swift import Swift, matchness
from selfspec_lab.measuring import Target
from selfspec_lab.testing import read_text

DOMAIN_STYLES = {"code": ("#0072b2", "o"), "math": ("#d55e00", "s"), "prose": ("#009e73", "^")}
"""Colour (Okabe and Ito) and marker of each domain."""

WINDOW = 32
"""Tokens per score of a set: SWIFT's context window."""

_VARIATION_TOKENS = 16


@dataclass(frozen=True)
class Text:
    """A prompt with the target's greedy output.

    Attributes:
        token_ids: prompt and output.
        prompt_length: number of tokens of the prompt.
    """

    token_ids: tuple[int, ...]
    prompt_length: int


HELD_OUT = 7
"""Prompts of a domain that sets are tested on: three domains have 21, as a paired test needs 20 independent ones."""


def split_prompts(prompts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Prompts to choose sets on, and ``HELD_OUT`` others to test them on."""
    return prompts[:-HELD_OUT], prompts[-HELD_OUT:]


def vary_prompts(engine: Engine, prompts: Sequence[str], count: int, *, seed: int) -> list[list[int]]:
    """Makes ``count`` prompts: the given ones, then the same with a few sampled tokens appended.

    Args:
        engine: engine that samples the tokens.
        prompts: texts, at least one.
        count: number of prompts.
        seed: seed of the sampled tokens.

    Returns:
        Token ids of each.
    """
    varied = []
    for index in range(count):
        prompt = engine.encode(prompts[index % len(prompts)])
        if index >= len(prompts):
            variation = engine.generate(
                prompt, max_new_tokens=_VARIATION_TOKENS, temperature=1.0, seed=seed + index, ignore_eos=True
            )
            prompt = prompt + list(variation.token_ids)
        varied.append(prompt)
    return varied


def write_texts(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Text]:
    """Generates the target's greedy outputs, ignoring end-of-sequence tokens."""
    return [
        Text((*prompt, *engine.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True).token_ids), len(prompt))
        for prompt in prompts
    ]


class Windows:
    """The windows of texts' outputs, to score sets on.

    Args:
        target: the model.
        texts: texts with outputs of at least one window.
    """

    @torch.inference_mode()
    def __init__(self, target: Target, texts: Sequence[Text]) -> None:
        self._target = target
        self._probes = [[_probe(target, text, end) for end in _window_ends(text)] for text in texts]
        assert all(self._probes), "an output is shorter than a window"

    @torch.inference_mode()
    def score(self, skipped: Sequence[int]) -> list[float]:
        """The matchness of a set as in SWIFT (equations 3 and 4).

        Args:
            skipped: sublayer indices.

        Returns:
            One score per text, the mean over its windows, 0 to 1.
        """
        kept = KeptSet.skipping(skipped, self._target.sublayer_count)
        return [sum(matchness(probe, kept, WINDOW) for probe in probes) / len(probes) for probes in self._probes]


def hold_to(method: Swift, skipped: Sequence[int]) -> Swift:
    """Gives SWIFT a set; it keeps the set if it makes no optimisation steps.

    Raises:
        StateError: the set does not fit the model.
    """
    state = method.state()
    method.restore(LearnedState({**state.values, "skipped": list(skipped)}, state.tensors))
    return method


def _window_ends(text: Text) -> range:
    return range(text.prompt_length + WINDOW, len(text.token_ids) + 1, WINDOW)


def _probe(target: Target, text: Text, end: int) -> Probe:
    """Of a request whose pending token is the window's last one, which the target chooses once more."""
    return read_text(target, text.token_ids[: end - 1], Needs(probe_rows=WINDOW))[1].probe
