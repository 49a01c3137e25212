"""The memory that a weight really takes, also where its class is another package's."""

from collections.abc import Iterator

import torch


def stored_tensors(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ordinary tensors that hold a weight: itself, or those inside of a wrapper (torchao's quantised weights)."""
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        yield weight.detach()
        return
    names, _ = flatten()
    for part in (getattr(weight, name) for name in names):
        if isinstance(part, torch.Tensor):  # a weight that processes share also names their mesh
            yield from stored_tensors(part)


def stored_bytes(weight: torch.Tensor) -> int:
    """What a weight takes, in bytes."""
    return sum(tensor.nbytes for tensor in stored_tensors(weight))
