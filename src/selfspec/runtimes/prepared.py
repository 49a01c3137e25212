"""What a runtime makes of a model: blocks for its sublayers, its final norm and its head."""

import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from selfspec.model.decoder import Decoder
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.compiled import CompiledProduct, compile_block, compile_head
from selfspec.runtimes.fused import Function, fast_norm, fuse
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.kernels import WITHOUT_KERNELS
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.native_weights import HeadWeights
from selfspec.runtimes.norms import RmsNorm
from selfspec.runtimes.products import is_plain, signature

RUNTIMES = {
    "auto": "the fastest that works for this model, sublayer by sublayer",
    "eager": "transformers' own modules: slow, and the reference for the others",
    "fused": "fused blocks; refused where no sublayer of the model can have one",
    "compiled": "fused blocks with compiled kernels for few rows, of the wheel or built at first use; CPU only",
    "graphs": "fused blocks, replayed as CUDA graphs where rows are few; CUDA only, and not measured yet",
}
"""How the sublayers run. ``auto`` takes what has been measured to be fastest, so it does not take ``graphs`` yet."""


@dataclass
class Prepared:
    """A model in the form in which a runtime runs it.

    Attributes:
        sublayers: all ``2L``, each in the runtime's form or, where there is none, a slower one.
        norm: the final norm.
        head: the LM head.
        modules: the final norm and the head as the model has them.
        native: runs several of the sublayers in one call, if there are kernels.
        embedding: the weights of the embedding, ``[vocab, hidden]``, where it does nothing but take rows of them, and
            logits are not scaled.
    """

    sublayers: list[Sublayer]
    norm: Function
    head: Function | CompiledProduct
    modules: list[nn.Module]
    native: NativeForward | None = None
    embedding: torch.Tensor | None = None
    _signature: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Notes the modules' weights."""
        self._signature = signature(self.modules)

    def is_current(self) -> bool:
        """Whether the model's modules still are those, with those weights, that this was made of."""
        return self._signature == signature(self.modules) and all(each.is_current() for each in self.sublayers)


def prepare(decoder: Decoder, runtime: str) -> Prepared:
    """Makes a runtime's form of a model as the model is now.

    Args:
        decoder: the model.
        runtime: one of ``RUNTIMES``.

    Returns:
        The model's form. Where kernels cannot be built it warns: each time if they were asked for, else once a process.

    Raises:
        UnsupportedModelError: a layer lacks a module of its family.
    """
    sublayers, modules = decoder.split(), [decoder.final_norm, decoder.head, decoder.embedding]
    if runtime == "eager":
        return Prepared(sublayers, decoder.final_norm, decoder.head, modules)
    sublayers = [fuse(sublayer, decoder.family, index // 2) for index, sublayer in enumerate(sublayers)]
    fused = Prepared(sublayers, fast_norm(decoder.final_norm, decoder.family), decoder.head, modules)
    if runtime not in ("auto", "compiled"):
        return fused
    try:
        head = compile_head(decoder.head)
        compiled = [compile_block(sublayer, decoder.family) for sublayer in sublayers]
    except KernelBuildError as error:
        if runtime == "compiled":
            warnings.warn(f"the compiled runtime falls back to fused blocks: {error}", RuntimeWarning, stacklevel=4)
        else:
            _warn_once(str(error))
        return fused
    branches, embedding = [getattr(sublayer, "native", None) for sublayer in compiled], _embedding_weights(decoder)
    native = NativeForward(branches, head_weights(fused.norm, head), embedding)
    return Prepared(compiled, fused.norm, head, modules, native, embedding)


def _embedding_weights(decoder: Decoder) -> torch.Tensor | None:
    """The weights of an embedding that takes rows of them and does nothing else, of a model with plain logits."""
    module = decoder.embedding
    if type(module) is not nn.Embedding or not is_plain(module) or module.max_norm is not None:
        return None
    ordinary = type(module.weight) is nn.Parameter and module.weight.is_contiguous()
    plain = decoder.embedding_scale is None and not decoder.scales_logits
    return module.weight.detach() if ordinary and plain else None


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"there are no compiled kernels, so {WITHOUT_KERNELS}: {reason}", RuntimeWarning, stacklevel=6)


def head_weights(norm: Function, head: Function | CompiledProduct) -> HeadWeights | None:
    """Final norm and LM head in the form that a native forward takes; ``None`` where they have none.

    Args:
        norm: the final norm.
        head: the LM head.
    """
    if not isinstance(norm, RmsNorm) or not isinstance(head, CompiledProduct):
        return None
    return HeadWeights(norm, head.linear, head.shape[0])
