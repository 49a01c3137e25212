"""DEL's choice of exit layer and draft length: shadow tokens, their matches, and the objective."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfspec.methods.objective import tokens_per_layer
from selfspec.runtimes.shadow_head import ShadowHead


def shadow_tokens(head: ShadowHead, hidden_states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The greedy tokens that final norm and LM head give for intermediate hidden states (section 4.2).

    All layers' rows go through the head in a single pass, as in the paper, if the head can be sliced.

    Args:
        head: of the target.
        hidden_states: for each layer the residual stream after it, ``[rows, hidden]``.

    Returns:
        The tokens, long ``[layers, rows]``, and their probabilities, float32 ``[layers, rows]``.
    """
    tokens, confidences = head.read(torch.cat(list(hidden_states)))
    shape = len(hidden_states), -1
    return tokens.view(shape), confidences.view(shape)


def count_matches(tokens: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
    """A round's ``c``, ``u - c``, ``tcs`` and ``fcs`` for every exit layer (sections 4.2 and 4.4).

    Args:
        tokens: long ``[L, rows]``, the shadow tokens of the valid rows; the last layer's are the target's own.
        confidences: float32 ``[L, rows]``.

    Returns:
        float64 ``[2, 2, L - 1]`` on the CPU: (count, sum of confidences) × (matched, mismatched) × layer.
    """
    matched = tokens[:-1] == tokens[-1]
    kinds = torch.stack([matched, ~matched]).to(confidences.dtype)
    return torch.stack([kinds.sum(-1), (kinds * confidences[:-1]).sum(-1)]).cpu().double()


@dataclass(frozen=True)
class Statistics:
    """The decayed sums ``S(a) = Σ ω^(r-i-1) a[i]`` over the rounds so far, as running sums.

    Attributes:
        sums: as ``count_matches`` gives them for one round.
    """

    sums: torch.Tensor

    @classmethod
    def empty(cls, layer_count: int) -> "Statistics":
        """The sums before the first round."""
        return cls(torch.zeros(2, 2, layer_count - 1, dtype=torch.float64))

    def then(self, counts: torch.Tensor, omega: float) -> "Statistics":
        """The sums after one more round."""
        return Statistics(omega * self.sums + counts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not bool(self.sums[0].any())

    @property
    def acceptance(self) -> torch.Tensor:
        """Expected acceptance rate ``α`` of every exit layer (equation 2), float64 ``[L - 1]``."""
        matched, mismatched = self.sums[0, 0], self.sums[0, 1]
        return matched / (matched + mismatched)

    @property
    def thresholds(self) -> torch.Tensor:
        """Midpoint of mean matched and mean mismatched confidence, ``τ`` (equation 3), float64 ``[L - 1]``.

        A mean over no token counts as 0 (ours; the paper does not define it).
        """
        counts, confidences = self.sums[0], self.sums[1]
        return torch.where(counts > 0, confidences / counts, torch.zeros_like(counts)).mean(0)


@dataclass(frozen=True)
class Choice:
    """The choice for the next round.

    Attributes:
        exit_layer: ``E``, layers of the draft.
        draft_length: ``γ``, the draft length of highest objective; 0 if no draft is worth its time.
        threshold: ``τ`` of that layer: the confidence below which the draft ends.
    """

    exit_layer: int
    draft_length: int
    threshold: float


def choose(statistics: Statistics, d_max: int, shortest: int = 0) -> Choice:
    """Exit layer and draft length of highest TPL (equation 1), over all layers but the last and all lengths.

    The lengths of section 4.3 start at 0, where TPL is ``1 / L`` for every layer. So the paper does not define the exit
    layer where 0 is best; with ``shortest`` 1 it is the best one for a draft (ours).

    Args:
        statistics: with at least one round.
        d_max: longest draft, at least ``shortest``.
        shortest: shortest draft.
    """
    alphas = statistics.acceptance
    layer_count = len(alphas) + 1
    layers = torch.arange(1, layer_count)
    lengths = torch.arange(shortest, d_max + 1)
    objective = tokens_per_layer(alphas[:, None], layers[:, None], lengths, layer_count)
    layer_index, length_index = divmod(int(objective.argmax()), len(lengths))
    return Choice(int(layers[layer_index]), int(lengths[length_index]), float(statistics.thresholds[layer_index]))
