"""The fraction of a device's memory bandwidth that a kernel can reach, by its bytes and instructions: a prediction.

A program needs the bandwidth for the bytes that it has to read, and for the partial sums that it writes and another
kernel reads; and it needs the issue slots of its units for its instructions. What takes longest is the limit. All units
are taken to be busy, and latencies to be hidden.
"""

from typing import NamedTuple

from selfspec_lab.offline.compiling import Binary
from selfspec_lab.offline.forms import KernelForm
from selfspec_lab.offline.instructions import count_instructions
from selfspec_lab.roofline.devices import Device

_ITEM = {"*bf16": 2, "*fp16": 2, "*fp32": 4}

_MATRIX = {"sm": 2 * 16 * 8 * 16, "gfx": 2 * 16 * 16 * 16}
"""Operations of a matrix instruction of 16-bit numbers."""


class Program(NamedTuple):
    """What one program of a kernel reads on one row.

    Attributes:
        bytes: of weights, or of keys and values: what has to be read once.
        partial: bytes that it writes for another kernel, and that this one reads.
        iterations: of its loop.
    """

    bytes: int
    partial: int
    iterations: int


def program_of(form: KernelForm) -> Program | None:
    """What a program of a form reads; ``None`` for kernels that read what other kernels wrote."""
    own = form.constexprs
    if form.kernel.__name__ == "attend_split":
        from selfspec.gpu.attention import SPLIT

        read = 2 * SPLIT * own["DIM"] * _ITEM[form.signature["keys"]]
        return Program(read, 2 * own["GROUP"] * (own["DIM"] + 2) * 4, SPLIT // own["STEP"])
    if form.kernel.__name__ not in ("dense_product", "low_bit_product"):
        return None
    shared = own["SHARES"]
    partial, iterations = 2 * 4 * shared.outputs if shared.splits > 1 else 0, -(-shared.share // shared.step)
    if form.kernel.__name__ == "dense_product":
        return Program(shared.outputs * shared.share * _ITEM[form.signature["weights"]], partial, iterations)
    return Program(shared.outputs // 16 * shared.share * own["FORM"].unit_bytes, partial, iterations)


def weight_bits(form: KernelForm) -> int | None:
    """The bits of the weights of a product of bfloat16 rows by a model's own weights or a draft's; else ``None``."""
    if form.signature.get("x") != "*bf16":
        return None
    if form.kernel.__name__ == "dense_product":
        return 16
    if form.kernel.__name__ != "low_bit_product":
        return None
    own = form.constexprs["FORM"]
    return int(own.bits) if own.kind == "symmetric" and own.unit == 32 else None


def predicted_fraction(form: KernelForm, binary: Binary, device: Device) -> float | None:
    """The least seconds that the bytes take, over the predicted seconds, for one row; ``None`` as of ``program_of``."""
    program = program_of(form)
    if program is None:
        return None
    clocks = form.num_warps * max(
        count_instructions(binary, kind).issued(program.iterations) / rate for kind, rate in _rates(device).items()
    )
    least = program.bytes / device.bytes_per_second
    moved = (program.bytes + program.partial) / device.bytes_per_second
    return least / max(moved, clocks / device.clock / device.units)


def _rates(device: Device) -> dict[str, float]:
    """Instructions of a warp, by kind, that a unit starts in a clock.

    NVIDIA's units have four schedulers, 64 lanes for integers, logic and comparisons, and 16 for conversions of floats;
    those for floats differ (CUDA C++ Best Practices Guide 13, throughput of native arithmetic instructions). AMD's have
    four vector units of 16 lanes, which take four clocks for the 64 lanes of a wave; instructions of other units are
    issued beside them (ROCm Compute Profiler, pipeline descriptions). Matrix instructions follow from the peak.
    """
    family = device.target.partition("_")[0].rstrip("0123456789")
    matrix = device.operations_per_second / device.clock / device.units / _MATRIX[family]
    if family == "gfx":
        return {"vector": device.lanes / 64, "matrix": matrix}
    return {"vector": 4.0, "integer": 2.0, "float": device.lanes / 32, "conversion": 0.5, "matrix": matrix}
