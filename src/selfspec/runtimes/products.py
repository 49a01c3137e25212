"""Several linear layers as one product over the very same weights."""

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from selfspec.gpu import load_kernels
from selfspec.memory import empty_in_large_pages
from selfspec.runtimes.formats import TILE
from selfspec.runtimes.kernels import DTYPES, load, row_limit
from selfspec.runtimes.packed import LowBitLinear, PackedWeights, describe, multiply
from selfspec.runtimes.structures import Linear
from selfspec.runtimes.threads import THREADS

Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_ALIGNMENT = 64
"""Bytes to which torch aligns a tensor; products of a view without this alignment could differ in the last bits."""

_AT_ONCE = 1 << 24
"""Weights of few bits that are floats at a time where their values are asked for in parts."""

_WATCHING = "transformers.utils.output_capturing"
"""The module of transformers' hooks that record hidden states and attention weights."""

_joining = threading.Lock()


def is_plain(module: nn.Module) -> bool:
    """Whether a module has no hooks and its class's own ``forward``.

    transformers' hooks that record hidden states or attention weights do not count. They stay in a model after such a
    call, change nothing, and record only while asked to.
    """
    attributes = vars(module)
    hooks = [hook for hook in attributes["_forward_hooks"].values() if getattr(hook, "__module__", None) != _WATCHING]
    return not (hooks or attributes["_forward_pre_hooks"] or "forward" in attributes)


def are_plain(modules: Sequence[nn.Module]) -> bool:
    """Whether some modules and all those in them are; see ``is_plain``."""
    return all(is_plain(module) for root in modules for module in root.modules())


def signature(modules: Sequence[nn.Module]) -> list[Any]:
    """Identifies modules, their weights and their hooks: equal as long as none of these is replaced or changed."""
    found: list[Any] = []
    for root in modules:
        for module in root.modules():
            found.append((id(module), is_plain(module)))
            for parameter in vars(module)["_parameters"].values():
                if parameter is not None:
                    found.append((parameter.data_ptr(), _changes(parameter)))
    return found


