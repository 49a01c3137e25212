"""Compiles a kernel for a target without a driver, and reads what the assembler says about it."""

import hashlib
import re
import tempfile
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from selfspec.errors import MissingPackageError
from selfspec_lab.offline.forms import KernelForm

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Backend, architecture and lanes of a warp of each target: A100, H100, B200, RTX 50 and MI300."""


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        registers: 32-bit registers of a thread.
        shared: bytes of shared memory of a program.
        spilled: registers or bytes that were written to memory for want of registers, stack included; 0 is the goal.
        digest: the first 16 digits of SHA-256 of the code.
        code: of the device: a cubin or an hsaco.
        assembly: AMD's assembly; PTX of NVIDIA.
    """

    registers: int
    shared: int
    spilled: int
    digest: str
    code: bytes
    assembly: str


def compile_form(form: KernelForm, target: str) -> Binary:
    """Compiles a form for one of ``TARGETS``, anew each time.

    Multiplications and additions may be fused, as where kernels are launched. The option is explicit, since Triton's
    default for it changes with its version, and with it the bits of the results.

    Raises:
        MissingPackageError: Triton is not installed.
    """
    try:
        import triton
        from triton import knobs
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError:
        raise MissingPackageError("compiling kernels needs Triton: pip install 'selfspec[triton]'") from None
    names = list(form.kernel.arg_names)
    signature = {name: "constexpr" if name in form.constexprs else form.signature[name] for name in names}
    constants = {(names.index(name),): value for name, value in form.constexprs.items()}
    source = ASTSource(form.kernel, signature, constexprs=constants, attrs=form.attributes)
    options = {"num_warps": form.num_warps, "num_stages": form.num_stages, "enable_fp_fusion": True}
    log = StringIO()
    scopes = knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope()
    with ExitStack() as stack:
        for scope in (*scopes, redirect_stdout(log)):
            stack.enter_context(scope)
        # A folder of its own: nothing compiled before is taken, and nothing is left.
        knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory())
        knobs.compilation.disable_line_info = True  # it names folders of this machine
        knobs.nvidia.dump_ptxas_log = True
        compiled: Any = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        return nvidia_binary(log.getvalue(), shared, compiled.asm["cubin"], compiled.asm["ptx"])
    return amd_binary(shared, compiled.asm["hsaco"], compiled.asm["amdgcn"])


def nvidia_binary(log: str, shared: int, code: bytes, assembly: str) -> Binary:
    """What the log of ``ptxas -v`` says of one kernel."""
    registers = _number(r"Used (\d+) registers", log)
    stack = (r"(\d+) bytes stack frame", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    spilled = sum(_number(pattern, log) for pattern in stack)
    return Binary(registers, shared, spilled, _digest(code), code, assembly)


def amd_binary(shared: int, code: bytes, assembly: str) -> Binary:
    """What the metadata in AMD's assembly say of one kernel. Spilled are its registers, and its bytes of scratch."""
    registers = _number(r"\.vgpr_count:\s+(\d+)", assembly)
    places = (r"\.vgpr_spill_count:\s+(\d+)", r"\.sgpr_spill_count:\s+(\d+)", r"private_segment_fixed_size:\s+(\d+)")
    spilled = sum(_number(pattern, assembly) for pattern in places)
    return Binary(registers, shared, spilled, _digest(code), code, assembly)


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    assert len(found) == 1, f"{pattern} is found {len(found)} times"
    return int(found[0])


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:16]
