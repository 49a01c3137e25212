"""The runtime ``triton``: fused blocks with Triton's products and attention of few rows, and its choice of tokens.

Norms, rope and activations are kernels, too, or else torch's, each row of which is computed by itself. So a row of up
to ``launch.MOST_ROWS`` is the same, bit for bit, alone, in a verification, in a tree and in a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from selfspec.errors import UnsupportedModelError
from selfspec.gpu import DEVICES, load_kernels
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.arena import Arenas
from selfspec.runtimes.comparison import has_independent_rows
from selfspec.runtimes.device_kernels import DeviceKernels
from selfspec.runtimes.fused import Attend, FusedAttention, FusedBlock, FusedMLP, RowNorm
from selfspec.runtimes.graphs import Graphs
from selfspec.runtimes.products import DenseProduct, Function, KernelProduct, LowBitProduct, Product, can_join, join
from selfspec.runtimes.recorder import find_recorder
from selfspec.runtimes.runner import Runner

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonProduct(KernelProduct):
    """Another product, multiplied by Triton's kernels up to ``launch.MOST_ROWS`` rows of a sequence.

    A row then is the same, bit for bit, whichever rows run with it.

    Raises:
        MissingPackageError: Triton is not installed.
    """

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self._kernels = load_kernels()
        self.limit = self._kernels.MOST_ROWS

    def __call__(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        rows = hidden_states.contiguous()
        made: torch.Tensor
        if isinstance(self.product, LowBitProduct):
            made = self._kernels.multiply_parts(rows, self.product.parts, self.bias, widest)
        elif (len(rows) if widest is None else widest) > self.limit:
            made = self.product(rows)
        else:
            assert isinstance(self.product, DenseProduct)
            made = self._kernels.multiply_dense(rows, self.product.weight, self.bias)
        return made


def with_triton(fused: Runner, make_slots: Callable[[int], torch.Tensor]) -> Runner:
    """A model of fused blocks with Triton's products, attention of few rows, head and choice of tokens.

    What the kernels do not compute stays as it is. Few rows of a sequence are replayed where there are CUDA graphs, on
    slots that ``make_slots`` makes (``graphs.Arena``).

    Raises:
        MissingPackageError: Triton is not installed.
        UnsupportedModelError: Triton does not compile for the device of the weights.
    """
    plain: Any = fused.head
    device = next(plain.parameters()).device
    check_device(device)
    attend, find_tree = load_kernels("attention").attend_few, load_kernels("attention").tree_of
    blocks = [_with_kernels(each, attend) for each in fused.sublayers]
    head: Function = TritonProduct(join([plain])) if can_join([plain]) else plain
    obstacle, choose = _find_obstacle(blocks, fused.final_norm, head), load_kernels("head").choose_for
    kernels = DeviceKernels("Triton's kernels", load_kernels().MOST_ROWS, obstacle, choose)
    runner = fused.with_products(blocks, head, kernels)
    if find_recorder(device) is not None and any(isinstance(each, FusedBlock) for each in blocks):
        runner.graphs = Graphs(runner.sublayers, device, Arenas(make_slots), find_tree)
    if obstacle is None and not has_independent_rows(runner):
        kernels = replace(kernels, obstacle="on this device a row differs beside other rows")
        runner = runner.with_products(blocks, head, kernels)
    return runner


def _with_kernels(sublayer: Sublayer, attend: Attend) -> Sublayer:
    if not isinstance(sublayer, FusedBlock) or any(product.dtype not in _DTYPES for product in sublayer.products):
        return sublayer
    by_row = load_kernels("by_row")
    products, norms = tuple(map(TritonProduct, sublayer.products)), tuple(map(by_row.norm_of, sublayer.norms))
    if isinstance(sublayer, FusedAttention):
        head_norms = [by_row.norm_of(norm) for norm in sublayer.head_norms]
        own = {"kernel": attend, "turn": by_row.turn_heads, "head_norms": head_norms}
    elif isinstance(sublayer, FusedMLP) and sublayer.gated and sublayer.activate is functional.silu:
        own = {"activate": by_row.GatedSilu()}
    else:
        own = {}
    return sublayer.replaced(products=products, norms=norms, **own)


def _find_obstacle(sublayers: Sequence[Sublayer], norm: Function, head: Function) -> str | None:
    """What may compute a row differently beside others; ``None`` where only kernels and norms by row compute it."""
    for index, each in enumerate(sublayers):
        if not isinstance(each, FusedBlock) or not all(isinstance(own, TritonProduct) for own in each.products):
            return f"sublayer {index} has no fused form in a dtype that they take"
        norms = [*each.norms, *(each.head_norms if isinstance(each, FusedAttention) else ())]
        if not all(own is None or isinstance(own, RowNorm) for own in norms):
            return f"a norm of sublayer {index} is a module of its own"
    if not isinstance(norm, RowNorm):
        return "the final norm is a module of its own"
    return None if isinstance(head, TritonProduct) else "the LM head is a module of its own"


def check_device(device: torch.device) -> None:
    """Refuses a device that Triton does not compile for; the CPU is one but for the interpreter."""
    kernels = load_kernels()
    if device.type == "cpu" and not kernels.IS_INTERPRETED:
        raise UnsupportedModelError(
            "runtime 'triton' runs on an accelerator, but the model is on the CPU; move it there, use another runtime, "
            "or set TRITON_INTERPRET=1 to run it slowly in Triton's interpreter"
        )
    if device.type not in ("cpu", *DEVICES):
        raise UnsupportedModelError(f"Triton has no kernels for device '{device.type}'; use another runtime")