def _changes(parameter: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 for one that was made in inference mode, which does not count."""
    try:
        return parameter._version
    except RuntimeError:
        return 0


def outputs_of(head: nn.Linear | LowBitLinear, first: int, count: int) -> nn.Module:
    """Some outputs of a linear layer as a layer of its own, whose weights are views."""
    with torch.inference_mode(mode=False), torch.no_grad():
        if isinstance(head, LowBitLinear):
            return head.outputs(first, count).eval()
        part = nn.Linear(head.in_features, count, bias=False, device="meta")
        part.weight = nn.Parameter(head.weight.detach()[first : first + count], requires_grad=False)
        if head.bias is not None:
            part.bias = nn.Parameter(head.bias.detach()[first : first + count], requires_grad=False)
    return part.eval()


def can_join(linears: Sequence[Any]) -> bool:
    """Whether modules are ordinary linear layers, or low-bit ones, whose weights can share one piece of memory.

    Layers quantised by other packages, LoRA adapters and other wrappers are of another class.
    """
    if not all(map(is_plain, linears)):
        return False
    biases = [linear.bias for linear in linears if getattr(linear, "bias", None) is not None]
    if len(biases) not in (0, len(linears)) or not all(map(is_ordinary, biases)):
        return False
    kinds = {type(linear) for linear in linears}
    return (kinds == {nn.Linear} and _can_join_dense(linears)) or (
        kinds == {LowBitLinear} and _can_join_low_bit(linears)
    )


def _can_join_dense(linears: Sequence[nn.Linear]) -> bool:
    weights = [linear.weight for linear in linears]
    if not all(map(is_ordinary, weights)):
        return False
    if len({(weight.dtype, weight.device, weight.shape[1]) for weight in weights}) > 1:
        return False
    return all(weight.nbytes % _ALIGNMENT == 0 for weight in weights[:-1])


def _can_join_low_bit(linears: Sequence[LowBitLinear]) -> bool:
    if len({(linear.short_rows, linear.in_features, linear.dtype, linear.tiles.device) for linear in linears}) > 1:
        return False
    if not all(_equal(linear.order, linears[0].order) for linear in linears):
        return False
    return all(linear.out_features % TILE == 0 for linear in linears[:-1])


def _equal(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return order is other or (order is not None and other is not None and torch.equal(order, other))


class Product(ABC):
    """The concatenated outputs of linear layers with the same input, in one product. Made by ``join``.

    Its shape is outputs and inputs. ``linear`` is the form that the kernels take; the product has to outlive it.
    ``bits`` are those of a low-bit weight, the most of any; 0 where weights have the dtype of the rows. ``limit`` are
    the most rows of a sequence that its kernels multiply; ``None`` where it has none, or no limit.
    """

    limit: int | None = None

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, bias: torch.Tensor | None, linear: Linear, bits: int = 0
    ) -> None:
        self.shape, self.dtype, self.bias, self.linear, self.bits = shape, dtype, bias, linear, bits

    @abstractmethod
    def pieces(self) -> Iterator[torch.Tensor]:
        """The weights ``[outputs, inputs]``, in a dtype that has kernels, in parts whose outputs follow each other.

        All but the last have a multiple of ``TILE`` outputs. They are made anew where they are low-bit ones.
        """

    def values(self) -> torch.Tensor:
        """The weights ``[outputs, inputs]``; see ``pieces``."""
        first, *others = self.pieces()
        return torch.cat([first, *others]) if others else first

    @abstractmethod
    def __call__(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs of all]``.

        With rows of several sequences, ``widest`` is the most rows of one of them (``kernels.row_limit``): a row gets
        what it gets with the rows of its own sequence alone.
        """


def join(linears: Sequence[Any]) -> Product:
    """One product of linear layers with the same input, which ``can_join``.

    Their weights are moved into one piece of memory, and the layers' own parameters become views of it. So the model
    computes what it did, bit for bit, a change of a weight is seen by both, and nothing is held twice. Only while the
    weights are moved, the new piece is held beside the originals.
    """
    if not isinstance(linears[0], LowBitLinear):
        return DenseProduct(join_parameters([linear.weight for linear in linears]), _join_biases(linears))
    first, parts = linears[0], [linear.packed for linear in linears]
    return LowBitProduct(parts, first.dtype, _join_biases(linears), short_rows=first.short_rows)


class DenseProduct(Product):
    """A product of weights ``[outputs, inputs]`` in the dtype of the rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        outputs, inputs = weight.shape
        linear = Linear(self.weight.data_ptr(), None if bias is None else bias.data_ptr())
        super().__init__((outputs, inputs), self.weight.dtype, bias, linear)

    def pieces(self) -> Iterator[torch.Tensor]:
        """The weights themselves."""
        yield self.weight

    def __call__(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs of all]``."""
        return functional.linear(hidden_states, self.weight, self.bias)


class LowBitProduct(Product):
    """A product of weights of few bits, which the kernels of the CPU multiply whatever the number of rows.

    The outputs of its parts, which may have different formats, follow each other.
    """

    def __init__(
        self,
        parts: Sequence[PackedWeights],
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        *,
        short_rows: bool = False,
    ) -> None:
        self.parts = parts
        shape = sum(part.outputs for part in parts), parts[0].inputs
        bits = max(part.form.bits for part in parts)
        super().__init__(shape, dtype, bias, describe(parts, bias, short_rows=short_rows), bits)

    def pieces(self) -> Iterator[torch.Tensor]:
        """What the weights stand for, float32: whole, it would take up to eight times the memory of the weights."""
        most = max(1, _AT_ONCE // (self.shape[1] * TILE)) * TILE
        for part in self.parts:
            for rows in torch.split(torch.arange(part.outputs, device=part.tiles.device), most):
                yield part.unpack(rows)

    def __call__(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs of all]``."""
        rows = hidden_states.contiguous()
        if rows.is_cpu:
            return multiply(rows, self.linear, self.shape[0])
        made: torch.Tensor = load_kernels().multiply_parts(rows, self.parts, self.bias, widest)
        return made


class KernelProduct(Product):
    """Another product, which kernels multiply up to ``limit`` rows of a sequence."""

    limit: int

    def __init__(self, product: Product) -> None:
        super().__init__(product.shape, product.dtype, product.bias, product.linear, product.bits)
        self.product = product

    def pieces(self) -> Iterator[torch.Tensor]:
        """See ``Product.pieces``."""
        return self.product.pieces()


class CompiledProduct(KernelProduct):
    """A product that runs up to ``row_limit`` rows of a sequence in the kernels, and more as it would without them."""

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self._call = getattr(load(), f"product_{DTYPES[self.dtype]}")
        self.limit = row_limit(self.dtype, low_bit=self.bits > 0)
        self._reference = ctypes.byref(self.linear)

    def __call__(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        rows, (outputs, inputs) = hidden_states.shape[0], self.shape
        if (rows if widest is None else widest) > self.limit or not hidden_states.is_contiguous():
            return self.product(hidden_states)
        out = hidden_states.new_empty(rows, outputs)
        self._call(self._reference, hidden_states.data_ptr(), out.data_ptr(), rows, inputs, outputs, THREADS.take())
        return out


def compile_head(head: nn.Module) -> Function:
    """The LM head with a kernel for a few rows, or the head itself where there is none for it."""
    if not can_join([head]) or not has_kernels(list(head.parameters())):
        return head
    product = join([head])
    return CompiledProduct(product) if product.dtype in DTYPES else head


def has_kernels(weights: Sequence[torch.Tensor]) -> bool:
    """Whether weights have one dtype with kernels and are on the CPU, or on ``meta``, where only shapes are checked."""
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    on_cpu = {weight.device.type for weight in weights} in ({"cpu"}, {"meta"})
    return on_cpu and len(dtypes) <= 1 and dtypes <= DTYPES.keys()


def _join_biases(linears: Sequence[Any]) -> torch.Tensor | None:
    return None if linears[0].bias is None else join_parameters([linear.bias for linear in linears])


def is_ordinary(parameter: Any, *, transposed: bool = False) -> bool:
    """Whether a parameter is a plain contiguous one, or, if ``transposed``, is so with its last axes swapped."""
    if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
        return False
    return parameter.is_contiguous() or (transposed and parameter.transpose(1, 2).is_contiguous())


def turn_parameter(parameter: nn.Parameter) -> torch.Tensor:
    """The weights ``[experts, outputs, inputs]`` of a parameter ``[experts, inputs, outputs]``.

    The values are moved, once, and the parameter becomes a view of them, so that nothing is held twice.
    """
    with _joining, torch.inference_mode(mode=False), torch.no_grad():
        turned = parameter.data.transpose(1, 2)
        if not turned.is_contiguous():
            memory = empty_in_large_pages(tuple(turned.shape), turned.dtype) if turned.is_cpu else turned.contiguous()
            turned = memory.copy_(turned)
            parameter.data = turned.transpose(1, 2)
        return turned


def join_parameters(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parameters one after the other in one piece of memory, of which they become views."""
    with _joining, torch.inference_mode(mode=False), torch.no_grad():
        first = parameters[0].data
        if len(parameters) == 1:
            return first
        if all(_follows(left, right) for left, right in pairwise(parameters)):  # an earlier engine has joined them
            return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
        values = [parameter.data for parameter in parameters]
        joined = empty_in_large_pages((sum(map(len, values)), *first.shape[1:]), first.dtype) if first.is_cpu else None
        joined = torch.cat(values, out=joined)
        parts = torch.split(joined, [len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
        return joined


def _follows(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and right.storage_offset() == left.storage_offset() + left.numel()
