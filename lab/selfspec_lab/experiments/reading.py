"""A text that the target has read: its states at every token, and what drafts would make of any of them."""

from collections.abc import Iterator, Sequence

import torch

from selfspec.decoding.fused_selection import carry_out
from selfspec.decoding.loop import prefill
from selfspec.decoding.probe import Branches
from selfspec.engine import Engine
from selfspec.methods.base import Needs
from selfspec.methods.clasp import choose_skipped, program
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.experiments.prefilled import reading_request
from selfspec_lab.experiments.sampled import TEMPERATURE
from selfspec_lab.prompts import PROMPTS

_ROWS = 128
"""Rows of one forward. Each sees those slots of the others masked, so that more of them at once would cost more."""


class Reading:
    """A text with the target's keys and values of all its tokens in the cache.

    A draft that starts at a token, with the target's keys and values of the tokens before it, is the first step of a
    round that would have started there. As rows see only what stands before them, that can be had at any token.

    Args:
        target: the model.
        token_ids: the text, at least one token.

    Attributes:
        states: ``[L + 1, tokens, hidden]``, the target's residual stream before each layer and behind the last.
    """

    def __init__(self, target: Target, token_ids: Sequence[int]) -> None:
        self.target = target
        self._request = reading_request(target, token_ids, _ROWS)
        boundaries = range(0, target.sublayer_count + 1, 2)
        needs = Needs(prompt_rows=len(token_ids), prompt_states=frozenset(boundaries))
        read = prefill(target, self._request, len(token_ids), needs)
        self.states = torch.stack([read.hidden_states[index] for index in boundaries])

    def choose_skipped(self, position: int, layers: range, skips: int) -> tuple[int, ...]:
        """The layers that CLaSp's dynamic program skips for a token.

        Args:
            position: of the token, counted from 0.
            layers: those to choose from, without a gap.
            skips: how many to skip.
        """
        states = self.states[layers.start : layers.stop + 1, position]
        return carry_out(choose_skipped(states, layers, skips), self._branches(position).run)

    def program_state(self, position: int, skips: int) -> torch.Tensor:
        """The state behind the layers that CLaSp's dynamic program keeps for a token.

        Args:
            position: of the token, counted from 0.
            skips: how many of all layers to skip, at least one.

        Returns:
            ``[hidden]``, ``g(L, M)`` of Algorithm 1, what goes into the final norm.
        """
        passage = program(self.states[:, position], range(self.target.layer_count), skips)
        return carry_out(passage, self._branches(position).run)[-1].states[0]

    def run_layer(self, layer: int, position: int, states: torch.Tensor) -> torch.Tensor:
        """Runs a layer over states that different kept sets have at one token.

        Args:
            layer: its index.
            position: of the token.
            states: ``[count, hidden]`` before it.

        Returns:
            ``[count, hidden]`` behind it.
        """
        branches = self._branches(position)
        parts = [states[first : first + _ROWS, None] for first in range(0, len(states), _ROWS)]
        for sublayer in (2 * layer, 2 * layer + 1):
            parts = [branches.run(sublayer, part) for part in parts]
        return torch.cat(parts)[:, 0] if parts else states

    def draft(self, kept: KeptSet, positions: Sequence[int]) -> torch.Tensor:
        """The residual stream behind a kept set at each of some tokens, as the first step of a draft has it.

        Args:
            kept: what drafts.
            positions: of the tokens.

        Returns:
            ``[len(positions), hidden]``, what goes into the final norm.
        """
        parts = [self._draft(kept, positions[first : first + _ROWS]) for first in range(0, len(positions), _ROWS)]
        return torch.cat(parts)

    def _draft(self, kept: KeptSet, positions: Sequence[int]) -> torch.Tensor:
        rows, start, device = len(positions), self._request.state.cache.length, self.target.device
        at = torch.tensor(positions, device=device)
        before = torch.arange(start, device=device) < at[:, None]
        itself = torch.eye(rows, dtype=torch.bool, device=device)
        step = self.target.begin(
            self._request.state,
            rows,
            start=start,
            prefix=0,
            depths=positions,
            visible=torch.cat([before, itself], dim=1),
        )
        return self.target.run(self.states[0, at], kept.sublayers, step).hidden_states

    def _branches(self, position: int) -> Branches:
        return Branches(self.target, self._request, prefix=position, rows=1)


def read_own_text(engine: Engine, prompt: str, max_new_tokens: int, seed: int) -> tuple[Reading, range]:
    """Lets a model write a text and read it.

    Args:
        engine: writes.
        prompt: its beginning.
        max_new_tokens: length of what is written, to which it always comes.
        seed: fixes the random numbers that its tokens are drawn with, at ``TEMPERATURE``.

    Returns:
        The text, and where in it rounds of drafting could have started: from the prompt's last token to the last but
        one of all.
    """
    written = engine.generate(
        prompt, max_new_tokens=max_new_tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True
    )
    prompt_ids = engine.encode(prompt)
    token_ids = [*prompt_ids, *written.token_ids]
    return Reading(engine.target, token_ids), range(len(prompt_ids) - 1, len(token_ids) - 1)


def read_own_texts(
    lab: Lab, engine: Engine, count: int, max_new_tokens: int, task: str
) -> Iterator[tuple[str, Reading, range]]:
    """Lets a model write texts of every domain and read them, one after another.

    Args:
        lab: gives the prompts, seeds the texts, and is told how far it is.
        engine: writes.
        count: texts of each domain.
        max_new_tokens: length of what is written for each.
        task: what the texts are read for, as the lab is told.

    Yields:
        The domain, and what ``read_own_text`` gives.
    """
    for domain in PROMPTS:
        for index, prompt in enumerate(lab.prompts(domain, count)):
            lab.progress(f"{task} on {domain} text {index + 1} of {count}")
            yield domain, *read_own_text(engine, prompt, max_new_tokens, lab.seed + index)
