"""The model and the tokenizer of a GGUF file, whose weights keep their own numbers where the kernels run them."""

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from selfspec.errors import ModelLoadError, OutOfMemoryError, SelfSpecWarning, first_line, naming
from selfspec.loading.catalog import InstallableModel, check_file
from selfspec.loading.gguf_early import EarlyLayout
from selfspec.loading.gguf_families import read_config
from selfspec.loading.gguf_file import GgufFile, GgufTensor
from selfspec.loading.gguf_head import GgufHead
from selfspec.loading.gguf_own import BY_MODEL_TYPE
from selfspec.loading.gguf_tensors import Source, find_parameters
from selfspec.loading.gguf_tokenizer import read_tokenizer
from selfspec.loading.without_weights import BASE_BYTES, build_on_meta, put, stored_values
from selfspec.memory import available_bytes
from selfspec.model.mtp import hold_head
from selfspec.runtimes.formats import GGUF_FORMATS, TILE, PackedFormat
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.kernels import DTYPES, find
from selfspec.runtimes.packed import LowBitEmbedding, LowBitExperts, LowBitLinear, PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED_DTYPE = torch.bfloat16
_LINEARS = ("Linear", "Conv1D", "FalconLinear")
"""Classes of layers that can have weights of few bits: they multiply rows with them, and may add a bias."""

_EMBEDDINGS = (
    "Embedding",
    *(f"{name}ScaledWordEmbedding" for name in ("Gemma2Text", "Gemma3Text", "Gemma4Text", "MiniCPM3")),
)
"""Classes of embeddings that can have a table of few bits: they look rows up, and may scale them."""

_EXPERTS, _GATE_UP, _DOWN = ".experts", "gate_up_proj", "down_proj"

_EXPANDING = "kv_b_proj"
"""What expands latents, which kernels read as numbers of the dtype."""


