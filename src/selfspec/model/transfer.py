"""Copies between host and device: the only place where decoding waits for a value.

A read that waits leaves the device without work, so a round makes one, at its end. What is needed earlier is copied
with ``AsyncCopy`` and awaited after more work has been queued. On a CPU nothing is copied.
"""

from collections.abc import Sequence
from typing import Any

import torch


class AsyncCopy:
    """An asynchronous copy of tensors to the host.

    On CUDA they are copied into pinned memory after the work queued so far, and an event is recorded after the copy.

    Args:
        values: tensors of any shapes and dtypes, all on one device. They pass through float64, which is exact for
            floating point of up to 64 bits and for integers below 2^53 in size.
    """

    def __init__(self, *values: torch.Tensor) -> None:
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values[0].is_cuda:
            packed = pack(values)
            self._on_host = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._on_host.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(packed.device))

    def wait(self) -> list[Any]:
        """Waits for the copy; returns the values as ``Tensor.tolist`` gives them."""
        if self._copied is None:
            return [value.tolist() for value in self._values]
        self._copied.synchronize()
        return unpack(self._on_host, self._values)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the host can read and write a tensor directly."""
    return tensor.is_cpu


def read(*values: torch.Tensor) -> list[Any]:
    """Copies tensors to the host and waits; see ``AsyncCopy``."""
    return AsyncCopy(*values).wait()


def send(values: Sequence[int] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copies integers (to long ``[n]``) or a tensor from the host to a device, without waiting for the copy."""
    on_host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.long)
    if torch.device(device).type == "cuda":
        return on_host.pin_memory().to(device, non_blocking=True)  # a copy from pageable memory waits
    return on_host.to(device)


def write(tensor: torch.Tensor, start: int, values: Sequence[int]) -> None:
    """Writes values of the host into a long ``[n]`` from an index on, without waiting."""
    if is_on_host(tensor):
        tensor.numpy()[start : start + len(values)] = values  # many times faster than a tensor for a few values
    else:
        tensor[start : start + len(values)] = send(values, tensor.device)


def pack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors as one float64 ``[n]``, so that one copy is enough."""
    return torch.cat([value.reshape(-1).double() for value in values])


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[Any]:
    """Splits ``pack``'s tensor, on the CPU, into the values (``Tensor.tolist``) of each tensor of ``like``."""
    parts = torch.split(packed, [value.numel() for value in like])
    return [part.to(value.dtype).view(value.shape).tolist() for part, value in zip(parts, like, strict=True)]
