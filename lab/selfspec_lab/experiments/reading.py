"""A text with the target's states at every token, to draft from any of them."""

from collections.abc import Iterator, Sequence

import torch

from selfspec import Engine
from selfspec.decoding.drafter import Branches
from selfspec.methods.api import KeptSet, Needs, Probe
from selfspec.methods.clasp import choose_skipped, program
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.experiments.sampled import sampling, seeds_of
from selfspec_lab.measuring import Target
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.testing import read_text

ROWS = 128
"""Rows of one forward. The slots of the other rows are masked, so more rows at once would cost more."""


class Reading:
    """A text with the target's keys and values of all its tokens in the cache.

    A draft that starts at a token, with the target's keys and values of the tokens before it, is the first draft step
    of a round that starts there. Rows attend only to earlier positions, so this works at any token.

    Args:
        target: the model.
        token_ids: the text, at least one token.

    Attributes:
        states: ``[L + 1, tokens, hidden]``, the target's residual stream before each layer and after the last.
    """

    def __init__(self, target: Target, token_ids: Sequence[int]) -> None:
        self.target = target
        boundaries = range(0, target.sublayer_count + 1, 2)
        needs = Needs(probe_rows=ROWS, prompt_rows=len(token_ids), prompt_states=frozenset(boundaries))
        self._context, read = read_text(target, token_ids, needs, chunk=len(token_ids))
        self.states = torch.stack([read.hidden_states[index] for index in boundaries])

    def choose_skipped(self, position: int, layers: range, skips: int) -> tuple[int, ...]:
        """The layers that CLaSp's dynamic program skips for a token.

        Args:
            position: index of the token, from 0.
            layers: consecutive layers to choose from.
            skips: number of layers to skip.
        """
        states = self.states[layers.start : layers.stop + 1, position]
        return choose_skipped(states, layers, skips, self._branches(position).run)

    def program_state(self, position: int, skips: int) -> torch.Tensor:
        """The state after the layers that CLaSp's dynamic program keeps for a token.

        Args:
            position: index of the token, from 0.
            skips: number of layers to skip, at least one.

        Returns:
            ``[hidden]``, ``g(L, M)`` of Algorithm 1, the input of the final norm.
        """
        layers = range(self.target.layer_count)
        return program(self.states[:, position], layers, skips, self._branches(position).run)[-1].states[0]

    def run_layer(self, layer: int, position: int, states: torch.Tensor) -> torch.Tensor:
        """Runs a layer over the states of several kept sets at one token.

        Args:
            layer: index of the layer.
            position: index of the token.
            states: ``[count, hidden]`` before the layer.

        Returns:
            ``[count, hidden]`` after the layer.
        """
        branches = self._branches(position)
        parts = [states[first : first + ROWS, None] for first in range(0, len(states), ROWS)]
        for sublayer in (2 * layer, 2 * layer + 1):
            parts = [branches.run(sublayer, part) for part in parts]
        return torch.cat(parts)[:, 0] if parts else states

    def draft(self, kept: KeptSet, positions: Sequence[int]) -> torch.Tensor:
        """The residual stream after the first draft step of a kept set, at each of some tokens.

        Args:
            kept: the kept set.
            positions: indices of the tokens.

        Returns:
            ``[len(positions), hidden]``, the input of the final norm.
        """
        parts = [self._draft(kept, positions[first : first + ROWS]) for first in range(0, len(positions), ROWS)]
        return torch.cat(parts)

    def _draft(self, kept: KeptSet, positions: Sequence[int]) -> torch.Tensor:
        rows, start, device = len(positions), self._context.state.cache.length, self.target.device
        at = torch.tensor(positions, device=device)
        before = torch.arange(start, device=device) < at[:, None]
        itself = torch.eye(rows, dtype=torch.bool, device=device)
        step = self.target.lay_out(
            self._context.state,
            rows,
            start=start,
            prefix=0,
            depths=positions,
            visible=torch.cat([before, itself], dim=1),
        )
        return self.target.run(self.states[0, at], kept.sublayers, step).hidden_states

    def _branches(self, position: int) -> Branches:
        context = self._context
        return Probe(context.target, context.rule, context.state, context.ids).points([position])


def read_own_text(
    engine: Engine, prompt: str, max_new_tokens: int, seeds: Sequence[int]
) -> Iterator[tuple[Reading, range]]:
    """Generates texts of a prompt, together, and prefills one after another.

    Args:
        engine: engine that generates.
        prompt: beginning of the texts.
        max_new_tokens: number of generated tokens.
        seeds: a seed of sampling for each text.

    Yields:
        A text, and the positions where rounds could start: from the prompt's last token to the second last of all.
    """
    prompt_ids = engine.encode(prompt)
    for written in engine.generate_each([(prompt, sampling(max_new_tokens, seed)) for seed in seeds]):
        token_ids = [*prompt_ids, *written.token_ids]
        yield Reading(engine.target, token_ids), range(len(prompt_ids) - 1, len(token_ids) - 1)


def read_own_texts(
    lab: Lab, engine: Engine, count: int, max_new_tokens: int, task: str, *, seeds: int
) -> Iterator[tuple[str, Reading, range]]:
    """Generates and prefills texts of every domain, one after another.

    Args:
        lab: the lab, for prompts, seed and progress.
        engine: engine that generates.
        count: prompts per domain.
        max_new_tokens: number of generated tokens per text.
        task: purpose of the texts, for progress messages.
        seeds: texts per prompt, which come one after another.

    Yields:
        The domain, and what ``read_own_text`` yields.
    """
    for domain in PROMPTS:
        for index, prompt in enumerate(lab.prompts(domain, count)):
            lab.progress(f"{task} on {domain} prompt {index + 1} of {count}")
            for each in read_own_text(engine, prompt, max_new_tokens, seeds_of(index, lab.seed, seeds)):
                yield domain, *each
