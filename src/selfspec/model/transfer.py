"""What passes between host and device: the only place where decoding waits for a value.

A read that waits lets the device run dry, so a round makes one, at its end; what is wanted earlier is sent on its way
with ``Arrival`` and awaited when the device has been given more to do. On a CPU all of this is no more than a look at
the values.
"""

from collections.abc import Sequence
from typing import Any

import torch


class Arrival:
    """Values on their way to the host.

    On CUDA they are copied into pinned memory behind the work queued so far, with an event behind the copy.

    Args:
        values: tensors of any shapes and dtypes, all on one device. Floating point of up to 64 bits arrives unharmed,
            and so do integers below 2^53 in size.
    """

    def __init__(self, *values: torch.Tensor) -> None:
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values[0].is_cuda:
            packed = pack(values)
            self._landed = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._landed.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(packed.device))

    def wait(self) -> list[Any]:
        """The values as ``Tensor.tolist`` gives them, once they are there."""
        if self._copied is None:
            return [value.tolist() for value in self._values]
        self._copied.synchronize()
        return unpack(self._landed, self._values)


def read(*values: torch.Tensor) -> list[Any]:
    """Values of the device, waited for at once; see ``Arrival``."""
    return Arrival(*values).wait()


def send(values: Sequence[int] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Brings values of the host to a device, without waiting until they are there.

    Args:
        values: integers, or a tensor on the CPU.
        device: where they are wanted.

    Returns:
        A tensor on the device, long ``[n]`` for integers.
    """
    there = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.long)
    if torch.device(device).type == "cuda":
        return there.pin_memory().to(device, non_blocking=True)  # a copy from pageable memory waits
    return there.to(device)


def pack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors as one float64 ``[n]``, so that one copy carries them."""
    return torch.cat([value.reshape(-1).double() for value in values])


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[Any]:
    """Takes ``pack``'s tensor apart again.

    Args:
        packed: float64 ``[n]``, on the CPU.
        like: what it was packed of, for the shapes and dtypes.

    Returns:
        For each tensor its values, as ``Tensor.tolist`` gives them.
    """
    parts = torch.split(packed, [value.numel() for value in like])
    return [part.to(value.dtype).view(value.shape).tolist() for part, value in zip(parts, like, strict=True)]
