"""What an accelerator is, and which one: its name, its driver, its memory."""

import contextlib
import platform
from pathlib import Path
from typing import Any

import torch

from selfspec.memory import free_bytes

_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
"""Where Linux names the version of a loaded driver, in the first line."""


def is_accelerator(device: torch.device) -> bool:
    """Whether a trial has to find out how models run on a device: on all but the CPU, whose kernels are tested."""
    return device.type not in ("cpu", "meta")


def device_name(device: torch.device) -> str:
    """The device's name on CUDA, ROCm and XPU, else its type, as ``cpu``."""
    return str(getattr(torch, device.type).get_device_name(device)) if device.type in ("cuda", "xpu") else device.type


def describe_device(device: torch.device) -> dict[str, Any]:
    """A device: its type and name, its driver, the platform that torch was built for, and free memory in bytes."""
    return {
        "type": device.type,
        "name": device_name(device),
        "driver": driver_version(device),
        "platform": _platform(device),
        "free_bytes": free_bytes(device),
    }


def driver_version(device: torch.device) -> str | None:
    """The version of the device's driver, as far as the system or torch tells it; ``None`` where neither does.

    On CUDA without such a file it is the version of CUDA that the driver supports; on MPS that of macOS.
    """
    if device.type == "cuda":
        for file in _DRIVER_FILES:
            with contextlib.suppress(OSError):
                return file.read_text(encoding="utf-8").splitlines()[0].strip()
        ask = getattr(torch._C, "_cuda_getDriverVersion", None)
        return None if ask is None else str(ask())
    if device.type == "xpu":
        return str(torch.xpu.get_device_properties(device).driver_version)
    return platform.mac_ver()[0] or None if device.type == "mps" else None


def _platform(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
