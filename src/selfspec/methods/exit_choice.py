"""DEL's choice: counts of a round's shadow tokens, their decayed sums, and the exit of most tokens per layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfspec.methods.objective import tokens_per_layer


def count_matches(tokens: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
    """A round's ``c``, ``u - c``, ``tcs`` and ``fcs`` for every exit layer (sections 4.2 and 4.4).

    ``tokens``, long ``[L, rows]``, are the shadow tokens of the valid rows, the last layer's being the target's own;
    ``confidences`` are float32 ``[L, rows]``. Returns float64 ``[2, 2, L - 1]`` on the CPU: (count, sum of
    confidences) × (matched, mismatched) × layer.
    """
    matched = tokens[:-1] == tokens[-1]
    kinds = torch.stack([matched, ~matched]).to(confidences.dtype)
    return torch.stack([kinds.sum(-1), (kinds * confidences[:-1]).sum(-1)]).cpu().double()


@dataclass(frozen=True)
class Statistics:
    """The decayed sums ``S(a) = Σ ω^(r-i-1) a[i]`` over the rounds so far, in the form of ``count_matches``."""

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
        """Expected acceptance rate ``α`` of every exit layer (equation 2), float64 ``[L - 1]``.

        ``S(u)`` is the number of rows that were compared, as in the port of KnapSpec's authors. Taken literally
        ``u_r`` is the index of the first mismatch, one less than the ``u_r + 1`` rows that ``c_r`` counts, so that
        rates would pass 1.
        """
        matched, mismatched = self.sums[0, 0], self.sums[0, 1]
        return matched / (matched + mismatched)

    def thresholds(self, defined: bool = False) -> torch.Tensor:
        """Midpoint of mean matched and mean mismatched confidence, ``τ`` (equation 3), float64 ``[L - 1]``.

        A mean over no token counts as 0 (ours). Equation 3 is 0 / 0 there, which no confidence is below: with
        ``defined`` the threshold is then 0, so that drafts do not stop.
        """
        counts, confidences = self.sums[0], self.sums[1]
        means = torch.where(counts > 0, confidences / counts, torch.zeros_like(counts)).mean(0)
        return torch.where((counts > 0).all(0), means, torch.zeros_like(means)) if defined else means


@dataclass(frozen=True)
class Exit:
    """The next round's layers ``E``, draft length ``γ`` (0: no draft is worth its time), and the layers' ``τ``."""

    exit_layer: int
    draft_length: int
    threshold: float


def choose_exit(
    statistics: Statistics, d_max: int, shortest: int = 0, exits: Sequence[int] = (), *, defined: bool = False
) -> Exit:
    """Exit layer and draft length of highest TPL (equation 1), over some exit layers and all lengths.

    The lengths of section 4.3 start at 0, where TPL is ``1 / L`` for every layer. So the paper does not define the exit
    layer where 0 is best; it is the first one here. With ``shortest`` 1 it is the best one for a draft (ours).

    ``exits`` are the layers to choose from, ascending; by default all but the last. ``defined`` as in ``thresholds``.
    """
    alphas = statistics.acceptance
    layer_count = len(alphas) + 1
    layers = torch.tensor(exits or range(1, layer_count))
    lengths = torch.arange(shortest, d_max + 1)
    objective = tokens_per_layer(alphas[layers - 1, None], layers[:, None], lengths, layer_count)
    place, length_index = divmod(int(objective.argmax()), len(lengths))
    layer = int(layers[place])
    return Exit(layer, int(lengths[length_index]), float(statistics.thresholds(defined)[layer - 1]))
