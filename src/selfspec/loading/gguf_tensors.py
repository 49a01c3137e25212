"""Where the values of a model's parameters are in a GGUF file.

llama.cpp has names of its own, and stores some parameters in another form: the outputs of rotated projections in
another order, several projections joined, the weights of Gemma's norms with one added to them, decays as they are.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from selfspec.loading.gguf_family import Rows
from selfspec.loading.gguf_header import GgufTensor, short
from selfspec.loading.gguf_names import tensor_of
from selfspec.loading.gguf_own import BY_MODEL_TYPE
from selfspec.loading.gguf_rope import ROPE_TENSORS
from selfspec.loading.gguf_settings import refused
from selfspec.loading.without_weights import stored_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Source:
    """Where the values of a parameter are.

    Attributes:
        tensors: the names of the tensors that hold them: one, or several that are joined along their outputs, the last
            but one axis of a matrix.
        rows: the outputs of the tensors that the parameter has, in its order; ``None`` for all as they are.
        change: makes the parameter of these values.
        inputs: the inputs of the tensors in the parameter's order; ``None`` for all as they are.
        in_turns: the parameter has one output of each tensor of experts in turns.
        transposed: the parameter has inputs before outputs.
        by_head: the tensors are what expands keys, ``[heads, latent, key]``, and values, ``[heads, value, latent]``.
    """

    tensors: tuple[str, ...]
    rows: Rows | None = None
    change: Callable[[Values], Values] | None = None
    inputs: Rows | None = None
    in_turns: bool = False
    transposed: bool = False
    by_head: bool = False

    def read(self, values: Callable[[str], Values]) -> Values:
        """The parameter, given a function for the values of a tensor by its name, in its shape.

        The shape can have one axis of size one more than the parameter's.
        """
        arrays = [values(name) for name in self.tensors]
        if self.by_head:
            keys, values_ = arrays
            return np.concatenate([keys.swapaxes(1, 2), values_], 1).reshape(-1, keys.shape[1])
        axis = _outputs_axis(arrays[0].shape)
        if self.in_turns:
            joined = np.stack(arrays, 2).reshape(len(arrays[0]), -1, *arrays[0].shape[2:])
        else:
            joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)
        chosen = joined if self.rows is None else np.take(joined, self.rows, axis)
        placed = chosen if self.inputs is None else np.take(chosen, self.inputs, -1)
        changed = placed if self.change is None else self.change(placed)
        return np.ascontiguousarray(changed.swapaxes(-1, -2)) if self.transposed else changed

    def count_used(self, outputs: list[int]) -> list[int]:
        """How many outputs of each tensor the parameter has, given how many there are."""
        if self.rows is None:
            return outputs
        counts: list[int] = np.histogram(self.rows, [0, *np.cumsum(outputs)])[0].tolist()
        return counts

    def order(self, outputs: int) -> Rows | None:
        """The place of each output of the parameter among those of all tensors, which have as many each.

        ``None`` where the tensors follow each other.
        """
        parts = len(self.tensors)
        return np.arange(outputs * parts).reshape(parts, -1).T.flatten() if self.in_turns and parts > 1 else None


_JOINED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp"),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
    "ssm_in": ("attn_qkv", "attn_gate"),
}
"""Tensors that stand for several ones, whose outputs they have one after another."""

_WITHOUT_EXPERTS = {"ffn_gate_up_shexp": "ffn_gate_up", "ffn_down_shexp": "ffn_down"}
"""What shared experts are called where there are no others."""

_EXPANDING, _EXPANDING_PARTS = "attn_kv_b", ("attn_k_b", "attn_v_b")
"""What expands latents to keys and values: one tensor, or two by head; see ``Source.by_head``."""

_DECAYS, _GATED_NORM = "ssm_a", "ssm_norm"
"""What states decay by, minus the exponential of transformers' parameter; and a norm that is as in transformers."""

