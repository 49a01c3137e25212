"""Training objectives: next-token loss through subsets of the sublayers, early exits, distillation."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor
from torch.nn import functional

from model import Llama, Shape, rms_norm


def next_token_loss(hidden_states: Tensor, gain: Tensor, embedding: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """Mean cross-entropy in nats of the next token, through the final norm and the tied LM head.

    Args:
        hidden_states: residual stream after the last sublayer that ran, ``[rows, length, hidden]``.
        gain: final norm, ``[hidden]``.
        embedding: ``[vocabulary, hidden]``.
        targets: token ids ``[rows, length]``.
        epsilon: the norm's.
    """
    logits = functional.linear(rms_norm(hidden_states, gain, epsilon), embedding).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def distilled_loss(
    hidden_states: Tensor,
    draft_states: Tensor,
    gain: Tensor,
    embedding: Tensor,
    targets: Tensor,
    epsilon: float,
    mutual: bool,
) -> tuple[Tensor, Tensor]:
    """Loss of the full model, and divergence of a draft's distribution from the full model's.

    Args:
        hidden_states: residual stream after all sublayers, ``[rows, length, hidden]``.
        draft_states: residual stream after the draft's sublayers, of all rows or the first ones.
        gain: final norm, ``[hidden]``.
        embedding: ``[vocabulary, hidden]``.
        targets: token ids ``[rows, length]``.
        epsilon: the norm's.
        mutual: whether the divergence teaches the full model, too (R-Drop, arXiv 2106.14448); else its distribution is
            taken as given.

    Returns:
        (mean cross-entropy of the full model, mean Kullback-Leibler divergence of the draft from the full model), both
        in nats a token.
    """
    logits = functional.linear(rms_norm(hidden_states, gain, epsilon), embedding).float()
    draft_logits = functional.linear(rms_norm(draft_states, gain, epsilon), embedding).float()
    given = logits[: len(draft_logits)] if mutual else logits[: len(draft_logits)].detach()
    given, drafted = given.log_softmax(-1), draft_logits.log_softmax(-1)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, (given.exp() * (given - drafted)).sum(-1).mean()


def random_subset(shape: Shape, rates: tuple[float, float], chooser: random.Random) -> list[int]:
    """Draw the middle sublayers that a step skips: a rate uniform between ``rates``, then that share of them."""
    return sorted(chooser.sample(shape.middle, round(chooser.uniform(*rates) * len(shape.middle))))


def rising_dropout(shape: Shape, highest: float, chooser: random.Random) -> list[int]:
    """Draw the layers that a step skips, with a probability that rises with depth (LayerSkip, eq. 1).

    Args:
        shape: size of the model.
        highest: probability of the last layer; that of the first layer is 0.
        chooser: source of randomness.

    Returns:
        the sublayers that run.
    """
    dropped = {
        layer for layer in range(shape.layers) if chooser.random() < highest * (2 ** (layer / (shape.layers - 1)) - 1)
    }
    return [sublayer for sublayer in range(shape.sublayers) if sublayer // 2 not in dropped]


class Objective:
    """Computes one step's loss; the subclasses differ in which sublayers run and what is compared."""

    DIVERGENCE_WEIGHT = 1.0
    MUTUAL = False

    def __init__(self, llama: Llama, compiled: bool) -> None:
        """Bind the model; ``compiled`` runs the losses through ``torch.compile``."""
        self._llama = llama
        self._next_token = torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss
        self._distilled = torch.compile(distilled_loss, dynamic=False) if compiled else distilled_loss

    def backward(self, inputs: Tensor, targets: Tensor, chooser: random.Random) -> dict[str, float]:
        """Accumulate the gradients of one batch.

        Args:
            inputs: token ids ``[rows, length]``.
            targets: likewise, one token later.
            chooser: the step's own source of randomness.

        Returns:
            losses of the step by name, in nats a token.
        """
        raise NotImplementedError

    def _next_token_backward(self, hidden_states: Tensor, targets: Tensor) -> float:
        loss = self._next_token(hidden_states, *self._head(), targets, self._llama.shape.epsilon)
        loss.backward()
        return loss.item()

    def _distilled_backward(self, hidden_states: Tensor, draft_states: Tensor, targets: Tensor) -> dict[str, float]:
        loss, divergence = self._distilled(
            hidden_states, draft_states, *self._head(), targets, self._llama.shape.epsilon, self.MUTUAL
        )
        (loss + self.DIVERGENCE_WEIGHT * divergence).backward()
        return {"full": loss.item(), "divergence": divergence.item()}

    def _head(self) -> tuple[Tensor, Tensor]:
        return self._llama.weights["final_norm"][0], self._llama.weights["embedding"][0]


