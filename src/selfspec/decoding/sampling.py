"""The three rules by which tokens are chosen, behind one interface that drafting and acceptance share.

A rule sees *processed scores*: logits after the request's logits processors, temperature included. A filtered token has
score ``-inf``. Plain decoding is ``accept`` with an empty tree.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from selfspec.decoding.accept import Acceptance, accept_matching, accept_rejection
from selfspec.decoding.noise import gumbel_noise, seed_key
from selfspec.decoding.tree import TokenTree


class Rule(Protocol):
    """How tokens are chosen. Every rule gives the target's own output (greedy) or distribution (the other two)."""

    needs_draft_probs: bool
    """Whether ``accept`` needs the draft's scores when the draft was made with ``candidates``."""

    def candidates(self, scores: torch.Tensor, position: int, count: int) -> torch.Tensor:
        """The tokens to draft at one position.

        Args:
            scores: float ``[vocab]``, the draft's processed scores.
            position: absolute position of the token to draft.
            count: how many siblings are wanted, at least 1.

        Returns:
            long ``[at most count]`` on the scores' device, best first, no token twice, none with score ``-inf``. A
            count of 1 gives exactly one token and does not wait for the device.
        """
        ...

    def accept(
        self,
        tree: TokenTree,
        draft_tokens: torch.Tensor,
        draft_scores: torch.Tensor | None,
        draft_rows: Sequence[int],
        target_scores: torch.Tensor,
        positions: Sequence[int],
    ) -> Acceptance:
        """Which drafted tokens stand, and the token after them.

        Args:
            tree: the draft of ``n`` tokens.
            draft_tokens: long ``[n]``.
            draft_scores: float ``[r, vocab]``, the scores that ``candidates`` was given; ``None`` where the rule does
                not need them, or where the draft is deterministic (prompt lookup).
            draft_rows: ``[n]``; node ``i`` was drafted from ``draft_scores[draft_rows[i]]``.
            target_scores: float ``[n + 1, vocab]``, the target's processed scores after each verification row.
            positions: ``[n + 1]``, the absolute position of the token that each row chooses.

        Returns:
            The accepted path and the next token.
        """
        ...


class Greedy:
    """The target's argmax, ties resolved as ``torch.argmax`` does."""

    needs_draft_probs = False

    def candidates(self, scores: torch.Tensor, position: int, count: int) -> torch.Tensor:
        """The tokens of highest score; see ``Rule.candidates``."""
        return _best(scores, count)

    def accept(
        self,
        tree: TokenTree,
        draft_tokens: torch.Tensor,
        draft_scores: torch.Tensor | None,
        draft_rows: Sequence[int],
        target_scores: torch.Tensor,
        positions: Sequence[int],
    ) -> Acceptance:
        """Accepts the path of the target's argmaxes; see ``Rule.accept``."""
        return _accept_choices(tree, draft_tokens, target_scores.argmax(-1))


class Coupled:
    """Sampling with noise that depends on (seed, position, token) alone, shared by draft and target.

    The output is a function of the seed and the target: the same tokens with any draft, or with none.

    Args:
        seed: any integer.
    """

    needs_draft_probs = False

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def candidates(self, scores: torch.Tensor, position: int, count: int) -> torch.Tensor:
        """The tokens of highest perturbed score; see ``Rule.candidates``."""
        return _best(self._perturbed(scores, torch.full((1,), position, device=scores.device))[0], count)

    def accept(
        self,
        tree: TokenTree,
        draft_tokens: torch.Tensor,
        draft_scores: torch.Tensor | None,
        draft_rows: Sequence[int],
        target_scores: torch.Tensor,
        positions: Sequence[int],
    ) -> Acceptance:
        """Accepts the path of the target's own draws; see ``Rule.accept``."""
        where = torch.tensor(positions, dtype=torch.long, device=target_scores.device)
        return _accept_choices(tree, draft_tokens, self._perturbed(target_scores, where).argmax(-1))

    def _perturbed(self, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return scores + gumbel_noise(self.seed, positions, scores.shape[-1])


class Speculative:
    """Speculative sampling (Leviathan et al. 2023): the draft draws on its own, rejection restores the target.

    Args:
        generator: the request's own source of randomness, on the device of the scores (``seeded_generator``).
    """

    needs_draft_probs = True

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def candidates(self, scores: torch.Tensor, position: int, count: int) -> torch.Tensor:
        """Draws from softmax(scores) one after another without replacement (Gumbel top-k); see ``Rule.candidates``."""
        exponential = torch.empty_like(scores, dtype=torch.float64).exponential_(generator=self.generator)
        return _best(scores - exponential.log_(), count)

    def accept(
        self,
        tree: TokenTree,
        draft_tokens: torch.Tensor,
        draft_scores: torch.Tensor | None,
        draft_rows: Sequence[int],
        target_scores: torch.Tensor,
        positions: Sequence[int],
    ) -> Acceptance:
        """Accepts by rejection sampling; see ``Rule.accept``."""
        device = target_scores.device
        uniforms = torch.rand(len(tree) + 1, dtype=torch.float64, device=device, generator=self.generator)
        draft_probs = None if draft_scores is None else draft_scores.softmax(-1)
        return accept_rejection(tree, draft_tokens, target_scores.softmax(-1), uniforms, draft_probs, draft_rows)


def seeded_generator(seed: int, device: torch.device | str) -> torch.Generator:
    """A generator for ``Speculative``.

    Args:
        seed: any integer, negative or beyond 64 bits too.
        device: where the scores live.

    Returns:
        A fresh generator on ``device``.
    """
    return torch.Generator(device).manual_seed(seed_key(seed))


def _accept_choices(tree: TokenTree, draft_tokens: torch.Tensor, choices: torch.Tensor) -> Acceptance:
    """``accept_matching`` with one transfer to the host."""
    tokens: list[int] = torch.cat([draft_tokens, choices]).tolist()
    return accept_matching(tree, tokens[: len(tree)], tokens[len(tree) :])


def _best(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens of the ``count`` highest finite keys ``[vocab]``; the first one is exactly the argmax."""
    first = keys.argmax(-1, keepdim=True)
    if count == 1:
        return first
    # topk breaks ties in no order that it promises, so the first place is argmax's and topk fills the others.
    others = keys.index_fill(0, first, -torch.inf).topk(min(count, keys.shape[-1]) - 1)
    return torch.cat([first, others.indices[others.values > -torch.inf]])
