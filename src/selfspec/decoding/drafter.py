"""The interface between a method and the round: what it needs, plans and learns, and what it may run in between."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn import functional

from selfspec.decoding.draft import Draft, Proposal, RunRound
from selfspec.decoding.suffixes import SuffixAutomaton
from selfspec.model.forward import Forward, SequenceState, branches
from selfspec.model.kept import KeptSet
from selfspec.model.transfer import send
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.mtp_head import MtpText
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.seen_text import AttentionShares
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance
from selfspec.sampling.rules import Greedy, Rule
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
        forced: given the output so far, tokens that spell what a grammar forces next; ``None`` without a grammar.
    """

    prompt_ids: tuple[int, ...]
    first_token: int
    probe: "Probe"
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    room: int = 0
    earlier: SuffixAutomaton | None = None
    seconds: float = 0.0
    forced: Callable[[Sequence[int]], Sequence[int]] | None = None


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
        seconds: the time of the round until now, its share where several sequences ran theirs together.
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
    def probed_token(self) -> tuple[int, float] | None:
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
    def attention_shares(self) -> AttentionShares | None:
        """What takes down how the verification's attention divides over the text; ``None`` where nothing does.

        Asked for after ``plan``.
        """
        return None

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


class Probe:
    """Runs parts of the target over the recent tokens of one request.

    It reads the keys and values of the committed tokens and writes its own to the slots after them, which the next
    draft overwrites: nothing is copied, and the committed slots stay as they are. A forward must not have more rows
    than the method's ``Needs.probe_rows``.

    It refers to tokens and cache, not to the ``Sequence``, which holds the drafter that holds the probe: the cache of a
    request that ended is free at once. ``ids`` is long ``[most tokens]``: prompt and output so far, and room for the
    rest.
    """

    def __init__(self, target: Target, rule: Rule, state: SequenceState, ids: torch.Tensor) -> None:
        self.target = target
        self._rule, self.state, self._ids = rule, state, ids

    @property
    def token_ids(self) -> torch.Tensor:
        """Prompt and output so far, the pending token included, long ``[committed + 1]``."""
        return self._ids[: self.committed + 1]

    @property
    def committed(self) -> int:
        """Tokens whose keys and values are in the cache: all but the pending one."""
        return self.state.cache.length

    @property
    def remaining_tokens(self) -> int:
        """Most tokens that the request may still write."""
        return len(self._ids) - self.committed - 1

    @property
    def samples(self) -> bool:
        """Whether the request draws its tokens; greedy decoding does not."""
        return not isinstance(self._rule, Greedy)

    def score(
        self, kept: KeptSet, rows: int, end: int | None = None, precision: Precision | None = None
    ) -> torch.Tensor:
        """Lets a kept set predict a window of successive tokens in one forward.

        Each row sees the target's keys and values of the tokens before the window, and the kept set's own inside it.

        Args:
            kept: the candidate.
            rows: size of the window, 1 to ``end - 1``.
            end: length of the text up to the window's end, at most ``committed + 1``; if not given, all of it, so that
                the pending token is the last one to predict.
            precision: of the weights that predict; ``None`` for the target's own.

        Returns:
            logits ``[rows, vocab]``; row ``i`` predicts ``token_ids[end - rows + i]``.
        """
        last = self.committed if end is None else end - 1
        assert 1 <= rows <= last <= self.committed, f"{rows} rows up to {last} in {self.committed} committed tokens"
        prefix = last - rows
        forward = self.target.lay_out(self.state, rows, start=self.committed, prefix=prefix)
        hidden_states = self.target.embed(self.token_ids[prefix:last], forward)
        model = self.target.at(precision)
        return model.logits(model.run(hidden_states, kept.sublayers, forward).hidden_states)

    def branches(self, rows: int, most_rows: int | None = None, precision: Precision | None = None) -> "Branches":
        """Independent continuations at the last ``rows`` committed tokens (CLaSp's and KnapSpec's parallel states).

        Args:
            rows: tokens of each branch, 1 to ``committed``.
            most_rows: of one forward, all branches together; more go in several forwards.
            precision: of the weights that run; ``None`` for the target's own.
        """
        assert 1 <= rows <= self.committed, f"a window of {rows} rows in {self.committed} committed tokens"
        places = range(self.committed - rows, self.committed)
        return Branches(self, places, most_rows, precision)

    def points(
        self, places: Sequence[int], most_rows: int | None = None, precision: Precision | None = None
    ) -> "Points":
        """As ``branches``, at single committed tokens that need not follow each other, by their ascending positions."""
        return Points(self, places, most_rows, precision)


class Branches:
    """Forwards over states that stand at the same tokens but come from different kept sets.

    Each branch sees the cached prefix before its tokens and itself, causally; no branch sees another. All of them go
    through a sublayer in one forward, or in as few as ``most_rows`` allows.

    ``places`` are the positions of the tokens of each branch in the probe's text, which follow each other.

    Attributes:
        sequence: whose cache they read.
    """

    def __init__(
        self, probe: Probe, places: Sequence[int], most_rows: int | None = None, precision: Precision | None = None
    ) -> None:
        assert places, "no rows"
        assert places[-1] < probe.committed, f"rows at {places} of {probe.committed} tokens"
        self.sequence, self._target, self._model = probe.state, probe.target, probe.target.at(precision)
        self._token_ids, self._places, self._prefix = probe.token_ids, places, places[0]
        self._at_once = None if most_rows is None else max(1, most_rows // len(places))
        self._forwards: dict[tuple[int, int], Forward] = {}

    def run(self, sublayer: int, states: torch.Tensor) -> torch.Tensor:
        """Runs one sublayer on the residual stream of each branch: ``[count, rows, hidden]`` before and after it."""
        each = (states,) if self._at_once is None else torch.split(states, self._at_once)
        return torch.cat([self._run(sublayer, some) for some in each])

    def _run(self, sublayer: int, states: torch.Tensor) -> torch.Tensor:
        forward = self.lay_out(len(states), self.sequence.cache.length)
        return self._model.run(states.flatten(0, 1), (sublayer,), forward).hidden_states.view_as(states)

    def lay_out(self, count: int, start: int) -> Forward:
        """The rows of ``count`` branches from a cache slot on, made once and used for every sublayer."""
        if (count, start) not in self._forwards:
            self._forwards[count, start] = self._target.lay_out(
                self.sequence,
                count * len(self._places),
                start=start,
                prefix=self._prefix,
                depths=[place - self._prefix for place in self._places] * count,
                visible=self._visible(count, start),
            )
            if self._target.decoder.reads_tokens:
                tokens = self._token_ids[send(self._places, self._token_ids.device)].repeat(count)
                self._target.embed(tokens, self._forwards[count, start])
        return self._forwards[count, start]

    def _visible(self, count: int, start: int) -> torch.Tensor:
        """Which slots from the prefix on each row sees."""
        own = branches(count, len(self._places), self._target.device)
        return functional.pad(own, (start - self._prefix, 0))


class Points(Branches):
    """Branches of single tokens: each row sees the target's keys and values of all tokens before it, and itself.

    This is what the first token of a draft sees. A row of ``Branches`` sees its branch's own keys instead, like the
    later tokens of a draft as long as the window.

    ``places`` are ascending, and need not follow each other.
    """

    def _visible(self, count: int, start: int) -> torch.Tensor:
        device = self._target.device
        places = send(self._places, device).repeat(count)
        cached = torch.arange(self._prefix, start, device=device) < places[:, None]
        return torch.cat([cached, torch.eye(len(places), dtype=torch.bool, device=device)], dim=1)
