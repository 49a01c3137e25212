"""Kept sets of several kinds, their estimated acceptance, and a method that drafts with a fixed set."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfspec.methods.api import Drafter, FixedDrafter, KeptSet, LayerDraft, Method, MethodSettings, Needs, Prefill
from selfspec.methods.knapsack import find_candidates, integer_weights
from selfspec.methods.knapspec import KnapSpec
from selfspec.methods.skipping import evenly_skipped
from selfspec_lab.experiments.knapspec_scene import read
from selfspec_lab.measuring import Target
from selfspec_lab.testing import read_text

_WINDOW = 16
"""Tokens per window on which acceptance is estimated, as in KnapSpec."""


@dataclass(frozen=True)
class FixedSetSettings(MethodSettings):
    """Settings of ``FixedSet``.

    Attributes:
        kept: the sublayers that run.
        draft_length: tokens of every draft.
    """

    kept: KeptSet
    draft_length: int


class FixedSet(Method):
    """Always drafts with one kept set and one length. For experiments only, so it is not registered."""

    name = "fixed-set"
    summary = "any kept set, drafts of fixed length"
    source = "experiments"
    Settings = FixedSetSettings
    settings: FixedSetSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return FixedDrafter(LayerDraft(self.settings.kept, self.settings.draft_length))


def random_sets(sublayers: int, count: int, generator: random.Random) -> list[KeptSet]:
    """Random sets that keep the first and the last layer and skip 1/7 to 5/7 of the other sublayers."""
    free = range(2, sublayers - 2)
    counts = [generator.randint(max(1, len(free) // 7), max(1, 5 * len(free) // 7)) for _ in range(count)]
    return [KeptSet.skipping(generator.sample(free, number), sublayers) for number in counts]


def uniform_sets(sublayers: int, count: int) -> list[KeptSet]:
    """Evenly spread sets that skip 0.2 to 0.7 of the sublayers between the first and the last layer."""
    ratios = [0.2 + 0.5 * index / max(1, count - 1) for index in range(count)]
    return [KeptSet.skipping(evenly_skipped(sublayers // 2, ratio), sublayers) for ratio in ratios]


def early_exits(sublayers: int, count: int) -> list[KeptSet]:
    """Early exits after a quarter of the layers up to all layers but the last."""
    layers = sublayers // 2
    first, last = max(1, layers // 4), layers - 1
    exits = [first + (last - first) * index // max(1, count - 1) for index in range(count)]
    return [KeptSet.early_exit(exit_layer, sublayers) for exit_layer in exits]


@torch.inference_mode()
def knapspec_sets(method: KnapSpec, token_ids: Sequence[int], count: int) -> list[KeptSet]:
    """Candidates of KnapSpec's program at the end of a text, by ascending skipped weight.

    Args:
        method: KnapSpec with latencies.
        token_ids: the text.
        count: number of sets.
    """
    prefilled = read(method, token_ids)
    references = torch.stack([prefilled.hidden_states[index] for index in method.watched])
    profile, context = method.latencies.of_target, prefilled.probe.committed
    branches = prefilled.probe.branches(references.shape[1], method.selection_rows)
    found = find_candidates(
        method.target,
        references,
        branches.run,
        weights=integer_weights(profile.attention(context), profile.mlp),
        similarity_threshold=method.settings.similarity_threshold,
    ).kept[1:]  # the first is the whole model
    return [found[(len(found) - 1) * (index + 1) // count] for index in range(count)] if found else []


@torch.inference_mode()
def estimate_acceptance(
    target: Target, text: Sequence[int], prompt_length: int, kept_sets: Sequence[KeptSet]
) -> list[list[float]]:
    """``α̂`` (equation 9): share of tokens on which a set agrees with the target, in windows of 16 output tokens.

    Args:
        target: the model.
        text: prompt and greedy output of at least 16 tokens.
        prompt_length: number of tokens of the prompt.
        kept_sets: the sets.

    Returns:
        ``[windows][sets]``, shares from 0 to 1.
    """
    shares = []
    for end in range(prompt_length + _WINDOW, len(text) + 1, _WINDOW):
        probe = read_text(target, text[: end - 1], Needs(probe_rows=_WINDOW))[1].probe
        chosen = probe.token_ids[-_WINDOW:]
        shares.append([float((probe.score(kept, _WINDOW).argmax(-1) == chosen).float().mean()) for kept in kept_sets])
    return shares
