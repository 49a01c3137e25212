"""A multi-token-prediction head at work: it drafts from the target's last hidden states, with a cache of its own.

It drafts a token a forward (``MtpHead.draft``), or within native runs of the target (``RunHead``).
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_long
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from selfspec.errors import OutOfMemoryError, UnsupportedModelError
from selfspec.model.decoder import Decoder
from selfspec.model.forward import Forward, SequenceState
from selfspec.model.mtp_modules import MtpModules, read_mtp
from selfspec.model.rope import Rope
from selfspec.runtimes.branches import describe_norm
from selfspec.runtimes.chain import Drafted, DraftRequest
from selfspec.runtimes.fused import RowNorm, fast_norm
from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.packed import LowBitLinear
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.products import CompiledProduct, compile_head, outputs_of
from selfspec.runtimes.runner import DraftedTokens, Runner
from selfspec.runtimes.structures import Follow, NativeDraftHead, NativeHeadEntry, NativeHeadText
from selfspec.runtimes.target import Target
from selfspec.runtimes.threads import THREADS

_ROWS = 16
"""Most rows that share the forward of the first draft token; more are read before it, without logits."""

_CHUNK = 256


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
    native: "NativeMtp | None" = None


class MtpHead:
    """The head of a target's checkpoint.

    It drafts one token from the target's last state, and more by reading its own output in place of that.

    Args:
        target: the model.
        vocabulary: draft only the first of the token ids, as many, which take a part of the LM head; ``None`` for all.
        precision: of the weights that draft; ``None`` for the checkpoint's.
        required: whether the head has to have this precision; else the checkpoint's is taken where kernels of the CPU
            cannot run it.

    Attributes:
        own: its layer and the LM head, as a model of one layer.
        reads: ``2L`` of the target, whose ``h[2L]`` it reads.

    Raises:
        UnsupportedModelError: its checkpoint has no head, or one that cannot run, or its LM head has no such part, or
            there are no low-bit weights of it.
        ModelLoadError: the head does not fit it.
    """

    def __init__(
        self,
        target: Target,
        vocabulary: int | None = None,
        precision: Precision | None = None,
        *,
        required: bool = True,
    ) -> None:
        self._target, self.reads = target, target.sublayer_count
        self._modules: MtpModules = read_mtp(target.model)
        if vocabulary is not None and vocabulary < target.vocab_size:
            own: Any = self._modules.model
            own.lm_head = first_outputs(own.lm_head, vocabulary)
        self.own = Target(self._modules.model, target.runtime if target.trial is None else target.chosen_runtime)
        compiled = self.own.at(None).native is not None
        if precision is not None and required:
            self.own.check_low_bit(precision)
        elif precision is not None and not (compiled and _can_have(self.own, precision)):
            precision = None
        self.precision, self._required = precision, required
        self._enter = HeadEntry(self._modules, self.own.decoder, compiled=compiled)
        self._every = tuple(range(self.own.sublayer_count))
        self._native: NativeMtp | None = None

    @property
    def runner(self) -> Runner:
        """The same at the precision that drafts; where memory is short, at the checkpoint's if no other is required."""
        try:
            return self.own.at(self.precision)
        except OutOfMemoryError:
            if self._required:
                raise
            self.precision = None
            return self.own.at(None)

    def begin(self, capacity: int) -> MtpText:
        """A text of at most as many tokens."""
        state = self.own.new_sequence(capacity, capacity, capacity)
        return MtpText(state.cache, state.long_rope, native=self._native_form())

    def _native_form(self) -> "NativeMtp | None":
        """The head for native runs; ``None`` where it cannot take part in them."""
        runner, entry = self.runner, self._enter.native
        scaled = runner.embedding_scale != 1.0  # which the head's embeddings are not
        if entry is None or runner.native is None or scaled or not runner.path().native:
            return None
        if self._native is None or self._native.forward is not runner.native:
            self._native = NativeMtp(entry, runner.native, runner.rope, self._take)
        return self._native

    def add(self, text: MtpText, states: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds tokens to a text: the target's ``h[2L]`` ``[n, hidden]``, and the token after each, long ``[n]``."""
        text.missing.append((self._target.norm(states), token_ids))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Drafted]:
        """Drafts tokens of several sequences side by side, each request with a text as its state and a ``choose``."""
        inputs = [self._take(request.state) for request in requests]
        running = [_Draft(request) for request in requests]
        self._step(running, inputs)
        for each, (_, tokens) in zip(running, inputs, strict=True):
            each.text.cache.commit(range(len(tokens)))
            each.text.missing.clear()
        while on := [each for each in running if each.goes_on]:
            self._step(on, [(self.own.norm(each.state), each.tokens[-1]) for each in on])
        return [each.finish(0, (1,) * len(each.tokens)) for each in running]

    def _take(self, text: SequenceState) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a text that are missing; all but the last ones are made here."""
        assert isinstance(text, MtpText)
        states, tokens = map(_joined, zip(*text.missing, strict=True))
        done = 0
        while len(tokens) - done > _ROWS:
            end = min(done + _CHUNK, len(tokens) - 1)
            forward = self.own.lay_out(text, end - done, settled=True)
            self.runner.run(self._embed(states[done:end], tokens[done:end]), self._every, forward)
            text.cache.commit(range(end - done))
            done = end
        text.missing[:] = [(states[done:], tokens[done:])]
        return states[done:], tokens[done:]

    def _step(self, running: "Sequence[_Draft]", inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One forward: the next token of each."""
        layouts = [
            self.own.lay_out(each.text, len(tokens), start=each.start)
            for each, (_, tokens) in zip(running, inputs, strict=True)
        ]
        states, tokens = map(_joined, zip(*inputs, strict=True))
        confidence = any(each.request.stop is not None for each in running)
        output = self.runner.run(
            self._embed(states, tokens),
            self._every,
            Forward.join(layouts),
            logits=True,
            confidence=confidence,
        )
        assert output.logits is not None
        counts = [len(own) for _, own in inputs]
        for each, own, count in zip(running, output.split(counts), counts, strict=True):
            assert own.logits is not None
            each.take(own.hidden_states[-1:], self._of_all(own.logits.row(count - 1)), count)

    def _of_all(self, logits: Logits) -> Logits:
        """The logits of all tokens; those that the head does not draft are impossible."""
        others = self._target.vocab_size - logits.values.shape[-1]
        if others <= 0:
            return logits
        values = functional.pad(logits.values, (0, others), value=-torch.inf)
        return Logits(values, logits.best, logits.confidence, logits.finite)

    def _embed(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream before the head's layer."""
        return self._enter(self._target.decoder.embedding(tokens), states)


def _can_have(own: Target, precision: Precision) -> bool:
    try:
        own.check_low_bit(precision)
    except UnsupportedModelError:
        return False
    return True


class _Draft(DraftedTokens):
    """A draft in progress. ``start`` is the slot of the next row, ``state`` the residual stream of the last one."""

    def __init__(self, request: DraftRequest) -> None:
        super().__init__(request)
        assert isinstance(request.state, MtpText)
        self.text = request.state
        self.start = self.text.cache.length
        self.state: torch.Tensor

    def take(self, state: torch.Tensor, logits: Logits, rows: int) -> None:
        """Takes the token that the last of some rows chooses, ``[1, hidden]`` and its logits."""
        self.choose(logits)
        self.decide()
        self.state, self.start = state, self.start + rows


def first_outputs(head: Any, count: int) -> nn.Module:
    """A linear layer of the first outputs of another one, over its very weights.

    Raises:
        UnsupportedModelError: the layer is of a class whose weights cannot be divided.
    """
    if type(head) not in (nn.Linear, LowBitLinear):
        raise UnsupportedModelError(
            f"the LM head is a {type(head).__name__}, of which no part can run; leave the vocabulary of the head out"
        )
    return outputs_of(head, 0, count)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
class NativeMtp:
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

    def __init__(self, head: NativeMtp, texts: Sequence[MtpText | None], limits: Sequence[int]) -> None:
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
