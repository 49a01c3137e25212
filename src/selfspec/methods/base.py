"""The interface of a method, and what passes between it and the round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from selfspec.decoding.draft import Draft, Proposal
from selfspec.decoding.fused_selection import Rider
from selfspec.decoding.probe import Probe
from selfspec.errors import StateError
from selfspec.methods.state import LearnedState
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance


@dataclass(frozen=True)
class Needs:
    """What a method asks of every request.

    Attributes:
        sibling_rows: rows beside the extended path that its token trees may have at most.
        probe_rows: most rows that one forward of its ``Probe`` has; the request's cache gets slots for them.
        prompt_rows: how many of the prompt's last rows ``Prefill.hidden_states`` covers; 0 captures nothing.
        prompt_states: sublayers ``i`` (0 to ``2L``) whose ``h[i]`` it contains.
    """

    sibling_rows: int = 0
    probe_rows: int = 0
    prompt_rows: int = 0
    prompt_states: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Prefill:
    """What a method learns of a request before the first round.

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
    """What a method learns of a round.

    Attributes:
        draft: what the method had asked for.
        proposal: what came of it.
        acceptance: the accepted rows and the token behind them.
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

    @property
    def watched(self) -> Collection[int]:
        """Sublayers ``i`` (0 to ``2L``) whose ``h[i]`` the verification of the coming round is to keep.

        Asked for after ``plan`` in every round, so that states are kept only in rounds that are learned from.
        """
        return ()

    @property
    def rider(self) -> Rider[Any] | None:
        """A selection whose rows are to go along with the verification of the coming round, done by ``learn``.

        Asked for after ``plan`` in every round. Its rows and those of the draft need slots: ``Needs.probe_rows``.
        """
        return None

    def learn(self, feedback: Feedback) -> None:  # noqa: B027 - learning is optional
        """Learns from a finished round, whose rows are committed already. Most baselines do not."""


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
    learns: ClassVar[bool] = False
    """Whether it carries anything from one request to the next, that is whether it has a state to save."""

    def __init__(self, target: Target, settings: Any) -> None:
        self.target = target
        self.settings = settings

    @property
    def needs(self) -> Needs:
        """What this method asks of every request."""
        return Needs()

    @abstractmethod
    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:  # noqa: B027 - most have nothing to do
        """Does ahead of the first request what would otherwise be done in it.

        Args:
            progress: is told what goes on where it takes long.
        """

    def state(self) -> LearnedState:
        """What it has learned so far.

        Raises:
            StateError: it carries nothing from one request to the next.
        """
        raise StateError(f"{self.name} learns nothing from one request to the next, so it has no state to save or load")

    def restore(self, state: LearnedState) -> None:
        """Takes up what an equal method has learned.

        Args:
            state: from ``state``, of a method with the same name on the same model.

        Raises:
            StateError: it does not fit this method's settings, or it carries nothing between requests.
        """
        self.state()