_NEEDLESS = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that follow from the settings."""

_BLOCK = re.compile(r"blk\.(\d+)\.")

_PARAMETER = re.compile(
    r"(?:\w+\.(?:layers|h|blocks)\.(?P<layer>\d+)\.)?(?P<module>.+?)(?:\.(?P<part>\d+))?(?:[._](?P<kind>weight|bias))?"
)


def find_parameters(tensors: Mapping[str, GgufTensor], model: "PreTrainedModel") -> dict[str, Source]:
    """Where the values of a model's parameters are, by their names in ``stored_values``.

    Args:
        tensors: all tensors of the file.
        model: the model of the config that ``read_config`` made of the same file, on any device.

    Raises:
        UnsupportedModelError: the file lacks a parameter, has it in another shape, or holds a tensor that the model
            has no use for; the message names it.
    """
    finder = _Finder(tensors, model.config)
    sources = {}
    for name, parameter in stored_values(model).items():
        sources[name] = finder.find(name)
        _check_shape(name, tuple(parameter.shape), sources[name], tensors)
    _check_all_used(tensors, sources, model.config)
    return sources


def find_next_layer(
    tensors: Mapping[str, GgufTensor], model: "PreTrainedModel"
) -> tuple[dict[str, Source], dict[str, tuple[int, ...]]]:
    """Where the values of a layer after a model's last one are, like its last full attention, and their shapes.

    Args:
        tensors: all tensors of the file.
        model: whose layers are named ``model.layers.I``.

    Raises:
        UnsupportedModelError: as ``find_parameters``.
    """
    finder, layers = _Finder(tensors, model.config), int(model.config.num_hidden_layers)
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * layers
    like = max((layer for layer, kind in enumerate(types) if kind == "full_attention"), default=layers - 1)
    last, sources, shapes = f"model.layers.{like}.", dict[str, Source](), dict[str, tuple[int, ...]]()
    for own, values in stored_values(model).items():
        if own.startswith(last):
            name = f"model.layers.{layers}.{own.removeprefix(last)}"
            sources[name], shapes[name] = finder.find(name), tuple(values.shape)
            _check_shape(name, shapes[name], sources[name], tensors)
    return sources, shapes


class _Finder:
    """Finds parameters of one model in one file."""

    def __init__(self, tensors: Mapping[str, GgufTensor], config: Any) -> None:
        self._tensors = tensors
        self._family = BY_MODEL_TYPE[config.model_type]
        self._modules = self._family.modules
        self._rows, self._inputs = self._family.order_outputs(config), self._family.order_inputs(config)
        self._differs, self._config = bool(getattr(config, "is_heterogeneous", False)), config
        self._head_dim, self._outputs = (0, {}) if self._differs else _outputs_of_heads(config)

    def find(self, name: str) -> Source:
        """Where the file has a parameter, by its name in transformers."""
        match = _PARAMETER.fullmatch(name)
        module = self._modules.get(match["module"]) or tensor_of(match["module"]) if match else None
        if match is None or module is None:
            raise refused(f"GGUF has no tensor for the parameter {name}")
        block = "" if match["layer"] is None else f"blk.{match['layer']}."
        if block and self._differs:
            self._head_dim, self._outputs = _outputs_of_heads(self._config.per_layer_config[int(match["layer"])])
        names, rows = self._find_tensors(block, module, match["kind"], name)
        if match["part"] is not None:
            rows = np.array([int(match["part"])])
        elif self._family.interleaved and module in ("attn_q", "attn_k"):
            rows = self._undo_interleaving(self._range(names[0], module, 0) if rows is None else rows)
        in_turns = self._family.in_turns and ".experts." in match["module"]
        is_bias, part = match["kind"] == "bias", self._family.transposed
        transposed = bool(part) and part in match["module"] and not is_bias
        change, inputs = (None, None) if is_bias else (self._find_change(module), self._inputs.get(module))
        by_head = module == _EXPANDING and len(names) > 1
        return Source(names, rows, change, inputs, in_turns, transposed, by_head=by_head)

    def _find_change(self, module: str) -> Callable[[Values], Values] | None:
        """What makes a module's parameter of the values of a file."""
        if self._family.norms_plus_one and module.endswith("norm") and module != _GATED_NORM:
            return subtract_one
        return _logarithms if module == _DECAYS else None

    def _find_tensors(
        self, block: str, module: str, kind: str | None, name: str
    ) -> tuple[tuple[str, ...], Rows | None]:
        """The tensors for a module, and which of their outputs it has; ``None`` for all."""
        ends = (".bias",) if kind == "bias" else (".weight", "")

        def there(*modules: str) -> tuple[str, ...] | None:
            candidates = (tuple(f"{block}{each}{end}" for each in modules) for end in ends)
            return next((names for names in candidates if all(each in self._tensors for each in names)), None)

        if (found := there(module)) is not None:
            return found, self._rows.get(module)
        if module == _EXPANDING and (found := there(*_EXPANDING_PARTS)) is not None:
            return found, None
        if module in _JOINED and (found := there(*_JOINED[module])) is not None:
            return found, self._rows.get(" ".join(_JOINED[module]))
        if module in self._outputs and (found := there("attn_qkv")) is not None:
            parts = _JOINED["attn_qkv"]
            return found, self._range(
                found[0], module, sum(self._outputs[each] for each in parts[: parts.index(module)])
            )
        if module in _WITHOUT_EXPERTS:
            return self._find_tensors(block, _WITHOUT_EXPERTS[module], kind, name)
        missing = next(each for each in _JOINED.get(module, (module,)) if there(each) is None)
        family = self._family.model_type
        raise refused(f"this GGUF file has no tensor {block}{missing}{ends[0]}, which a {family} model needs ({name})")

    def _range(self, tensor: str, module: str, first: int) -> Rows:
        """The outputs of a projection in a tensor, whose first one is given."""
        end, shape = first + self._outputs[module], self._tensors[tensor].shape
        if end > _outputs(shape):
            raise refused(
                f"the shape {shape} of {tensor} in this GGUF file does not fit the heads of the model, which need its "
                f"outputs {first:,} to {end:,}"
            )
        return np.arange(first, end)

    def _undo_interleaving(self, rows: Rows) -> Rows:
        """Row ``2 i + half`` of a head in the file is row ``half * head_dim / 2 + i`` in transformers."""
        undone: Rows = rows.reshape(-1, self._head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return undone


def _outputs_of_heads(config: Any) -> tuple[int, dict[str, int]]:
    """The size of a head, and the outputs of the projections to queries, keys and values."""
    heads = getattr(config, "num_attention_heads", 0)
    size = int(getattr(config, "head_dim", 0) or config.hidden_size // (heads or 1))
    groups = (getattr(config, "num_key_value_heads", None) or heads) * size
    return size, {"attn_q": heads * size, "attn_k": groups, "attn_v": groups}


def _check_shape(name: str, expected: tuple[int, ...], source: Source, tensors: Mapping[str, GgufTensor]) -> None:
    """Refuses tensors that do not have the numbers of a parameter."""
    shapes = [tensors[tensor].shape for tensor in source.tensors]
    if not _fits(source, shapes, expected):
        raise refused(
            f"the shape {' and '.join(map(str, shapes))} of {' and '.join(source.tensors)} in this GGUF file does not "
            f"fit the {name} of the model, {expected}"
        )


def _fits(source: Source, shapes: list[tuple[int, ...]], expected: tuple[int, ...]) -> bool:
    if source.transposed:
        expected = (*expected[:-2], expected[-1], expected[-2])
    if source.in_turns:
        experts, outputs, *inputs = expected
        return outputs % len(shapes) == 0 and set(shapes) == {(experts, outputs // len(shapes), *inputs)}
    if source.by_head:
        keys, values = shapes
        fits = len(keys) == len(values) == 3 and keys[0] == values[0] and keys[1] == values[2]
        return fits and expected == (keys[0] * (keys[2] + values[1]), keys[1])
    axis = _outputs_axis(shapes[0])
    others = {(shape[:axis], shape[axis + 1 :]) for shape in shapes}
    outputs = sum(map(_outputs, shapes))
    if source.rows is not None and source.rows.max() < outputs:
        outputs = len(source.rows)
    found = (*shapes[0][:axis], outputs, *shapes[0][axis + 1 :])
    if source.tensors[0].endswith(f"{_GATED_NORM}.weight"):  # by group
        return math.prod(found) == math.prod(expected)
    return len(others) == 1 and _without_ones(found) == _without_ones(expected)


def _check_all_used(tensors: Mapping[str, GgufTensor], sources: Mapping[str, Source], config: Any) -> None:
    """Refuses tensors, and outputs of tensors, that are no part of the model or of heads that predict later tokens."""
    used: Counter[str] = Counter()
    for source in sources.values():
        outputs = [_outputs(tensors[name].shape) for name in source.tensors]
        for name, count in zip(source.tensors, source.count_used(outputs), strict=True):
            used[name] += count
    for name, tensor in tensors.items():
        block = _BLOCK.match(name)
        later = block is not None and int(block[1]) >= config.num_hidden_layers
        known = later or name in ROPE_TENSORS or _NEEDLESS.fullmatch(name)
        if not known and used[name] != _outputs(tensor.shape):
            raise refused(
                f"the tensor {short(name)} of this GGUF file, of the shape {tensor.shape}, is in part or whole no "
                f"parameter of this {config.model_type} model"
            )


def subtract_one(values: Values) -> Values:
    """The weights of a norm that multiplies by one plus its weight."""
    weights: Values = values - np.float32(1)
    return weights


def _logarithms(decays: Values) -> Values:
    return np.log(-decays.astype(np.float64)).astype(np.float32)


def _outputs_axis(shape: tuple[int, ...]) -> int:
    return max(len(shape) - 2, 0)


def _outputs(shape: tuple[int, ...]) -> int:
    return shape[_outputs_axis(shape)] if shape else 1


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
