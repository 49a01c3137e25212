"""A model that runs at one precision: the two calls of a round, ``draft`` and ``verify``, and the forms on the CPU."""

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

import torch

from selfspec.errors import FallbackWarning
from selfspec.model.decoder import Decoder
from selfspec.model.forward import Forward
from selfspec.model.observed import ObservedDecoder
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes import delta_net, draft_loop, mamba, mamba2, short_convolution
from selfspec.runtimes.branches import compile_block
from selfspec.runtimes.chain import (
    NO_KERNELS,
    PROBE,
    Drafted,
    DraftRequest,
    Path,
    RunningHead,
    VerifiedRows,
    VerifyRequest,
)
from selfspec.runtimes.device_kernels import DeviceKernels
from selfspec.runtimes.fused import fast_norm, fuse
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.kernels import WITHOUT_KERNELS
from selfspec.runtimes.products import Function, compile_head
from selfspec.runtimes.recurrent import compile_recurrent
from selfspec.runtimes.stack import Stack, StackOutput

RECURRENT = {**short_convolution.FORMS, **delta_net.FORMS, **mamba.FORMS, **mamba2.FORMS}
"""The recurrent branches whose rows share the products, by the class of the module."""


class Runner(Stack):
    """A model at one precision: drafts tokens, verifies them, and runs any of its sublayers. Made by ``Target.at``."""

    def with_products(
        self, sublayers: Sequence[Sublayer], head: Function, device_kernels: DeviceKernels | None = None
    ) -> "Runner":
        """The same model with other products, which run whatever the number of rows; by default the same choice."""
        parts = self._decoder, self.rope, sublayers, self.final_norm, head
        kernels = device_kernels or self.device_kernels
        made = Runner(*parts, compiled=self.native is not None, any_rows=True, device_kernels=kernels)
        made.graphs = None if self.graphs is None else self.graphs.of(made.sublayers)
        return made

    def path(self, sublayers: Iterable[int] | None = None) -> Path:
        """Whether drafts through some sublayers run as one native call, or the verification through all of them."""
        if self.native is None:
            return NO_KERNELS if self.device_kernels is None else self.device_kernels.path
        return self.native.chain_path(self._every if sublayers is None else tuple(sublayers), self.rope)

    def draft(self, requests: Sequence[DraftRequest], head: RunningHead | None = None) -> list[Drafted]:
        """Drafts tokens of several sequences side by side. Forwards through the same sublayers run as one.

        Where kernels choose the tokens (``DraftRequest.choose`` is ``None``) all forwards of a draft are one native
        call, else they run one after the other. In a run of the whole model, which kernels choose for, ``head`` drafts.
        """
        if head is not None:
            assert self.native is not None
            return self.native.chain(requests, self.rope, head)
        return draft_loop.draft(self, requests)

    def verify(self, requests: Sequence[VerifyRequest], *, native: bool) -> list[VerifiedRows]:
        """Runs the whole model over the last tokens and the drafts of several sequences.

        In one native call (``native``) only rows without shared states, where ``path`` is native. The
        logits are those of the other way bit for bit.
        """
        if not native:
            return _verify_ranges(self, [_Rows(self, each) for each in requests])
        assert self.native is not None
        logits, captured = self.native.verify(requests, self.rope)
        rows = logits.split([len(each.token_ids) for each in requests])
        return [VerifiedRows(own, states) for own, states in zip(rows, captured, strict=True)]


def _verify_ranges(runner: Runner, parts: Sequence["_Rows"]) -> list[VerifiedRows]:
    """Runs ranges of sublayers one after the other; rows that a draft has computed enter where these states end."""
    last, logits = len(runner.sublayers), None
    for first, end in pairwise(sorted({0, last, *(part.shared_prefix for part in parts)})):
        for part in parts:
            part.enter(first)
        # A draft with all sublayers has computed its rows to the end, which are added there.
        scored = end == last and all(part.shared_prefix < last for part in parts)
        states = parts[0].states if len(parts) == 1 else torch.cat([part.states for part in parts])
        forward = Forward.join([part.forward for part in parts]) if len(parts) > 1 else parts[0].forward
        capture = {index for part in parts for index in part.wanted(first, end)}
        output = runner.run(states, range(first, end), forward, capture, logits=scored)
        logits = output.logits
        for part, own in zip(parts, output.split([len(part.states) for part in parts]), strict=True):
            part.take(own, first, end)
    for part in parts:
        part.enter(last)
    counts = [len(part.states) for part in parts]
    if logits is None:
        rows = Forward.join([part.forward for part in parts])
        logits = runner.score(torch.cat([part.states for part in parts]), rows.widest, rows)
    return [VerifiedRows(own, part.captured) for part, own in zip(parts, logits.split(counts), strict=True)]


