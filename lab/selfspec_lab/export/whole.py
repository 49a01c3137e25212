"""A kept set of sublayers as one of whole layers, which an ordinary checkpoint holds without a loss.

A method skips some number of sublayers, here and there. Of the layers that it touches as many are left out as make the
same number of sublayers: first those of which it skips both, then, one after the other, the layer without which the
draft agrees most often with the target.
"""

from collections.abc import Callable, Collection, Sequence

import torch

from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and those that the target wrote after it."""


def without_layers(layers: Collection[int], total: int) -> KeptSet:
    """The kept set of ``total`` sublayers that skips some layers whole."""
    return KeptSet.skipping((sublayer for layer in layers for sublayer in (2 * layer, 2 * layer + 1)), total)


def whole_layers(
    target: Target, kept: KeptSet, texts: Sequence[Text], progress: Callable[[str], None] = lambda _: None
) -> KeptSet:
    """The kept set in whole layers.

    Args:
        target: the model.
        kept: what a method has found; it skips at least one sublayer.
        texts: what the agreement with the target is counted on.
        progress: is called with a line of text before each layer that is left out.
    """
    touched = sorted({sublayer // 2 for sublayer in kept.skipped})
    left_out = {layer for layer in touched if {2 * layer, 2 * layer + 1} <= set(kept.skipped)}
    count = max(1, round(len(kept.skipped) / 2))
    while len(left_out) < count:
        progress(f"choosing layer {len(left_out) + 1} of {count} to leave out")
        others = [layer for layer in touched if layer not in left_out]
        sets = {layer: without_layers({*left_out, layer}, kept.total) for layer in others}
        left_out.add(max(others, key=lambda layer: sum(agreeing(target, sets[layer], *text) for text in texts)))
    return without_layers(left_out, kept.total)


@torch.inference_mode()
def agreeing(target: Target, kept: KeptSet, before: Sequence[int], written: Sequence[int]) -> int:
    """How many of some tokens a kept set predicts as its first choice, each after those before it.

    Args:
        target: the model.
        kept: the sublayers that run.
        before: token ids, at least one.
        written: the token ids after them, at least one.
    """
    ids = torch.tensor([*before, *written], device=target.device)
    state = target.new_sequence(len(ids), len(ids), len(ids))
    forward = target.lay_out(state, len(ids) - 1)
    states = target.run(target.embed(ids[:-1], forward), kept.sublayers, forward).hidden_states
    return int((target.logits(states[-len(written) :]).argmax(-1) == ids[-len(written) :]).sum())