def read_gguf(
    path: Path,
    dtype: torch.dtype | str,
    *,
    packed: bool,
    expected: InstallableModel | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model in a GGUF file, on the CPU in eval mode, and its tokenizer.

    Matrices keep the file's own numbers where ``packed``: unless these are of the dtype, linear layers and embeddings
    become low-bit modules, whose tiles are laid out from the mapped file. Its pages are given back as they have been
    read. Other weights, and all where not ``packed``, are numbers of the dtype. Nothing is written to disk.

    Args:
        path: the file, or a part of a split one.
        dtype: ``auto`` for that of the file's matrices, bfloat16 where it has no kernels.
        packed: matrices keep their numbers where there are kernels for them.
        expected: the model whose hash the file must have.

    Raises:
        ModelLoadError: the file is missing or damaged, or holds no tokenizer.
        UnsupportedModelError: its family, a number type or a setting is not supported.
        OutOfMemoryError: the weights do not fit into the memory that is available; nothing has been read.
    """
    if expected is not None:
        check_file(expected, path)
    with GgufFile.open(path) as file:
        no_kernels, available = _why_no_kernels(), available_bytes()
        packed = packed and no_kernels is None
        chosen = dtype if isinstance(dtype, torch.dtype) else auto_dtype(file, packed=packed)
        keeps = packed and chosen in DTYPES
        kept = {name: tensor for name, tensor in file.tensors.items() if keeps and _own_form(tensor, chosen)}
        with EarlyLayout(kept, available) as early:
            with naming(f"cannot load '{path}'"):
                config = read_config(file.metadata, file.tensors)
                model = build_on_meta(config)
                sources = find_parameters(file.tensors, model)
                head = GgufHead.find(file, model, lambda tensor: _values(tensor, no_kernels))
            filling = _Filling(model, file, sources, chosen, early if keeps else None, no_kernels)
            filling.check_memory(available)
            if keeps:
                filling.warn()
            tokenizer = read_tokenizer(file)
            with torch.inference_mode(mode=False), torch.no_grad():
                filling.run()
    config.dtype = chosen
    if head is not None:
        hold_head(model, head)
    return model, tokenizer


def read_gguf_config(path: Path) -> PreTrainedConfig:
    """The config of the model in a GGUF file, with the dtype that ``auto`` means."""
    with GgufFile.open(path) as file, naming(f"cannot load '{path}'"):
        config = read_config(file.metadata, file.tensors)
        config.dtype = auto_dtype(file, packed=True)
        return config


def auto_dtype(file: GgufFile, *, packed: bool) -> torch.dtype:
    """The dtype of a file's matrices, or bfloat16 where they differ or have few bits.

    It is bfloat16, too, where matrices that stay as they are (``packed``) have a dtype without kernels.
    """
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtype = _PLAIN[kinds.pop()] if len(kinds) == 1 and kinds <= _PLAIN.keys() else _QUANTISED_DTYPE
    return _QUANTISED_DTYPE if packed and dtype not in DTYPES else dtype


def _own_form(tensor: GgufTensor, dtype: torch.dtype) -> PackedFormat | None:
    """The format in which a tensor stays; ``None`` for numbers of the dtype, and where blocks or tiles do not fit."""
    form = GGUF_FORMATS.get(tensor.type)
    if form is None or tensor.type not in _PLAIN:
        return form
    *outputs, inputs = tensor.shape
    fits = inputs % form.unit == 0 and bool(outputs) and outputs[-1] >= TILE
    return form if fits and _PLAIN[tensor.type] != dtype else None


class _Filling:
    """Gives a model on ``meta`` the weights of a file."""

    def __init__(
        self,
        model: "PreTrainedModel",
        file: GgufFile,
        sources: Mapping[str, Source],
        dtype: torch.dtype,
        early: EarlyLayout | None,
        no_kernels: KernelBuildError | None,
    ) -> None:
        self._model, self._file, self._sources, self._dtype = model, file, sources, dtype
        self._modules = dict(model.named_modules())
        self._early, self._no_kernels = early, no_kernels
        self._whole = {_EXPANDING, *BY_MODEL_TYPE[model.config.model_type].whole}
        self._forms = {name: form for name in sources if early and (form := self._find_form(name)) is not None}

    def check_memory(self, available: int | None) -> None:
        """Refuses weights that do not fit into the ``available`` bytes of memory, measured before any was read."""
        needed = BASE_BYTES + self._bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(
                f"the weights of '{self._file.path}' take {needed:,} bytes, but {available:,} are available; take a "
                "smaller model, or a file of fewer bits"
            )

    def _bytes(self) -> int:
        """What the weights take."""
        needed, parameters = 0, stored_values(self._model)
        for name in self._sources:
            shape, form = parameters[name].shape, self._forms.get(name)
            needed += form.bytes(shape[:-1].numel(), shape[-1]) if form else shape.numel() * self._dtype.itemsize
        return needed

    def warn(self) -> None:
        """Says which weights of few bits do not keep their numbers, though they should."""
        names = [name for name in self._sources if self._is_unpacked(name)]
        if names:
            values, dtype = stored_values(self._model), str(self._dtype).removeprefix("torch.")
            size = sum(values[name].numel() for name in names) * self._dtype.itemsize
            warnings.warn(
                f"{len(names)} of the weights of '{self._file.path}', as {names[0]}, are unpacked to {dtype} and take "
                f"{size / 1e6:,.1f} MB, since no kernel computes what a '{self._model.config.model_type}' model does "
                "with them",
                SelfSpecWarning,
                stacklevel=5,
            )

    def _is_unpacked(self, name: str) -> bool:
        """Whether a parameter has few bits in the file, and becomes numbers of the dtype."""
        few = any(self._file.tensors[tensor].type not in _PLAIN for tensor in self._sources[name].tensors)
        return few and name not in self._forms and name.split(".")[-2] != _EXPANDING

    def run(self) -> None:
        """Reads all parameters."""
        model: Any = self._model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_tied = head.weight is embedding.weight
        for name in self._sources:
            path, _, kind = name.rpartition(".")
            module = self._modules[path]
            if name not in self._forms:
                put(module, kind, self._read(name))
            elif path.endswith(_EXPERTS):
                if kind == _GATE_UP:
                    self._replace(path, self._pack_experts(path, module))
            elif isinstance(module, nn.Embedding):
                table = LowBitLinear(self._pack(name), None, self._dtype)
                scale = getattr(module, "scalar_embed_scale", None)
                self._replace(path, LowBitEmbedding(table, self._dtype, scale=scale))
                if module is embedding and is_tied:
                    model.set_output_embeddings(table.eval())
            else:
                layer = LowBitLinear(self._pack(name), None, self._dtype)
                if module.bias is not None:
                    layer.bias = nn.Parameter(self._read(f"{path}.bias"), requires_grad=False)
                self._replace(path, layer)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if is_tied and model.get_output_embeddings() is head:
            head.weight = embedding.weight

    def _replace(self, path: str, module: nn.Module) -> None:
        parent, _, last = path.rpartition(".")
        setattr(self._modules[parent], last, module.eval())

    def _find_form(self, name: str) -> PackedFormat | None:
        """The format in which a parameter stays; ``None`` where it becomes numbers of the dtype."""
        path, _, kind = name.rpartition(".")
        if path.rpartition(".")[2] in self._whole:
            return None
        if path.endswith(_EXPERTS):
            if kind not in (_GATE_UP, _DOWN):
                return None
            forms = [self._form_of(f"{path}.{each}") for each in (_GATE_UP, _DOWN)]
            return forms[kind == _DOWN] if all(forms) and self._fit_tiles(path) else None
        fits = type(self._modules[path]).__name__ in (*_LINEARS, *_EMBEDDINGS)
        return self._form_of(name) if kind == "weight" and fits else None

    def _form_of(self, name: str) -> PackedFormat | None:
        source = self._sources[name]
        forms = {_own_form(self._file.tensors[each], self._dtype) for each in source.tensors}
        return forms.pop() if len(forms) == 1 and source.change is None else None

    def _fit_tiles(self, path: str) -> bool:
        """Whether all tensors of experts have whole tiles of outputs for each expert."""
        names = [each for kind in (_GATE_UP, _DOWN) for each in self._sources[f"{path}.{kind}"].tensors]
        return all(self._file.tensors[name].shape[-2] % TILE == 0 for name in names)

    def _pack_experts(self, path: str, module: nn.Module) -> LowBitExperts:
        layers = []
        for kind in (_GATE_UP, _DOWN):
            form, source = self._forms[f"{path}.{kind}"], self._sources[f"{path}.{kind}"]
            tensors = [self._file.tensors[name] for name in source.tensors]
            count, each, inputs = tensors[0].shape
            outputs = each * len(tensors)
            packed = PackedWeights.empty(count * outputs, inputs, form)
            for expert in range(count):
                parts = [tensor.data().reshape(count, each, -1)[expert] for tensor in tensors]
                data = parts[0] if len(parts) == 1 else np.concatenate(parts)
                into = packed.rows(expert * outputs, outputs)
                PackedWeights.of_gguf(data, form, (outputs, inputs), source.order(each), into=into)
            self._release(tensors)
            bias = f"{path}.{kind}_bias"
            biases = self._read(bias).flatten() if bias in self._sources else None
            layers.append(LowBitLinear(packed, biases, self._dtype))
        return LowBitExperts(module, *layers)

    def _pack(self, name: str) -> PackedWeights:
        """The weights of a matrix in their own numbers."""
        source, form = self._sources[name], self._forms[name]
        packed = self._early.take(*source.tensors) if self._early and source.rows is None else None
        packed = packed or self._pack_rows(source, form)
        if source.inputs is None:
            return packed
        return replace(packed, order=torch.from_numpy(np.argsort(source.inputs)).int())

    def _pack_rows(self, source: Source, form: PackedFormat) -> PackedWeights:
        tensors = [self._file.tensors[each] for each in source.tensors]
        rows = [tensor.data().reshape(tensor.shape[0], -1) for tensor in tensors]
        data = rows[0] if len(rows) == 1 else np.concatenate(rows)
        outputs = len(data) if source.rows is None else len(source.rows)
        packed = PackedWeights.of_gguf(data, form, (outputs, tensors[0].shape[1]), source.rows)
        self._release(tensors)
        return packed

    def _read(self, name: str) -> torch.Tensor:
        """A parameter as numbers of the dtype."""
        source = self._sources[name]
        values = source.read(lambda tensor: _values(self._file.tensors[tensor], self._no_kernels))
        path, _, kind = name.rpartition(".")
        shape = getattr(self._modules[path], kind).shape
        own = values if values.flags.writeable else values.copy()  # not a view of the file
        is_buffer = kind in self._modules[path]._buffers
        made = torch.from_numpy(own).view(shape).to(torch.float32 if is_buffer else self._dtype)
        self._release([self._file.tensors[tensor] for tensor in source.tensors])
        return made

    @staticmethod
    def _release(tensors: list[GgufTensor]) -> None:
        for tensor in tensors:
            tensor.release()


def _why_no_kernels() -> KernelBuildError | None:
    """Why there are no kernels; then weights are unpacked, and the engine says what that costs."""
    try:
        find()
    except KernelBuildError as error:
        return error
    return None


def _values(tensor: GgufTensor, no_kernels: KernelBuildError | None) -> npt.NDArray[np.float32]:
    """The values of a tensor in its shape."""
    data = tensor.data()
    if tensor.type == "F32":
        return data.view(np.float32).reshape(tensor.shape)
    if tensor.type == "F16":
        return data.view(np.float16).astype(np.float32).reshape(tensor.shape)
    if tensor.type == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    if no_kernels is not None:
        return _values_by_gguf(tensor, no_kernels)
    inputs = tensor.shape[-1]
    outputs = int(np.prod(tensor.shape[:-1]))
    packed = PackedWeights.of_gguf(data.reshape(outputs, -1), GGUF_FORMATS[tensor.type], (outputs, inputs))
    return packed.unpack().numpy().reshape(tensor.shape)


def _values_by_gguf(tensor: GgufTensor, no_kernels: KernelBuildError) -> npt.NDArray[np.float32]:
    """The values of a tensor of few bits where there are no kernels to unpack it."""
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise ModelLoadError(
            f"weights as {tensor.type} need the kernels of the CPU, of which there are none "
            f"({first_line(no_kernels)}), or the package gguf; run: pip install 'selfspec[gguf]'"
        ) from error
    rows = tensor.data().reshape(*tensor.shape[:-1], -1)
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.type])
    return values