class _Rows:
    """The rows of one sequence on their way through the sublayers."""

    def __init__(self, runner: Runner, request: VerifyRequest) -> None:
        state, tokens, length = request.state, request.token_ids, request.state.cache.length
        depths, visible = request.depths, request.visible
        self._whole = runner.lay_out(state, len(tokens), depths=depths, visible=visible, drawing=request.drawing)
        self._shared = request.shared_states
        self._captures = frozenset(request.capture)
        self.shared_prefix = request.shared_prefix if self._shared else 0
        self.captured: dict[int, torch.Tensor] = {}
        if not self._shared:
            self.forward, self.states = self._whole, _embed(runner, tokens, self._whole, request.mask_embedding)
            return
        if runner.reads_tokens:
            runner.embed(tokens.clamp(min=0), self._whole)
        known = len(self._shared[self.shared_prefix])
        self.forward = runner.lay_out(
            state,
            len(tokens) - known,
            start=length + known,
            prefix=None if visible is None else length,
            depths=None if depths is None else depths[known:],
            visible=None if visible is None else visible[known:],
        )
        self.states = _embed(runner, tokens[known:], self.forward, request.mask_embedding)

    def wanted(self, first: int, end: int) -> set[int]:
        """Sublayers of ``first`` to ``end`` whose states to capture; the first was the last of the range before."""
        wanted = self._captures | (self._shared.keys() if first < self.shared_prefix else frozenset())
        return {index for index in wanted if first < index <= end or index == first == 0}

    def take(self, output: StackOutput, first: int, end: int) -> None:
        """Takes what a range of sublayers gave."""
        self.states = output.hidden_states
        self.captured.update({index: output.captured[index] for index in self.wanted(first, end)})

    def enter(self, sublayer: int) -> None:
        """Adds the rows that the draft has computed, where this sublayer is the end of the shared prefix."""
        if not self._shared or sublayer != self.shared_prefix:
            return
        states = {index: torch.cat([rows, self.captured[index]]) for index, rows in self._shared.items()}
        self.forward, self.states = self._whole, states[sublayer]
        self.captured = {index: states[index] for index in self._captures & states.keys()}


def _embed(runner: Runner, tokens: torch.Tensor, forward: Forward, mask_embedding: torch.Tensor | None) -> torch.Tensor:
    """The embeddings of rows; ``mask_embedding`` for those of probes, or zero."""
    states = runner.embed(tokens.clamp(min=0), forward)
    return torch.where((tokens == PROBE)[:, None], 0.0 if mask_embedding is None else mask_embedding, states)


def make_runner(decoder: Decoder, runtime: str) -> Runner:
    """The form of a model for ``eager``, ``fused``, ``compiled`` or ``auto``, at full precision, as the model is now.

    Where kernels cannot be built it warns: each time if they were asked for, else once a process. It warns once, too,
    where the CPU has none for the model's dtype.
    """
    sublayers, rope = decoder.split(), decoder.new_rope()
    if runtime != "eager" and decoder.like.is_cpu and decoder.like.dtype == torch.float16:
        _warn_once("float16 has no kernels on a CPU, so decoding is much slower; load the model in bfloat16")
    if runtime == "auto" and isinstance(decoder, ObservedDecoder):
        with contextlib.suppress(KernelBuildError):
            sublayers = [compile_recurrent(each, RECURRENT) for each in sublayers]
    if runtime == "eager" or isinstance(decoder, ObservedDecoder):
        return Runner(decoder, rope, sublayers, decoder.final_norm, decoder.head, compiled=False)
    sublayers = [fuse(sublayer, decoder.family, index // 2) for index, sublayer in enumerate(sublayers)]
    norm = fast_norm(decoder.final_norm, decoder.family)
    if runtime in ("auto", "compiled"):
        try:
            head = compile_head(decoder.head)
            return Runner(
                decoder,
                rope,
                [compile_block(each, decoder.family, index // 2) for index, each in enumerate(sublayers)],
                norm,
                head,
                compiled=True,
            )
        except KernelBuildError as error:
            if runtime == "compiled":
                warnings.warn(
                    f"the compiled runtime falls back to fused blocks: {error}", FallbackWarning, stacklevel=4
                )
            else:
                _warn_once(f"there are no compiled kernels, so {WITHOUT_KERNELS}: {error}")
    return Runner(decoder, rope, sublayers, norm, decoder.head, compiled=False)


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=6)
