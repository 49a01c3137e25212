"""What it takes to compile a kernel offline, for a named device and without a driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelForm:
    """A kernel with the values that its compilation depends on, for one shape of a real model.

    Attributes:
        name: of the form, unique: ``q4_k 4096x4096 bfloat16``.
        kernel: the function with ``triton.jit``.
        signature: Triton's type of each argument that is no constant, by name: ``*bf16``, ``*u8``, ``i32``.
        constexprs: the constants, by name.
        num_warps: of a program.
        num_stages: of the software pipeline.
        aligned: arguments whose value is divisible by 16, as pointers of torch are.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = field(default=())

    @property
    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """What ``ASTSource(attrs=...)`` takes: that an argument is divisible by 16, by its place."""
        places = {name: place for place, name in enumerate(self.kernel.arg_names)}
        return {(places[name],): [["tt.divisibility", 16]] for name in self.aligned}
