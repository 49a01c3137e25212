"""Lays out the weights of a GGUF file in a thread, while the model that takes them is still being made.

To make a model, transformers' modules are imported, which takes seconds on one core. The kernels that lay out weights
need no Python meanwhile.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from selfspec.loading.gguf_header import GgufTensor
from selfspec.runtimes.formats import GGUF_FORMATS
from selfspec.runtimes.packed import PackedWeights

_REORDERED = ("attn_q", "attn_k")
"""Beginnings of names, after the block, of tensors whose rows some families have in another order, or in parts."""


class EarlyLayout:
    """Matrices, whole and in the order of the file. A context manager that ends the thread.

    Args:
        tensors: those of the file that keep their numbers; it stays open meanwhile.
        room: bytes that the weights may take; where they need more, nothing is laid out. ``None`` for any number.
    """

    def __init__(self, tensors: Mapping[str, GgufTensor], room: int | None) -> None:
        chosen = [tensor for tensor in tensors.values() if _is_whole(tensor)]
        needed = sum(GGUF_FORMATS[tensor.type].bytes(*tensor.shape) for tensor in chosen)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="selfspec-layout")
        self._begun: dict[str, Future[PackedWeights]] = {}
        if room is None or needed <= room:
            self._begun = {tensor.name: self._executor.submit(_lay_out, tensor) for tensor in chosen}

    def take(self, *names: str) -> PackedWeights | None:
        """The weights of a tensor, waiting for them if the thread is at them.

        ``None`` for several tensors, and if the thread has not begun; then it leaves them to the caller.
        """
        future = self._begun.pop(names[0], None) if len(names) == 1 else None
        return None if future is None or future.cancel() else future.result()

    def __enter__(self) -> "EarlyLayout":
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)


def _is_whole(tensor: GgufTensor) -> bool:
    last = tensor.name.rpartition(".")[0].rpartition(".")[2]
    return tensor.type in GGUF_FORMATS and len(tensor.shape) == 2 and not last.startswith(_REORDERED)


def _lay_out(tensor: GgufTensor) -> PackedWeights:
    threads = max(1, torch.get_num_threads() - 1)  # one core imports meanwhile
    outputs, inputs = tensor.shape
    data = tensor.data().reshape(outputs, -1)
    packed = PackedWeights.of_gguf(data, GGUF_FORMATS[tensor.type], (outputs, inputs), threads=threads)
    tensor.release()
    return packed
