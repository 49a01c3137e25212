"""Accelerators by name, with what their makers publish about them."""

from dataclasses import dataclass

from selfspec.errors import InvalidParameterError


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: as its maker calls it.
        target: what Triton compiles for: ``sm_80``, ``gfx942`` and so on.
        memory: bytes.
        bytes_per_second: of its memory.
        operations_per_second: of bfloat16 products with sums in float32, without sparsity; a multiply-add is two.
        units: streaming multiprocessors or compute units.
        lanes: of a unit for float32.
        clock: boost clock in Hz.
        source: where the numbers are published.
    """

    name: str
    target: str
    memory: float
    bytes_per_second: float
    operations_per_second: float
    units: int
    lanes: int
    clock: float
    source: str


_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet (2021); architecture white paper for units and clock"
_GA102 = "NVIDIA RTX A6000 data sheet and Ampere GA102 architecture white paper"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet (half of the figure with sparsity) and architecture white paper"
_ADA = "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"
_CDNA = "AMD Instinct MI300X data sheet and CDNA 3 white paper"

DEVICES = {
    device.name: device
    for device in (
        Device("A100 40GB", "sm_80", 40e9, 1.555e12, 312e12, 108, 64, 1.41e9, _AMPERE),
        Device("A100", "sm_80", 80e9, 2.039e12, 312e12, 108, 64, 1.41e9, _AMPERE),
        Device("A800", "sm_80", 80e9, 2.039e12, 312e12, 108, 64, 1.41e9, "as A100, which differs in its links alone"),
        Device("RTX A6000", "sm_80", 48e9, 0.768e12, 154.8e12, 84, 128, 1.8e9, _GA102),
        Device("H100", "sm_90", 80e9, 3.35e12, 989.4e12, 132, 128, 1.83e9, _HOPPER),
        Device("H100 PCIe", "sm_90", 80e9, 2.0e12, 756e12, 114, 128, 1.755e9, _HOPPER),
        Device("RTX 4090", "sm_80", 24e9, 1.008e12, 165.2e12, 128, 128, 2.52e9, _ADA),
        Device("MI300X", "gfx942", 192e9, 5.3e12, 1307.4e12, 304, 64, 2.1e9, _CDNA),
    )
}
"""By name. ``A100`` and ``H100`` are the SXM modules of 80 GB. Code for sm_80 runs on 8.6 and 8.9, too."""


def find_device(name: str) -> Device:
    """A device by its name, in any case; raises ``InvalidParameterError`` for one that is not in the table."""
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise InvalidParameterError(f"no published numbers of the device {name!r}; known: {', '.join(DEVICES)}")
