"""The interface of a method, and what passes between it and the round."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from selfspec.decoding.accept import Acceptance
from selfspec.decoding.draft import Draft, Proposal
from selfspec.target.stack import Target


@dataclass(frozen=True)
class Needs:
    """What a method asks of the verification.

    Attributes:
        hidden_states: sublayers ``i`` (0 to ``2L``) whose ``h[i]`` to keep for the rows of each round.
        sibling_rows: rows beside the extended path that its token trees may have at most.
    """

    hidden_states: frozenset[int] = frozenset()
    sibling_rows: int = 0


@dataclass(frozen=True)
class Prefill:
    """What a method learns of a request before the first round.

    Attributes:
        prompt_ids: the prompt's tokens.
        first_token: the token that the target chose after it.
    """

    prompt_ids: tuple[int, ...]
    first_token: int


@dataclass(frozen=True)
class Feedback:
    """What a method learns of a round.

    Attributes:
        draft: what the method had asked for.
        proposal: what came of it.
        acceptance: the accepted rows and the token behind them.
        target_scores: float32 ``[n + 1, vocab]``, the target's processed scores of every verification row.
        hidden_states: by sublayer the residual stream ``h[i]`` that the method's needs name, ``[n + 1, hidden]``.
    """

    draft: Draft
    proposal: Proposal
    acceptance: Acceptance
    target_scores: torch.Tensor
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        """Length of the deepest drafted path."""
        return max(self.proposal.tree.depths)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        return len(self.acceptance.rows) - 1


class Drafter(ABC):
    """A method at work on one request."""

    @abstractmethod
    def plan(self) -> Draft:
        """What drafts the next round."""

    def learn(self, feedback: Feedback) -> None:  # noqa: B027 - learning is optional
        """Learns from a finished round. Most baselines do not."""


class FixedDrafter(Drafter):
    """Plans the same draft every round and learns nothing."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def plan(self) -> Draft:
        """The one draft."""
        return self._draft


class Method(ABC):
    """A way to draft, with its settings and with what it has learned over a stream of requests.

    Subclasses name themselves, their source and their settings, a frozen dataclass of ``setting`` fields. One method
    object serves all requests of an engine, from several threads: what it shares between requests it has to guard.

    Args:
        target: the model that drafts and verifies.
        settings: an instance of ``Settings``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    Settings: ClassVar[type]

    def __init__(self, target: Target, settings: Any) -> None:
        self.target = target
        self.settings = settings

    @property
    def needs(self) -> Needs:
        """What the verification has to keep for this method."""
        return Needs()

    @abstractmethod
    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
