"""A model that runs at one precision: the two calls of a round, ``draft`` and ``verify``, and the forms on the CPU."""

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from functools import cache

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
from selfspec.runtimes.stack import Stack

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

        In one native call (``native``), where ``path`` is native, or as a forward from Python, with the same logits bit
        for bit.
        """
        counts = [len(each.token_ids) for each in requests]
        if native:
            assert self.native is not None
            logits, captured = self.native.verify(requests, self.rope)
            return [VerifiedRows(own, states) for own, states in zip(logits.split(counts), captured, strict=True)]
        parts = [
            self.lay_out(each.state, count, depths=each.depths, visible=each.visible, drawing=each.drawing)
            for each, count in zip(requests, counts, strict=True)
        ]
        rows = [
            _embed(self, each.token_ids, part, each.mask_embedding) for each, part in zip(requests, parts, strict=True)
        ]
        output = self.run(
            rows[0] if len(rows) == 1 else torch.cat(rows),
            self._every,
            Forward.join(parts),
            {index for each in requests for index in each.capture},
            logits=True,
        )
        verified = []
        for each, own in zip(requests, output.split(counts), strict=True):
            assert own.logits is not None
            verified.append(VerifiedRows(own.logits, {index: own.captured[index] for index in each.capture}))
        return verified


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
