"""Instructions of a compiled kernel, by its assembly: those of its loops and those outside of them."""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from selfspec_lab.offline.compiling import Binary

_NVIDIA = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w[\w.]*)([^;]*);")
_AMD = re.compile(r"^\t([vs]_\w+|ds_\w+|global_\w+|buffer_\w+)(.*)$")
_LABEL = re.compile(r"^(\.\w+):")
_TARGET = re.compile(r"(\.L\w+)")
_LOGIC = ("LOP", "PLOP", "SHF", "PRMT", "SEL", "SGXT", "BMSK")
_INTEGER = ("IADD", "LEA", "ISETP", "IMNMX", "VIADD", "VIMNMX", "IABS")
_COMPARED = ("FMNMX", "FSEL", "FSETP")
_KINDS = {
    "vector": ("",),
    "integer": (*_LOGIC, *_INTEGER, *_COMPARED),
    "float": ("FFMA", "FADD", "FMUL", "HADD2", "HFMA2", "HMUL2", "IMAD"),
    "conversion": ("F2", "I2"),
    "matrix": ("HMMA",),
}
"""How NVIDIA's instructions of a kind begin; multiplications of integers run in the units of floats."""

_AMD_KINDS = {"vector": ("v_",), "matrix": ("v_mfma",)}
"""The same of AMD. Scalar instructions, loads and stores are issued beside the vector unit's."""

_IDLE = ("NOP", "s_nop")


@dataclass(frozen=True)
class Instructions:
    """How many instructions of some kind a warp issues.

    Attributes:
        outside: those outside of loops, all paths together.
        loops: those of each loop's body that has no loop inside, in order.
    """

    outside: int
    loops: tuple[int, ...]

    def issued(self, iterations: int) -> int:
        """At most this many in a program whose largest loop has ``iterations``."""
        largest = max(self.loops, default=0)
        return self.outside + sum(self.loops) - largest + iterations * largest


def count_instructions(binary: Binary, kind: str = "vector") -> Instructions:
    """The instructions of a kernel that are of a kind.

    Kinds are ``vector``, which on NVIDIA is all of them, and ``matrix``; on NVIDIA also ``integer``, which is logic and
    comparisons, too, ``float`` and ``conversion``.
    """
    if "amdgcn" in binary.assembly:
        return _count(_amd_lines(binary.assembly.splitlines(), _AMD_KINDS[kind]))
    return _count(_nvidia_lines(_disassembled(binary.code).splitlines(), _KINDS[kind]))


def _disassembled(code: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _nvidia_lines(lines: Iterable[str], kind: tuple[str, ...]) -> Iterator[tuple[str, str, bool]]:
    """Labels and branches as (label, target, counts); see ``_count``."""
    for line in lines:
        if label := _LABEL.match(line):
            yield label[1], "", False
        elif (found := _NVIDIA.match(line)) and found[1] not in _IDLE:
            target = _TARGET.search(found[2]) if found[1].startswith("BRA") else None
            yield "", target[1] if target else "", found[1].startswith(kind)


def _amd_lines(lines: Iterable[str], kind: tuple[str, ...]) -> Iterator[tuple[str, str, bool]]:
    for line in lines:
        if label := _LABEL.match(line):
            yield label[1], "", False
        elif (found := _AMD.match(line)) and found[1] not in _IDLE:
            target = _TARGET.search(found[2]) if "branch" in found[1] else None
            yield "", target[1] if target else "", found[1].startswith(kind)


def _count(lines: Iterable[tuple[str, str, bool]]) -> Instructions:
    """Counts from labels, and from instructions with the label that they branch to and whether they count."""
    places: dict[str, int] = {}
    before, loops = [0], []
    for label, target, counts in lines:
        if label:
            places[label] = len(before) - 1
            continue
        before.append(before[-1] + counts)
        first = places.get(target)
        if first is not None and len(before) - 2 > first:  # backwards, and not to itself
            loops.append((first, len(before) - 1))
    inner = [each for each in loops if not any(_inside(other, each) for other in loops if other != each)]
    bodies = tuple(before[end] - before[start] for start, end in inner)
    return Instructions(before[-1] - sum(bodies), bodies)


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
