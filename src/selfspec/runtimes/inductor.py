"""Fused blocks compiled by ``torch.compile``: one kernel for a norm, for rope, for an activation.

Compiled are the parts of a block that are functions of tensors alone, one form of each for all layers and any number of
rows. Attention on the cache, whose views change with every forward, stays torch's. The result of a part may differ in
the last bits.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from selfspec.errors import FallbackWarning, first_line
from selfspec.limits import is_out_of_memory
from selfspec.model.decoder import Decoder
from selfspec.runtimes.fused import FusedBlock, call
from selfspec.runtimes.runner import Runner, make_runner


class Compiler:
    """Calls compiled forms of functions, and the functions themselves once compiling has failed, with one warning.

    The functions must not change their arguments, so that a call that fails can be made again.

    Attributes:
        problem: why nothing is compiled any more; ``None`` while it is.
    """

    def __init__(self) -> None:
        self.problem: str | None = None

    def __call__(self, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """See ``fused.Execute``. Raises what it raises where memory runs out."""
        if self.problem is None:
            block, *rows, _widest, adapt = arguments  # the former is for kernels of the CPU, and would be compiled in
            try:
                _mark_rows(rows)
                return compiled(function)(block, *rows, 0, adapt)
            except Exception as error:  # of torch's compiler or of the system's, of any kind
                if is_out_of_memory(error):
                    raise
                self.problem = f"torch.compile failed: {first_line(error)}"
                warnings.warn(
                    f"the inductor runtime falls back to fused blocks: {self.problem}", FallbackWarning, stacklevel=5
                )
        return call(function, *arguments)


@cache
def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The compiled form of a function, for any number of rows; made when it is first called."""
    return torch.compile(function)


def _mark_rows(arguments: Iterable[Any]) -> None:
    """Says that the first dimension of tensors varies; else there would be a form for each number of rows."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        elif isinstance(each, tuple):
            _mark_rows(each)


def make_inductor_runner(decoder: Decoder) -> Runner:
    """The model as fused blocks that torch compiles, at full precision."""
    fused, compiler = make_runner(decoder, "fused"), Compiler()
    blocks = [each.replaced(execute=compiler) if isinstance(each, FusedBlock) else each for each in fused.sublayers]
    return fused.with_products(blocks, fused.head)
