"""A model that runs at one precision: the two calls of a round, ``draft`` and ``verify``, and the forms of runtimes."""

import warnings
from collections.abc import Iterable, Sequence
from functools import cache

from selfspec.model.decoder import Decoder
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes import drafting, verifying
from selfspec.runtimes.branches import compile_block
from selfspec.runtimes.chain import Drafted, DraftRequest, VerifyRequest
from selfspec.runtimes.fused import fast_norm, fuse
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.kernels import WITHOUT_KERNELS
from selfspec.runtimes.path import NO_KERNELS, Path
from selfspec.runtimes.products import Function, compile_head
from selfspec.runtimes.stack import Stack
from selfspec.runtimes.verifying import VerifiedRows

RUNTIMES = {
    "auto": "the fastest that works for this model, sublayer by sublayer",
    "eager": "transformers' own modules: slow, and the reference for the others",
    "fused": "fused blocks; refused where no sublayer of the model can have one",
    "compiled": "fused blocks with compiled kernels for few rows, of the wheel or built at first use; CPU only",
    "graphs": "fused blocks, replayed as CUDA graphs where rows are few; CUDA only, and not measured yet",
}
"""How the sublayers run. ``auto`` takes what has been measured to be fastest, so it does not take ``graphs`` yet."""


class Runner(Stack):
    """A model at one precision: drafts tokens, verifies them, and runs any of its sublayers. Made by ``Target.at``."""

    def with_products(self, sublayers: Sequence[Sublayer], head: Function) -> "Runner":
        """The same model with other products, which run whatever the number of rows."""
        compiled = self.native is not None
        return Runner(self._decoder, self.rope, sublayers, self._norm, head, compiled=compiled, any_rows=True)

    def path(self, sublayers: Iterable[int] | None = None) -> Path:
        """Whether drafts through some sublayers run as one native call, or the verification through all of them."""
        if self.native is None:
            return NO_KERNELS
        return self.native.chain_path(self._every if sublayers is None else tuple(sublayers), self.rope)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Drafted]:
        """Drafts tokens of several sequences side by side. Forwards through the same sublayers run as one.

        Where kernels choose the tokens (``DraftRequest.choose`` is ``None``) all forwards of a draft are one native
        call, else they run one after the other.
        """
        return drafting.draft(self, requests)

    def verify(self, requests: Sequence[VerifyRequest], *, native: bool) -> list[VerifiedRows]:
        """Runs the whole model over the last tokens and the drafts of several sequences.

        Args:
            requests: of the sequences.
            native: run all of it in one native call; only chains without shared or captured states, where ``path`` is
                native. The logits are those of the other way bit for bit.
        """
        return verifying.verify(self, requests, native=native)


def prepare(decoder: Decoder, runtime: str) -> Runner:
    """A runtime's form of a model, at full precision, as the model is now.

    Args:
        decoder: the model.
        runtime: one of ``RUNTIMES``.

    Returns:
        The model's form. Where kernels cannot be built it warns: each time if they were asked for, else once a process.

    Raises:
        UnsupportedModelError: a layer lacks a module of its family.
    """
    sublayers, rope = decoder.split(), decoder.new_rope()
    if runtime == "eager":
        return Runner(decoder, rope, sublayers, decoder.final_norm, decoder.head, compiled=False)
    sublayers = [fuse(sublayer, decoder.family, index // 2) for index, sublayer in enumerate(sublayers)]
    norm = fast_norm(decoder.final_norm, decoder.family)
    if runtime in ("auto", "compiled"):
        try:
            head = compile_head(decoder.head)
            return Runner(decoder, rope, [compile_block(each) for each in sublayers], norm, head, compiled=True)
        except KernelBuildError as error:
            if runtime == "compiled":
                warnings.warn(f"the compiled runtime falls back to fused blocks: {error}", RuntimeWarning, stacklevel=4)
            else:
                _warn_once(str(error))
    return Runner(decoder, rope, sublayers, norm, decoder.head, compiled=False)


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"there are no compiled kernels, so {WITHOUT_KERNELS}: {reason}", RuntimeWarning, stacklevel=6)
