"""The interface between a method and the round: what it needs, what it plans, what it learns."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from selfspec.decoding.draft import Draft
from selfspec.decoding.fused_selection import FusedSelection
from selfspec.decoding.probe import Probe
from selfspec.decoding.proposal import Proposal
from selfspec.sampling.acceptance import Acceptance


@dataclass(frozen=True)
class Needs:
    """What a method asks of every request.

    Attributes:
        sibling_rows: most rows beside the longest path of its token trees.
        probe_rows: most rows of one forward of its ``Probe``; the request's cache gets slots for them.
        prompt_rows: how many of the prompt's last rows ``Prefill.hidden_states`` covers; 0 captures nothing.
        prompt_states: sublayers ``i`` (0 to ``2L``) whose ``h[i]`` it contains.
    """

    sibling_rows: int = 0
    probe_rows: int = 0
    prompt_rows: int = 0
    prompt_states: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Prefill:
    """What a method is given of a request before the first round.

    Attributes:
        prompt_ids: the prompt's tokens.
        first_token: the token that the target chose after it.
        probe: runs parts of the target over this request, as long as it lasts.
        hidden_states: by sublayer the residual stream ``h[i]`` that the method's needs name, ``[k, hidden]``, of the
            last ``k`` prompt tokens: ``prompt_rows`` of them, or the whole prompt where it is shorter.
    """

    prompt_ids: tuple[int, ...]
    first_token: int
    probe: Probe
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Feedback:
    """What a method is given of a finished round.

    Attributes:
        draft: what was planned.
        proposal: what it drafted.
        acceptance: the accepted rows and the tokens they give.
        target_scores: float32 ``[n + 1, vocab]``, the target's processed scores of every verification row.
        hidden_states: by sublayer the residual stream ``h[i]`` that the drafter watched, ``[n + 1, hidden]``.
    """

    draft: Draft
    proposal: Proposal
    acceptance: Acceptance
    target_scores: torch.Tensor
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        """Length of the deepest drafted path."""
        return self.proposal.drafted

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        return len(self.acceptance.rows) - 1


class Drafter(ABC):
    """A method at work on one request."""

    @abstractmethod
    def plan(self) -> Draft:
        """What drafts the next round."""

    @property
    def watched(self) -> Collection[int]:
        """Sublayers ``i`` (0 to ``2L``) whose ``h[i]`` the verification of the coming round is to keep.

        Asked for after ``plan`` in every round, so that states are kept only in rounds that are learned from.
        """
        return ()

    @property
    def fused_selection(self) -> FusedSelection[Any] | None:
        """A selection whose rows go through the sublayers with the next verification; ``learn`` finds its outcome.

        Asked for after ``plan`` in every round. Its rows and those of the draft need slots: ``Needs.probe_rows``.
        """
        return None

    def learn(self, feedback: Feedback) -> None:  # noqa: B027 - learning is optional
        """Learns from a finished round, whose rows are committed already."""


class FixedDrafter(Drafter):
    """Plans the same draft every round and learns nothing."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def plan(self) -> Draft:
        """The one draft."""
        return self._draft


class DraftingMethod(Protocol):
    """What a sequence needs of its method; ``selfspec.methods.base.Method`` is one."""

    @property
    def needs(self) -> Needs:
        """What it asks of every request."""
        ...

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        ...

    def plan(self, drafters: Sequence[Drafter]) -> list[Draft]:
        """What drafts the next round of several requests of this method, in their order."""
        ...
