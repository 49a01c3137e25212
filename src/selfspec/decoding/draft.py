"""A draft as data: what can draft a round, when it stops, and what it drafted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol, TypeAlias, Union

import torch

from selfspec.decoding.suffixes import common
from selfspec.errors import InvalidParameterError
from selfspec.model.kept import KeptSet
from selfspec.runtimes.chain import Path, Probed
from selfspec.runtimes.mtp_head import MtpHead, MtpText
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.seen_text import SeenText
from selfspec.sampling.acceptance import ROOT, TokenTree
from selfspec.types import Forecast


class StoppingRule(Protocol):
    """Decides after every draft token whether drafting goes on. Drafts of fixed length have no rule at all."""

    @property
    def threshold(self) -> float:
        """The confidence, 0 to 1, below which it stops now."""

    def stops(self, confidence: float) -> bool:
        """Whether the token just drafted is the last one.

        Args:
            confidence: the draft's largest probability at that token, 0 to 1.
        """


TreeWidths: TypeAlias = Callable[[float], int]
"""How many candidates to verify at a draft position, given the confidence there (SWIFT's dynamic verification)."""

Guess: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""Guesses how the text goes on after the context and the tokens drafted so far, which it is given.

A token that is found is right about what a layer draft drafts more often than about what the target writes, and a row
of a draft's forward costs less than a row of the verification. So found tokens may be verified by a cheap draft, whose
output the target verifies (a cascade: Chen et al. 2024, "Cascade Speculative Drafting").
"""

Append: TypeAlias = Callable[[Sequence[int], Sequence[float]], Sequence[int]]
"""Tokens that are known to follow a layer draft, which it is given with the confidence of each of its tokens.

They are verified with it: a row of the verification often costs less than a forward of the draft.
"""

Chooser: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, bool]]
"""Chooses a draft token from the draft's logits, and may end the draft with it.

It is called once for each drafted token, in their order, with the logits of the row that drafts it: ``[vocab]``, in the
model's dtype, before logits processors; it must not change them. It returns the token, long ``[1]`` on the same device,
and whether the draft ends with this token, which is verified too. It must not draw random numbers: its draft counts as
deterministic, so that sampling stays exact. It may keep a state of its own, but one draft object serves every round
that plans it.
"""


Later: TypeAlias = Callable[[], Union["RunDraft", None]]
"""The next round of a run, or ``None``, once the last one of all sequences that share the run is known."""

Follow: TypeAlias = Callable[["RunRound"], Union["RunDraft", Later, None]]
"""Plans the next round of a run, given the last one; ``None`` ends the run.

What it returns may be called ``Later``, where requests of a batch plan together.

A run is several rounds in one native call, each a forward of the whole model over the last token and a chain of known
tokens (with siblings of its first), of tokens that a multi-token-prediction head drafts before it, or none. Where
nothing but tokens is asked of a request, a draft that is followed begins one. ``learn`` is called once after it,
without scores, with the tokens of all its rounds (``Feedback.run``).
"""


@dataclass(frozen=True)
class NoDraft:
    """Draft nothing: the round is one step of plain decoding.

    Attributes:
        follow: plans the rounds after this one, where they run as one call; ``None`` where it has to be alone.
        name: of what planned it, where a method has several ways to draft.
        forecast: what the method expects of the round, if it says so.
    """

    follow: Follow | None = field(default=None, compare=False)
    name: str | None = None
    forecast: Forecast | None = None


@dataclass(frozen=True)
class TokenDraft:
    """Tokens that are known already, for example found in the prompt or the output.

    Attributes:
        token_ids: the tokens, one for each node of the tree.
        tree: which of them continues which.
        probes: rows (0 is the pending token, ``i + 1`` node ``i``) after which a probe stands: a row without a token,
            verified beside the others and never accepted. What the target expects after it (``Feedback.probed_token``)
            may come after the token that is not known yet.
        follow: plans the rounds after this one, where they run as one call; ``None`` where it has to be alone.
        name: of what planned it, where a method has several ways to draft.
        forecast: what the method expects of the round, if it says so.

    Raises:
        InvalidParameterError: it has ``follow``, and is no chain, with or without siblings of its first token.
    """

    token_ids: tuple[int, ...]
    tree: TokenTree
    probes: tuple[int, ...] = ()
    follow: Follow | None = field(default=None, compare=False)
    name: str | None = None
    forecast: Forecast | None = None

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.tree)
        tree = self.tree
        if self.follow is not None and tree != TokenTree.chain(tree.chained, len(tree) - tree.chained):
            raise InvalidParameterError(
                "a run verifies chains with siblings of their first token; leave follow out, or draft one"
            )

    def cut(self, depth: int, nodes: int) -> "TokenDraft":
        """Its first nodes, those that are not too deep; without probes where one is left out, or nothing follows."""
        tree = self.tree
        if len(tree) + len(self.probes) <= nodes and max(tree.depths) <= depth and (depth > 1 or not self.probes):
            return self
        return self.only([node for node, own in enumerate(tree.depths[1:]) if own <= depth][:nodes])

    def only(self, nodes: Sequence[int]) -> "TokenDraft":
        """Some of its nodes, each with its parent, in their order; without probes."""
        index_of = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        parents = tuple(index_of[self.tree.parents[node]] for node in nodes)
        tokens = tuple(self.token_ids[node] for node in nodes)
        return replace(self, token_ids=tokens, tree=TokenTree(parents), probes=())

    def first_path(self) -> "TokenDraft":
        """The chain of those nodes that are tried first, and the probe after its last one."""
        if self.tree.is_chain:
            end = len(self.tree)
            return replace(self, probes=(end,) if end in self.probes else ())
        path: list[int] = []
        while following := self.tree.children[path[-1] + 1 if path else 0]:
            path.append(following[0])
        return self.only(path)


@dataclass(frozen=True)
class LayerDraft:
    """Draft with a part of the target's own sublayers.

    Attributes:
        kept: the sublayers to run.
        limit: most tokens on the path, 0 or more.
        stop: ends the draft earlier; ``None`` drafts ``limit`` tokens without reading their confidence.
        widths: candidates to verify at each position, by confidence; ``None`` is one, a chain.
        precision: of the weights that draft; ``None`` is the target's own, others have fewer bits.
        guess: guesses what this draft drafts next. Guesses are rows of the forward that drafts the token before them;
            those that turn out to be the draft's own choices save a forward each, and the drafted tokens are the same.
        append: known tokens that follow the finished draft, and are verified after it; left out where tokens are drawn
            from the draft's scores. It needs ``stop``.
        choose: chooses each token from the draft's logits; ``None`` chooses as the request does.
        seen: what of the text it attends to; ``None`` for all of it.
        drop_unsure: a last token whose confidence is below the threshold of ``stop`` is not verified.
        name: of what planned it, where a method has several ways to draft.
        forecast: what the method expects of the round, if it says so.

    Raises:
        InvalidParameterError: it has ``widths`` and one of ``choose``, ``append`` and ``drop_unsure``, or ``append``
            without ``stop``.
    """

    kept: KeptSet
    limit: int
    stop: StoppingRule | None = None
    widths: TreeWidths | None = None
    precision: Precision | None = None
    guess: Guess | None = None
    append: Append | None = None
    choose: Chooser | None = None
    drop_unsure: bool = False
    seen: SeenText | None = None
    name: str | None = None
    forecast: Forecast | None = None

    def __post_init__(self) -> None:
        if self.widths is not None and self.drop_unsure:
            raise InvalidParameterError("a tree keeps its last tokens; leave widths or drop_unsure out")
        if self.widths is not None and self.choose is not None:
            raise InvalidParameterError("a chooser drafts one token at each position; leave widths or choose out")
        if self.append is not None and (self.widths is not None or self.stop is None):
            raise InvalidParameterError("known tokens follow a chain with confidences; give stop, and leave widths out")

    @property
    def threshold(self) -> float | None:
        """The confidence below which it stops; ``None`` without such a rule."""
        return None if self.stop is None else self.stop.threshold


@dataclass(frozen=True)
class MtpDraft:
    """Draft with the multi-token-prediction head of the checkpoint.

    Attributes:
        head: the head.
        text: what it knows of the sequence, up to the pending token.
        limit: most tokens, 0 or more.
        stop: ends the draft earlier; ``None`` drafts ``limit`` tokens without reading their confidence.
        follow: plans the rounds after this one, where they run as one call; ``None`` where it has to be alone.
        name: of what planned it, where a method has several ways to draft.
        forecast: what the method expects of the round, if it says so.
    """

    head: MtpHead
    text: MtpText
    limit: int
    stop: StoppingRule | None = None
    follow: Follow | None = field(default=None, compare=False)
    name: str | None = None
    forecast: Forecast | None = None

    widths: ClassVar[None] = None
    choose: ClassVar[None] = None

    @property
    def threshold(self) -> float | None:
        """The confidence below which it stops; ``None`` without such a rule."""
        return None if self.stop is None else self.stop.threshold


Draft: TypeAlias = NoDraft | TokenDraft | LayerDraft | MtpDraft
"""What drafts one round of one sequence."""

RunDraft: TypeAlias = NoDraft | TokenDraft | MtpDraft
"""What may draft a round of a run."""


@dataclass(frozen=True)
class RunRound:
    """A round of a run: what was planned, what of it was verified, and what came of it.

    Attributes:
        draft: what was planned.
        drafted: the known tokens, or those of the head, that were verified as a chain.
        probes: the rows after which there was a probe.
        token_ids: the tokens of the round.
        probed: what may come by the probe after the last accepted row.
        confidences: of the drafted tokens, where a head drafted them.
        seconds: of its forward; where several sequences share the run, with what planning the others took.
        siblings: tokens that were verified in place of the first of the chain.
    """

    draft: RunDraft
    drafted: tuple[int, ...]
    token_ids: tuple[int, ...]
    probes: tuple[int, ...] = ()
    probed: Probed = ()
    confidences: tuple[float, ...] = ()
    seconds: float = 0.0
    siblings: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Of its verification."""
        return 1 + len(self.drafted) + len(self.siblings) + len(self.probes)

    @property
    def probed_token(self) -> tuple[int, float] | None:
        """As ``Feedback.probed_token``: the likeliest of those that may come by the probe."""
        return self.probed[0] if self.probed else None

    @cached_property
    def accepted(self) -> int:
        """How many of the drafted tokens were accepted."""
        return common(self.drafted, self.token_ids) or int(self.token_ids[0] in self.siblings)


def with_precision(draft: Draft, precision: Precision | None) -> Draft:
    """A layer draft from weights of another precision, unless it has named one itself; other drafts as they are."""
    if isinstance(draft, LayerDraft) and draft.precision is None and precision is not None:
        return replace(draft, precision=precision)
    return draft


@dataclass(frozen=True)
class Proposal:
    """A finished draft: the tokens to verify, and what the verification needs to know of them.

    Attributes:
        token_ids: one for each node of the tree, long ``[n]`` on the target's device.
        tree: which of them continues which; the path that was extended comes first.
        scores: float32 ``[r, vocab]``, the draft's processed scores after the pending token and each token of the
            extended path; ``None`` where the tokens were not drawn at random from scores.
        confidences: largest draft probability at each position of the extended path, where it was computed.
        threshold: the confidence below which drafting was to stop; ``None`` without such a rule.
        guessed: how many of the tokens were guessed before they were drafted, and so took no forward of their own.
        forwards: the rows of each forward that drafted.
        seconds: that these took (``Drafted``).
        probes: rows after which a probe stands (``TokenDraft``).
        path: where it was drafted; ``None`` where no forward was.
    """

    token_ids: torch.Tensor
    tree: TokenTree
    scores: torch.Tensor | None = None
    confidences: tuple[float, ...] = ()
    threshold: float | None = None
    guessed: int = 0
    forwards: tuple[int, ...] = ()
    seconds: float | None = None
    probes: tuple[int, ...] = ()
    path: Path | None = None

    @cached_property
    def rows(self) -> TokenTree:
        """The tree with the probes as its last nodes: what the target runs over after the pending token."""
        if not self.probes:
            return self.tree
        return TokenTree((*self.tree.parents, *(row - 1 for row in self.probes)))

    @property
    def drafted(self) -> int:
        """Length of the deepest drafted path."""
        return max(self.tree.depths)


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stops after the first token whose confidence is below a threshold; that token is still verified."""

    threshold: float

    def stops(self, confidence: float) -> bool:
        """Whether the confidence is below the threshold."""
        return confidence < self.threshold


class JointConfidence:
    """Stops one draft when the product of its confidences falls below a threshold; the last token is still verified.

    The product is the probability that all of the draft is accepted, as far as confidences tell. So a draft of many
    tokens that are rather likely ends, too, before most of it is verified in vain.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._product = 1.0

    def stops(self, confidence: float) -> bool:
        """Whether the product, this confidence included, is below the threshold."""
        self._product *= confidence
        return self._product < self.threshold


_ACCEPTANCE_KEPT, _THRESHOLD_KEPT = 0.5, 0.9
"""Shares of the old values that stay after a round: β₁ and β₂ of Draft & Verify."""


class DraftVerifyThreshold:
    """The online threshold of Draft & Verify (Zhang et al. 2024, adaptive draft-exiting).

    The acceptance rate of rounds is smoothed (β₁ = 0.5), from 0 on as in the authors' code, so that the threshold rises
    in the first rounds. While it is below ``target_acceptance`` the threshold moves up by ``step``, otherwise down. It
    stays where the draft reached its length limit, since then the threshold decided nothing. The move itself is
    smoothed (β₂ = 0.9).
    """

    def __init__(self, threshold: float, *, target_acceptance: float = 0.9, step: float = 0.01) -> None:
        self.threshold = threshold
        self._target_acceptance, self._step = target_acceptance, step
        self._acceptance = 0.0

    def stops(self, confidence: float) -> bool:
        """Whether the confidence is below the current threshold."""
        return confidence < self.threshold

    def update(self, drafted: int, accepted: int, *, reached_limit: bool) -> None:
        """Learns from a round.

        Args:
            drafted: draft tokens of the round; a round without any changes nothing.
            accepted: how many of them were accepted.
            reached_limit: the draft ended at its length limit, not by this rule.
        """
        if not drafted:
            return
        self._acceptance = _ACCEPTANCE_KEPT * self._acceptance + (1 - _ACCEPTANCE_KEPT) * accepted / drafted
        if self._acceptance < self._target_acceptance:
            moved = self.threshold + self._step
        elif reached_limit:
            moved = self.threshold
        else:
            moved = self.threshold - self._step
        self.threshold = min(1.0, max(0.0, _THRESHOLD_KEPT * self.threshold + (1 - _THRESHOLD_KEPT) * moved))
