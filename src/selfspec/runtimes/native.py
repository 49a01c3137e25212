"""A native forward: compiled sublayers one after the other in a single call, by one team of threads.

Between sublayers there is neither Python nor a thread that has to be woken. Each row gets bit for bit what the compiled
sublayers give it one by one.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from selfspec.model.sublayers import AttentionSublayer, Step, Sublayer
from selfspec.runtimes.compiled import CompiledAttention, CompiledMLP
from selfspec.runtimes.kernels import DTYPES, Forward, NativeSublayer, Turning, View, load, most_attending

_KEPT_SETS = 256
"""How many sets of sublayers are remembered in the form that a forward takes."""


class NativeForward:
    """The sublayers of a model that can run in a native forward.

    Args:
        sublayers: all of them, ``2L``.

    Attributes:
        most_rows: most rows of a forward; 0 where no sublayer can take part.
    """

    def __init__(self, sublayers: Sequence[Sublayer]) -> None:
        attention = [sublayer for sublayer in sublayers if isinstance(sublayer, AttentionSublayer)]
        self._windows = list(dict.fromkeys(sublayer.window for sublayer in attention))
        self._kinds = list(dict.fromkeys(sublayer.rope for sublayer in attention))
        described = [self._describe(index, sublayer) for index, sublayer in enumerate(sublayers)]
        self._native = [each is not None for each in described]
        self._sublayers = (NativeSublayer * len(described))(*(each or NativeSublayer() for each in described))
        self._which = lru_cache(_KEPT_SETS)(lambda indices: (ctypes.c_int * len(indices))(*indices))
        self._dtype, self.most_rows = None, 0
        if any(self._native):
            self._dtype = next(iter(sublayers[self._native.index(True)].parameters())).dtype
            self.most_rows = most_attending(self._dtype)
            self._call = getattr(load(), f"forward_{DTYPES[self._dtype]}")

    def takes(self, hidden_states: torch.Tensor, sublayers: Sequence[int], step: Step) -> bool:
        """Whether a forward can run natively.

        Args:
            hidden_states: ``[rows, hidden]``.
            sublayers: indices of those to run.
            step: the layout of the rows.
        """
        if hidden_states.shape[0] > self.most_rows or hidden_states.dtype != self._dtype:
            return False
        return all(self._native[index] for index in sublayers) and all(
            cosine.dtype == self._dtype and cosine.is_contiguous() and sine.is_contiguous()
            for cosine, sine in map(step.turn, self._kinds)
        )

    def run(
        self, stream: torch.Tensor, sublayers: tuple[int, ...], step: Step, kept: dict[int, torch.Tensor] | None = None
    ) -> None:
        """Runs sublayers over the rows of a step.

        Args:
            stream: ``[rows, hidden]``, contiguous; the residual stream, changed in place.
            sublayers: ascending indices.
            step: the layout of the rows; ``takes`` has let it pass.
            kept: by place in ``sublayers`` a contiguous tensor ``[k, hidden]`` that gets the last ``k`` rows of the
                stream before that sublayer.
        """
        rows, layout, cache = stream.shape[0], step.layout, step.sequence.cache
        assert stream.is_contiguous()
        assert 2 * len(cache.addresses) == len(self._native), "a cache of another model"
        assert layout.end <= cache.capacity, f"slots up to {layout.end} do not fit a cache of {cache.capacity}"
        count = len(sublayers)
        addresses, lengths = (ctypes.c_void_p * count)(), (ctypes.c_long * count)()
        for place, tensor in (kept or {}).items():
            addresses[place], lengths[place] = tensor.data_ptr(), tensor.shape[0]
        masks = [layout.mask(window, stream.dtype, additive=False, causal_kernel=False) for window in self._windows]
        views = (View * len(masks))(
            *(
                View(_address(mask), layout.first_slot(window))
                for mask, window in zip(masks, self._windows, strict=True)
            )
        )
        pairs = [step.turn(kind) for kind in self._kinds]
        turns = (Turning * len(pairs))(
            *(Turning(cosine.data_ptr(), sine.data_ptr(), cosine.shape[-1]) for cosine, sine in pairs)
        )
        forward = Forward(
            sublayers=self._sublayers,
            which=self._which(sublayers),
            count=count,
            kept=addresses,
            kept_rows=lengths,
            caches=cache.addresses,
            capacity=cache.capacity,
            start=layout.start,
            views=views,
            turns=turns,
            threads=torch.get_num_threads(),
        )
        self._call(ctypes.byref(forward), stream.data_ptr(), rows)

    def _describe(self, index: int, sublayer: Sublayer) -> NativeSublayer | None:
        if isinstance(sublayer, CompiledAttention):
            view, turn = self._windows.index(sublayer.window), self._kinds.index(sublayer.rope)
            return sublayer.describe(index // 2, view, turn)
        return sublayer.describe(index // 2, 0, -1) if isinstance(sublayer, CompiledMLP) else None


def _address(mask: torch.Tensor | None) -> Any:
    assert mask is None or mask.is_contiguous()
    return None if mask is None else mask.data_ptr()
