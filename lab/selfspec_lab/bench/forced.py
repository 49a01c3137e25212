"""Rounds whose acceptance is a matter of chance: they show what the runtime costs, whatever the model thinks.

Not lossless, and of no use outside of a benchmark: drafted tokens stand or fall without a look at the target's scores.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError
from selfspec.methods.base import Method
from selfspec.sampling.acceptance import Acceptance, Verdict
from selfspec.sampling.rules import Greedy, Rule
from selfspec.sampling.tree import TokenTree
from selfspec.types import SamplingParams


def check_probability(probability: float) -> float:
    """A probability, if it is one.

    Raises:
        InvalidParameterError: it is not from 0 to 1.
    """
    if not 0 <= probability <= 1:
        raise InvalidParameterError(f"the forced acceptance must be from 0 to 1, not {probability}")
    return probability


class ForcedAcceptance:
    """Accepts each drafted token with one probability, given that those before it stand (NOT LOSSLESS).

    It is the ``α`` of ``objective.expected_tokens``. Drafting and the traffic between host and device are those of
    ``Greedy``; of a tree the extended path, whose nodes come first, is walked.

    Args:
        probability: ``α``, 0 to 1.
        source: the random numbers.
    """

    needs_draft_probs = False

    def __init__(self, probability: float, source: random.Random) -> None:
        self.probability = check_probability(probability)
        self._source = source
        self._greedy = Greedy()

    def preferences(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """The scores themselves; see ``Rule.preferences``."""
        return self._greedy.preferences(scores, position)

    def accept(
        self,
        tree: TokenTree,
        draft_tokens: torch.Tensor,
        draft_scores: torch.Tensor | None,
        draft_rows: Sequence[int],
        target_scores: torch.Tensor,
        positions: Sequence[int],
    ) -> Verdict:
        """Accepts by the dice alone; see ``Rule.accept``."""

        def interpret(drafted: list[int], chosen: list[int]) -> Acceptance:
            rows = [0]
            while tree.children[rows[-1]] and self._source.random() < self.probability:
                rows.append(tree.children[rows[-1]][0] + 1)
            return Acceptance(tuple(rows), (*(drafted[row - 1] for row in rows[1:]), chosen[rows[-1]]))

        return Verdict((draft_tokens, target_scores.argmax(-1)), interpret)


class ForcedEngine(Engine):
    """An engine whose rounds have forced acceptance (NOT LOSSLESS).

    Args:
        model: the model.
        tokenizer: its tokenizer.
        method: what drafts.
        settings: values of the method's settings.
        probability: that a drafted token stands.
        seed: of the random numbers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        method: str | Method = "autoregressive",
        *,
        settings: Mapping[str, Any] | None = None,
        probability: float,
        seed: int = 0,
    ) -> None:
        super().__init__(model, tokenizer, method, settings=settings)
        self._probability = check_probability(probability)
        self._source = random.Random(seed)

    def _make_rule(self, params: SamplingParams) -> Rule:
        return ForcedAcceptance(self._probability, self._source)
