"""What can draft a round: a part of the target's layers, tokens found elsewhere, or nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from selfspec.decoding.stopping import StoppingRule, TreeWidths
from selfspec.model.kept import KeptSet
from selfspec.sampling.tree import TokenTree


@dataclass(frozen=True)
class LayerDraft:
    """Draft with a part of the target's own sublayers.

    Attributes:
        kept: the sublayers to run.
        limit: at most this many tokens, 0 or more.
        stop: ends the draft earlier; ``None`` drafts ``limit`` tokens without looking at them.
        widths: candidates to verify at each position, by confidence; ``None`` is one, a chain.
    """

    kept: KeptSet
    limit: int
    stop: StoppingRule | None = None
    widths: TreeWidths | None = None


@dataclass(frozen=True)
class TokenDraft:
    """Tokens found elsewhere, in prompt or output.

    Attributes:
        token_ids: the tokens, one for each node of the tree.
        tree: which of them continues which.
    """

    token_ids: tuple[int, ...]
    tree: TokenTree

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.tree)


@dataclass(frozen=True)
class NoDraft:
    """Draft nothing: this round is one step of plain decoding."""


Draft = LayerDraft | TokenDraft | NoDraft


@dataclass(frozen=True)
class Proposal:
    """A finished draft: the tokens to verify, and what the verification needs to know of them.

    Attributes:
        token_ids: long ``[n]`` on the target's device, one for each node of the tree.
        tree: which of them continues which; the path that was extended comes first.
        scores: float32 ``[r, vocab]``, the draft's processed scores after the pending token and each token of the
            extended path; ``None`` for tokens found elsewhere, whose choice was not random.
        confidences: largest draft probability at each position of the extended path, where somebody asked for it.
        shared_prefix: number ``s`` of leading sublayers whose states are the target's own.
        shared_states: by sublayer ``i <= s`` the residual stream ``h[i]`` of the first ``k`` verification rows,
            ``[k, hidden]``; empty where nothing is shared.
    """

    token_ids: torch.Tensor
    tree: TokenTree
    scores: torch.Tensor | None = None
    confidences: tuple[float, ...] = ()
    shared_prefix: int = 0
    shared_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
