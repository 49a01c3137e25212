"""The interface between a method and the round: what it needs, what it plans, what it learns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from selfspec.decoding.draft import Draft, Proposal, RunRound
from selfspec.decoding.probe import Probe
from selfspec.decoding.suffixes import SuffixAutomaton
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.run_head import MtpText
from selfspec.sampling.acceptance import Acceptance
from selfspec.types import PhaseSeconds


@dataclass(frozen=True)
class Needs:
    """What a method asks of every request.

    Attributes:
        sibling_rows: most rows beside the longest path of its token trees.
        probe_rows: most rows of one forward of its ``Probe``; the request's cache gets slots for them.
        prompt_rows: how many of the prompt's last rows ``Prefill.hidden_states`` covers; 0 captures nothing.
        prompt_states: sublayers ``i`` (0 to ``2L``) whose ``h[i]`` it contains.
        needed_rows: how many of these rows it must cover, at most ``prompt_rows``, ``None`` for all; others are left
            out where a prefix cache has their keys and values.
        token_bytes: what the drafter holds for each token of the request.
    """

    sibling_rows: int = 0
    probe_rows: int = 0
    prompt_rows: int = 0
    prompt_states: frozenset[int] = frozenset()
    needed_rows: int | None = None
    token_bytes: int = 0

    @property
    def fewest_rows(self) -> int:
        """Last rows of the prompt that are computed in any case."""
        return self.prompt_rows if self.needed_rows is None else self.needed_rows

    @staticmethod
    def union(many: "Sequence[Needs]") -> "Needs":
        """What serves all of several needs, at least one."""
        rows, fewest = max(needs.prompt_rows for needs in many), max(needs.fewest_rows for needs in many)
        return Needs(
            sibling_rows=max(needs.sibling_rows for needs in many),
            probe_rows=max(needs.probe_rows for needs in many),
            prompt_rows=rows,
            prompt_states=frozenset[int]().union(*(needs.prompt_states for needs in many if needs.prompt_rows)),
            needed_rows=None if fewest == rows else fewest,
            token_bytes=sum(needs.token_bytes for needs in many),
        )


@dataclass(frozen=True)
class Prefill:
    """What a method is given of a request before the first round.

    Attributes:
        prompt_ids: the prompt's tokens.
        first_token: the token that the target chose after it.
        probe: runs parts of the target over this request, as long as it lasts.
        hidden_states: by sublayer the residual stream ``h[i]`` that the method's needs name, ``[k, hidden]``, of the
            last ``k`` prompt tokens: ``prompt_rows`` of them, or the whole prompt where it is shorter; fewer where
            ``needed_rows`` allows it.
        room: most tokens that may be written after the first one.
        earlier: texts of earlier requests, where the engine keeps them (``cache_dir``).
        seconds: that reading the prompt took.
    """

    prompt_ids: tuple[int, ...]
    first_token: int
    probe: Probe
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    room: int = 0
    earlier: SuffixAutomaton | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Feedback:
    """What a method is given of a finished round.

    Attributes:
        draft: what was planned.
        proposal: what it drafted.
        acceptance: the accepted rows and the tokens they give.
        scores: gives ``target_scores``.
        probed: the target's logits after each probe of the proposal; ``None`` without probes.
        hidden_states: by sublayer the residual stream ``h[i]`` that the drafter watched, ``[n + 1, hidden]``.
        seconds: the time of the round until now, its share where several sequences played theirs together.
        run: the rounds of a run, of which ``acceptance`` has all tokens and ``proposal`` none; empty after one round.
    """

    draft: Draft
    proposal: Proposal
    acceptance: Acceptance
    scores: Callable[[], torch.Tensor]
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)
    probed: Logits | None = None
    run: tuple[RunRound, ...] = ()

    @property
    def guess(self) -> tuple[int, float] | None:
        """What may come after the last token, with its probability; ``None`` if no probe stands after the last row.

        It is what the target chooses after the probe, before logits processors. If that is the last token, it is the
        likeliest other one: the probe stands in the place of that token, and expects it more often than it comes twice.
        """
        probes, last = self.proposal.probes, self.acceptance.rows[-1]
        if self.probed is None or last not in probes:
            return None
        probed, token = self.probed.row(probes.index(last)), self.acceptance.token_ids[-1]
        chosen, confidence = int(probed.best), float(probed.confidence)
        if chosen != token:
            return chosen, confidence
        others = probed.values[0].float().clone()
        largest = others[token].clone()
        others[token] = -torch.inf
        score, other = others.max(-1)
        return int(other), confidence * float((score - largest).exp())

    @property
    def target_scores(self) -> torch.Tensor:
        """Float32 ``[n + 1, vocab]``, the target's processed scores of every verification row."""
        return self.scores()

    @property
    def drafted(self) -> int:
        """Length of the deepest drafted path."""
        return self.proposal.drafted

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        return len(self.acceptance.rows) - 1


@dataclass(frozen=True)
class Continuation:
    """The tokens that a drafter expects next, maybe none, and how many of the last tokens it found them by."""

    token_ids: tuple[int, ...] = ()
    match_length: int = 0


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
    def mask_embedding(self) -> torch.Tensor | None:
        """The embedding of the probes of the coming rounds, ``[hidden]``; ``None`` for zero.

        Asked for after ``plan``. It is in the model's dtype and contiguous, and lasts as long as the rounds.
        """
        return None

    @property
    def mtp_text(self) -> MtpText | None:
        """What a multi-token-prediction head knows of the text, if one drafts, which native runs then follow.

        Its states are among ``watched``. After a run it has those of all rounds.
        """
        return None

    @property
    def followed(self) -> Collection[int]:
        """Sublayers ``i`` whose ``h[i]`` it needs of every round, also of those that another drafter plans."""
        return ()

    def learn(self, feedback: Feedback) -> None:  # noqa: B027 - learning is optional
        """Learns from a finished round that it planned, whose rows are committed already."""

    def observe(self, feedback: Feedback) -> None:  # noqa: B027 - most learn from their own rounds only
        """Learns from a finished round that another drafter of the same request planned, as in a cascade.

        What any round says is ``acceptance``, ``proposal`` and ``target_scores``; ``hidden_states`` are those that the
        other drafter watched. A drafter that tracks the last tokens, or that holds what belongs to the end of the text,
        has to follow it here.
        """

    def continue_after(self, drafted: Sequence[int]) -> Continuation:
        """How it expects the text to go on after the context and some drafted tokens; by default it expects nothing.

        Drafters that find tokens without running the model override it. It changes nothing and takes microseconds, as
        it is asked before every forward of a draft that takes guesses. ``drafted`` are tokens after the pending one.
        """
        return Continuation()


class FixedDrafter(Drafter):
    """Plans the same draft every round and learns nothing."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def plan(self) -> Draft:
        """The one draft."""
        return self._draft


class RepeatingDrafter(Drafter):
    """Plans the draft that ``make`` gives in every round, and learns nothing."""

    def __init__(self, make: Callable[[], Draft]) -> None:
        self._make = make

    def plan(self) -> Draft:
        """A new draft."""
        return self._make()


class DraftingMethod(Protocol):
    """What a sequence needs of its method; ``selfspec.methods.base.Method`` is one."""

    @property
    def needs(self) -> Needs:
        """What it asks of every request."""

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""

    def plan(self, drafters: Sequence[Drafter]) -> list[Draft]:
        """What drafts the next round of several requests of this method, in their order."""
