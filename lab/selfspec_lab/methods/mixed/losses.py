"""What a model loses if one sublayer is skipped or runs at fewer bits, measured on text that it has generated."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from selfspec.runtimes.precision import FULL_BITS
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.target import Target
from selfspec_lab.methods.mixed.precision import MixedPrecision

SKIP = 0
"""The bits of a sublayer that does not run."""

_SKIPPED_ROWS = 4
"""First rows of the text, which hardly have a context."""


class ChangedModel:
    """The target with one component (a sublayer or the LM head) changed, over a text, long ``[rows]``."""

    def __init__(self, target: Target, token_ids: torch.Tensor, group: int) -> None:
        rows, total = len(token_ids), target.sublayer_count
        self._target, self._group = target, group
        self._forward = target.lay_out(target.new_sequence(rows, rows, rows), rows)
        ran = target.run(target.embed(token_ids, self._forward), range(total), self._forward, range(total + 1))
        self._states = ran.captured
        self._scores = _log_probabilities(target.logits(ran.hidden_states))

    def loss(self, component: int, bits: int) -> float:
        """KL divergence in nats of the target's distribution to that with one component changed, mean over the text.

        Component ``2L`` is the LM head; ``SKIP`` leaves a sublayer out.
        """
        changed = _log_probabilities(self._logits(component, bits))
        divergence = (self._scores.exp() * (self._scores - changed)).sum(-1)
        return max(0.0, float(divergence[min(_SKIPPED_ROWS, len(divergence) - 1) :].mean()))

    def _logits(self, component: int, bits: int) -> torch.Tensor:
        target, states = self._target, self._states[component]
        if component == target.sublayer_count:
            return self._copy(component, bits).logits(states)
        if bits != SKIP:
            states = self._copy(component, bits).run(states, (component,), self._forward).hidden_states
        later = range(component + 1, target.sublayer_count)
        return target.logits(target.run(states, later, self._forward).hidden_states)

    def _copy(self, component: int, bits: int) -> Runner:
        """The model with low-bit weights of one component."""
        total = self._target.sublayer_count
        sublayers = tuple(bits if index == component else FULL_BITS for index in range(total))
        head = bits if component == total else FULL_BITS
        self._target.release_low_bit()
        return self._target.at(MixedPrecision(head=head, group=self._group, sublayers=sublayers))


@torch.inference_mode()
def measure_losses(
    target: Target,
    token_ids: torch.Tensor,
    bits: Sequence[int],
    *,
    group: int,
    most_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Mapping[int, float]]:
    """Measures the loss of each choice of every sublayer and of the LM head.

    Components are measured in an order that spreads them over the model, at least one of each kind and none begun after
    ``most_seconds``. The others get the losses of the nearest measured sublayer of their kind.

    Returns:
        By component, the head last, its loss by bits: 0 for its own weights, and ``SKIP`` for a sublayer.
    """
    began, total = clock(), target.sublayer_count
    model = ChangedModel(target, token_ids, group)
    measured: dict[int, Mapping[int, float]] = {}
    for index, component in enumerate(_spread(total)):
        if index > 2 and clock() - began > most_seconds:
            break
        tried = bits if component == total else (*bits, SKIP)
        measured[component] = {FULL_BITS: 0.0, **{choice: model.loss(component, choice) for choice in tried}}
    target.release_low_bit()
    return [measured[_nearest(component, total, measured)] for component in range(total + 1)]


def _spread(total: int) -> Iterator[int]:
    """The head, then the sublayers so that any number of the first ones is spread over the model."""
    yield total
    step = 1 << (total // 2 - 1).bit_length()
    layers = [0]
    while step > 1:
        step //= 2
        layers.extend(range(step, total // 2, 2 * step))
    for layer in layers:
        yield from (2 * layer, 2 * layer + 1)


def _nearest(component: int, total: int, measured: Mapping[int, object]) -> int:
    if component in measured:
        return component
    return min(
        (other for other in measured if other != total and other % 2 == component % 2),
        key=lambda at: abs(at - component),
    )


def _log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1)
