"""Rounds with random acceptance, to measure the runtime independently of the model.

Not lossless, and only for benchmarks: acceptance ignores the target's scores.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec import Engine
from selfspec.errors import InvalidParameterError
from selfspec.methods.api import Method
from selfspec.sampling.acceptance import Acceptance, DraftedTree, Verdict
from selfspec.sampling.rules import Greedy


def check_probability(probability: float) -> float:
    """Checks and returns a probability.

    Raises:
        InvalidParameterError: it is not from 0 to 1.
    """
    if not 0 <= probability <= 1:
        raise InvalidParameterError(f"the forced acceptance must be from 0 to 1, not {probability}")
    return probability


class ForcedAcceptance:
    """Accepts each drafted token with a fixed probability if those before it are accepted (NOT LOSSLESS).

    The probability is the ``α`` of ``objective.expected_tokens``. Drafting and transfers between host and device are
    those of ``Greedy``. In a tree only the first child of each node can be accepted.

    Args:
        probability: ``α``, 0 to 1.
        source: random numbers.
    """

    needs_draft_probs = False
    chooses_best = False

    def __init__(self, probability: float, source: random.Random) -> None:
        self.probability = check_probability(probability)
        self._source = source
        self._greedy = Greedy()

    def preferences(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """The scores themselves; see ``Rule.preferences``."""
        return self._greedy.preferences(scores, position)

    def accept(self, drafted: DraftedTree, target_scores: torch.Tensor, positions: Sequence[int]) -> Verdict:
        """Accepts at random; see ``Rule.accept``."""
        children = drafted.tree.children

        def interpret(tokens: list[int], chosen: list[int]) -> Acceptance:
            rows = [0]
            while children[rows[-1]] and self._source.random() < self.probability:
                rows.append(children[rows[-1]][0] + 1)
            return Acceptance(tuple(rows), (*(tokens[row - 1] for row in rows[1:]), chosen[rows[-1]]))

        return Verdict((drafted.token_ids, target_scores.argmax(-1)), interpret)


class ForcedEngine(Engine):
    """An engine with forced acceptance (NOT LOSSLESS).

    Args:
        model: the model.
        tokenizer: its tokenizer.
        method: the method, or its name.
        settings: values of the method's settings.
        probability: probability that a drafted token is accepted.
        seed: seed of the random numbers.
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
        rule = ForcedAcceptance(probability, random.Random(seed))
        super().__init__(model, tokenizer, method, settings=settings, rule=lambda *_: rule)