class SubsetObjective(Objective):
    """The shared base: next-token loss, half of the steps without a random subset of the middle sublayers."""

    SHARE = 0.5
    RATES = (0.0, 0.6)

    def backward(self, inputs: Tensor, targets: Tensor, chooser: random.Random) -> dict[str, float]:
        """See `Objective.backward`."""
        llama, dropping = self._llama, chooser.random() < self.SHARE
        skipped = random_subset(llama.shape, self.RATES, chooser) if dropping else []
        kept = [sublayer for sublayer in range(llama.shape.sublayers) if sublayer not in skipped]
        hidden_states = llama.run(llama.embed(inputs), kept)
        return {"subset" if dropping else "full": self._next_token_backward(hidden_states, targets)}


class DistilledSubsetObjective(Objective):
    """The second phase of ``tiny``: in every step a random subset learns the full model's distribution.

    The full model reads all rows, the subset a share of them; up to the first sublayer left out the two passes are one.
    """

    RATES = (0.2, 0.6)
    DRAFT_SHARE = 0.5

    def backward(self, inputs: Tensor, targets: Tensor, chooser: random.Random) -> dict[str, float]:
        """See `Objective.backward`."""
        llama = self._llama
        skipped = random_subset(llama.shape, self.RATES, chooser)
        rest = range(skipped[0], llama.shape.sublayers)
        shared_states = llama.run(llama.embed(inputs), range(skipped[0]))
        hidden_states = llama.run(shared_states, rest)
        draft_rows = shared_states[: math.ceil(self.DRAFT_SHARE * len(inputs))]
        draft_states = llama.run(draft_rows, [sublayer for sublayer in rest if sublayer not in skipped])
        return self._distilled_backward(hidden_states, draft_states, targets)


class HalfDepthObjective(DistilledSubsetObjective):
    """The last phases of ``tiny``: subsets of about half the sublayers, with more weight on their divergence."""

    RATES = (0.4, 0.6)
    DRAFT_SHARE = 1.0
    DIVERGENCE_WEIGHT = 2.0


class MutualHalfDepthObjective(HalfDepthObjective):
    """A phase in which the full model also adapts to its subsets, at the cost of its text quality."""

    MUTUAL = True


class EarlyExitObjective(Objective):
    """The second phase of ``tiny-early-exit``: LayerSkip (arXiv 2404.16710), three exits a step.

    Each exit reads a third of the rows. One is drawn from each of the first three quarters of the layers; later ones
    save too little to be drafts. An exit learns the distribution of the step's own last layer rather than the next
    token, which draws its greedy choices closer to those it will be checked against.
    """

    HIGHEST_DROPOUT = 0.1

    def backward(self, inputs: Tensor, targets: Tensor, chooser: random.Random) -> dict[str, float]:
        """See `Objective.backward`."""
        llama = self._llama
        exits = self.exit_layers(chooser)
        kept = rising_dropout(llama.shape, self.HIGHEST_DROPOUT, chooser)
        hidden_states, done, exit_states = llama.embed(inputs), 0, []
        for exit_layer, rows in zip(exits, torch.arange(len(inputs)).chunk(len(exits)), strict=False):
            end = 2 * exit_layer
            hidden_states = llama.run(hidden_states, [sublayer for sublayer in kept if done <= sublayer < end])
            exit_states.append(hidden_states[rows[0] : rows[-1] + 1])
            done = end
        hidden_states = llama.run(hidden_states, [sublayer for sublayer in kept if sublayer >= done])
        return self._distilled_backward(hidden_states, torch.cat(exit_states), targets)

    def exit_layers(self, chooser: random.Random) -> list[int]:
        """Draw the exits of one step, ascending."""
        quarter = self._llama.shape.layers // 4
        return [quarter * part + chooser.randint(1, quarter) for part in range(3)]


class DraftingExitObjective(EarlyExitObjective):
    """The last phase of ``tiny-early-exit``: one of the three exits is always after 3/8 of the layers."""

    def exit_layers(self, chooser: random.Random) -> list[int]:
        """Draw the exits of one step, ascending."""
        layers = self._llama.shape.layers
        best = 3 * layers // 8
        return [chooser.randint(2, best - 1), best, chooser.randint(best + 1, 3 * layers // 4)]


class MutualExitObjective(DraftingExitObjective):
    """The second last phase: the last layer also adapts to the exits, at the cost of text quality."""

    MUTUAL = True
    DIVERGENCE_WEIGHT = 2.0
