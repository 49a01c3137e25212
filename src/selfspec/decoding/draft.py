"""What can draft a round: the protocol, and the drafts that run no forward."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

from selfspec.decoding.context import Context
from selfspec.decoding.proposal import Drafting, Proposal
from selfspec.model import transfer
from selfspec.sampling.tree import EMPTY_TREE, ROOT, TokenTree
from selfspec.types import Forecast


class Draft(Protocol):
    """What drafts one round of one sequence."""

    def propose(self, context: Context, watched: Collection[int] = ()) -> Drafting:
        """Drafts tokens after the context.

        A coroutine, so that the forwards of all sequences of a batch run together: it yields each forward that it
        needs (``DraftForward``) and is sent the ``DraftOutput``. Drafts compose by ``yield from``.

        Args:
            context: tokens, cache and sampling rule of the sequence. The draft writes to cache slots from
                ``context.cache.length`` on and commits nothing.
            watched: sublayers whose hidden states the drafter wants of this round. A draft that shares states with the
                verification (``Proposal.shared_states``) includes those that lie below its shared prefix.

        Returns:
            The tokens to verify: at most ``context.draft_limit`` on a path, and at most
            ``context.sibling_limit`` beside the longest path.
        """
        ...


@dataclass(frozen=True)
class NoDraft:
    """Draft nothing: the round is one step of plain decoding.

    Attributes:
        steps: most rounds that may pass so before the drafter plans again. Of more than one it learns as of one round,
            whose acceptance has the tokens of all, and which has no scores.
    """

    steps: int = 1

    def propose(self, context: Context, watched: Collection[int] = ()) -> Drafting:
        """An empty proposal; see ``Draft.propose``."""
        yield from ()
        return empty_proposal(context)


@dataclass(frozen=True)
class TokenDraft:
    """Tokens that are known already, for example found in the prompt or the output.

    Attributes:
        token_ids: the tokens, one for each node of the tree.
        tree: which of them continues which.
    """

    token_ids: tuple[int, ...]
    tree: TokenTree

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.tree)

    def propose(self, context: Context, watched: Collection[int] = ()) -> Drafting:
        """The tokens, without those that could not be committed or have no cache slot; see ``Draft.propose``."""
        yield from ()
        depths = self.tree.depths[1:]
        kept = [node for node, depth in enumerate(depths) if depth <= context.draft_limit]
        kept = kept[: context.draft_limit + context.sibling_limit]
        index_of = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        tokens = [self.token_ids[node] for node in kept]
        tree = TokenTree(tuple(index_of[self.tree.parents[node]] for node in kept))
        return Proposal(tuple(tokens) if context.on_host else transfer.send(tokens, context.device), tree)


@dataclass(frozen=True)
class PartDraft:
    """A draft that says which part of its method planned it.

    Attributes:
        draft: the draft.
        part: name of the part.
        forecast: what the method expects of the round, if it says so.
    """

    draft: Draft
    part: str
    forecast: Forecast | None = None

    def propose(self, context: Context, watched: Collection[int] = ()) -> Drafting:
        """Drafts as the part does; see ``Draft.propose``."""
        proposal = yield from self.draft.propose(context, watched)
        return replace(proposal, drafted_by=self.part, forecast=self.forecast)


def empty_proposal(context: Context) -> Proposal:
    """No tokens to verify."""
    return Proposal(() if context.on_host else context.no_tokens, EMPTY_TREE)
