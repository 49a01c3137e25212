"""A multi-token-prediction head in the form that native runs take, and what it knows of their sequences."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_long
from dataclasses import dataclass, field
from typing import Any

import torch

from selfspec.model.decoder import Decoder
from selfspec.model.forward import SequenceState
from selfspec.model.mtp import MtpModules
from selfspec.model.rope import Rope
from selfspec.runtimes.branches import describe_norm
from selfspec.runtimes.fused import RowNorm, fast_norm
from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.products import CompiledProduct, compile_head
from selfspec.runtimes.structures import Follow, NativeDraftHead, NativeHeadEntry, NativeHeadText
from selfspec.runtimes.threads import THREADS


@dataclass(eq=False)
class MtpText(SequenceState):
    """What a head knows of one sequence.

    Row ``p`` of its cache is made of the target's hidden state of token ``p`` and of token ``p + 1``. Committed rows
    are those of accepted tokens. The rows of a draft are written after them, and again with the target's own states
    where its tokens are accepted.

    Attributes:
        missing: what the rows are made of that are not in the cache yet: hidden states of tokens, after the target's
            final norm, ``[n, hidden]``, and the token after each, long ``[n]``.
        native: the head, where it drafts in native runs.
    """

    missing: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    native: "NativeHead | None" = None


class HeadEntry:
    """What enters the layer of a head: a projection of the normed embedding and the normed hidden state before it.

    Args:
        modules: the head.
        decoder: of its layer.
        compiled: there are kernels.
    """

    def __init__(self, modules: MtpModules, decoder: Decoder, *, compiled: bool) -> None:
        self._modules = modules
        self._project = compile_head(modules.projection) if compiled else modules.projection
        self._norms = [fast_norm(each, decoder.family) for each in (modules.token_norm, modules.state_norm)]
        self.native: NativeHeadEntry | None = None
        project = self._project
        if isinstance(project, CompiledProduct) and all(isinstance(norm, RowNorm) for norm in self._norms):
            norms = map(describe_norm, self._norms)
            self.native = NativeHeadEntry(project.linear, *norms, int(modules.state_first), project.shape[0])
            self._enter = getattr(load(), f"enter_{DTYPES[project.dtype]}")
            self._limit = project.limit

    def __call__(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The residual stream before the head's layer, ``[rows, hidden]``, from embeddings and states of this shape."""
        if self.native is not None and len(states) <= self._limit:
            embeddings, states = embeddings.contiguous(), states.contiguous()
            stream = torch.empty_like(states)
            pointers = (each.data_ptr() for each in (embeddings, states, stream))
            self._enter(ctypes.byref(self.native), *pointers, len(states), THREADS.take())
            return stream
        modules = self._modules
        parts = modules.token_norm(embeddings), modules.state_norm(states)
        return self._project(torch.cat(parts[::-1] if modules.state_first else parts, dim=-1))


@dataclass(frozen=True, eq=False)
class NativeHead:
    """A head whose drafts are a part of native runs.

    Attributes:
        entry: what enters its layer.
        forward: its layer and the LM head, for which ``chain_path`` is native.
        rope: of its layer.
        read: makes the rows of a text that are missing, but for the last ones, which it returns.
    """

    entry: NativeHeadEntry
    forward: NativeForward
    rope: Rope
    read: Callable[[MtpText], tuple[torch.Tensor, torch.Tensor]]


class RunHead:
    """A head in one native run, and the texts of its sequences, which it follows.

    Args:
        head: the head.
        texts: by sequence; ``None`` where it does not draft.
        limits: by sequence, most tokens of the run.
    """

    def __init__(self, head: NativeHead, texts: Sequence[MtpText | None], limits: Sequence[int]) -> None:
        self._head, self._texts = head, texts
        self._missing: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = {
            index: _with_room(*head.read(text), limit)
            for index, (text, limit) in enumerate(zip(texts, limits, strict=True))
            if text is not None
        }
        self._structures = (NativeHeadText * len(texts))()
        for index, (states, tokens) in self._missing.items():
            self._structures[index] = _describe(texts[index], states, tokens, limits[index])
        self._native = NativeDraftHead(entry=head.entry, texts=self._structures)
        self._held: Any = None

    def begin(self, follow: Callable[[int, int, float], int]) -> NativeDraftHead:
        """The form that the C++ code takes; ``follow`` is called with each token that it drafts."""
        chain, held = self._head.forward.describe_chain(self._head.rope)
        chain.follow = Follow(follow)
        self._held = chain, held
        self._native.chain = ctypes.addressof(chain)
        return self._native

    def limit(self, index: int, tokens: int) -> None:
        """Sets how many tokens it drafts at most for the coming round of a sequence."""
        self._structures[index].limit = tokens

    def finish(self) -> float:
        """Gives the texts what they know after the run; returns the seconds that the head took."""
        for index, (states, tokens) in self._missing.items():
            text, after = self._texts[index], self._structures[index]
            assert text is not None
            text.cache.commit(range(after.start - text.cache.length))
            text.missing[:] = [(states[: after.missing], tokens[: after.missing])] if after.missing else []
        self._held = None
        return float(self._native.seconds)


def _with_room(states: torch.Tensor, tokens: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of states and tokens, with room for some more."""
    return torch.cat([states, states.new_empty(limit, states.shape[1])]), torch.cat([tokens, tokens.new_empty(limit)])


def _describe(text: MtpText | None, states: torch.Tensor, tokens: torch.Tensor, limit: int) -> NativeHeadText:
    assert text is not None
    cache, missing = text.cache, len(tokens) - limit
    assert cache.length + missing + limit <= cache.capacity, "the head's cache has no room for the run"
    return NativeHeadText(
        caches=cache.addresses,
        capacity=cache.capacity,
        start=cache.length,
        states=states.data_ptr(),
        tokens=ctypes.cast(tokens.data_ptr(), ctypes.POINTER(c_long)),
        missing=missing,
    )
