"""What a draft asks of the model while it comes about, and what it is when it is finished."""

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from selfspec.model.forward import Forward
from selfspec.model.kept import KeptSet
from selfspec.runtimes.chain import ChainRequest
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.precision import AnyPrecision
from selfspec.sampling.tree import TokenTree
from selfspec.types import Forecast


@dataclass(frozen=True)
class DraftForward:
    """A forward that a draft asks for. Forwards of several sequences through the same sublayers run as one.

    Attributes:
        hidden_states: ``[rows, hidden]``, the residual stream before the first of the sublayers.
        forward: where the rows stand; made by ``Target.lay_out``, of one sequence.
        sublayers: ascending indices of the sublayers to run.
        capture: sublayers ``i`` (0 to ``2L``) before which to keep the residual stream ``h[i]``.
        logits: whether final norm and LM head follow.
        precision: of the weights; ``None`` is the target's own, others are low-bit copies (``Target.at``).
    """

    hidden_states: torch.Tensor
    forward: Forward
    sublayers: tuple[int, ...]
    capture: Collection[int] = ()
    logits: bool = True
    precision: AnyPrecision | None = None


@dataclass(frozen=True)
class DraftChain:
    """Forwards one after the other that a draft asks for, each over the tokens that the one before it chose.

    Attributes:
        request: the sequence, and how its draft goes on; ``NativeForward.takes_chains`` has returned true.
        sublayers: ascending indices of the sublayers to run.
        precision: of the weights; see ``DraftForward``.
    """

    request: ChainRequest
    sublayers: tuple[int, ...]
    precision: AnyPrecision | None = None


@dataclass(frozen=True)
class DraftOutput:
    """What a ``DraftForward`` gave.

    Attributes:
        hidden_states: ``[rows, hidden]``, the residual stream after the last sublayer.
        captured: by sublayer ``i`` the residual stream ``h[i]``, ``[rows, hidden]``.
        scored: the logits with their best tokens and confidences, or ``None`` where they were not asked for.
    """

    hidden_states: torch.Tensor
    captured: Mapping[int, torch.Tensor]
    scored: Logits | None

    @property
    def logits(self) -> torch.Tensor | None:
        """``[rows, vocab]``, or ``None`` where they were not asked for."""
        return None if self.scored is None else self.scored.values


@dataclass(frozen=True)
class Proposal:
    """A finished draft: the tokens to verify, and what the verification needs to know of them.

    Attributes:
        tokens: one for each node of the tree: ids that the host knows, or long ``[n]`` on the target's device.
        tree: which of them continues which; the path that was extended comes first.
        scores: float32 ``[r, vocab]``, the draft's processed scores after the pending token and each token of the
            extended path; ``None`` where the tokens were not drawn at random from scores.
        confidences: largest draft probability at each position of the extended path, where it was computed.
        shared_prefix: number ``s`` of leading sublayers whose states are the target's own.
        shared_states: by sublayer ``i <= s`` the residual stream ``h[i]`` of the first ``k`` verification rows,
            ``[k, hidden]``; empty where nothing is shared.
        kept: the sublayers that drafted; ``None`` where none did.
        precision: of the weights that drafted; ``None`` for the target's own, or where no sublayers drafted.
        threshold: the confidence below which drafting was to stop; ``None`` without such a rule.
        guessed: how many of the tokens were guessed before they were drafted, and so took no forward of their own.
        drafted_by: name of the part that drafted; ``None`` where a method has no parts.
        forecast: what the method expects of the round; ``None`` where it makes no forecasts.
    """

    tokens: tuple[int, ...] | torch.Tensor
    tree: TokenTree
    scores: torch.Tensor | None = None
    confidences: tuple[float, ...] = ()
    shared_prefix: int = 0
    shared_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    kept: KeptSet | None = None
    precision: AnyPrecision | None = None
    threshold: float | None = None
    guessed: int = 0
    drafted_by: str | None = None
    forecast: Forecast | None = None

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """The tokens, long ``[n]`` on the target's device; on the CPU if the host knows them."""
        return self.tokens if isinstance(self.tokens, torch.Tensor) else torch.tensor(self.tokens, dtype=torch.long)

    @cached_property
    def host_ids(self) -> Sequence[int]:
        """The tokens on the host; waits for the device if it has them."""
        return self.tokens.tolist() if isinstance(self.tokens, torch.Tensor) else self.tokens

    @property
    def drafted(self) -> int:
        """Length of the deepest drafted path."""
        return max(self.tree.depths)


Drafting: TypeAlias = Generator["DraftForward | DraftChain", Any, Proposal]
"""A draft in progress: a coroutine that yields the forwards it needs, is sent their outputs, and returns a proposal.

For a ``DraftForward`` it is sent a ``DraftOutput``, for a ``DraftChain`` a ``ChainOutput``.
"""
