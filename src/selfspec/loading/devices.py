"""Dtypes and devices by name."""

from typing import Any

import torch

from selfspec.errors import DeviceError, explaining

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(dtype: str | torch.dtype) -> Any:
    """The dtype of a name; ``auto`` is returned unchanged."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise DeviceError(f"unknown dtype '{dtype}'; choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device) -> torch.device:
    """The device of a name, after a check that it can be used; ``auto`` is CUDA if available, otherwise the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with explaining(DeviceError, f"device '{device}' cannot be used", RuntimeError, AssertionError):
        parsed = torch.device(device)
        torch.empty(1, device=parsed)
    if parsed.type == "meta":
        raise DeviceError("device 'meta' has no data; use 'cpu' or 'cuda'")
    return parsed
