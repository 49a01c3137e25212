"""The model and the tokenizer of a GGUF file, whose weights keep their own numbers where the kernels run them."""

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from selfspec.errors import ModelLoadError, OutOfMemoryError, SelfSpecWarning, first_line, naming
from selfspec.loading.catalog import InstallableModel, check_file
from selfspec.loading.filling import StoredWeight, fill
from selfspec.loading.gguf_early import PLAIN, OpenedFile, auto_dtype, open_early, own_form
from selfspec.loading.gguf_families import read_config
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_head import GgufHead
from selfspec.loading.gguf_header import GgufTensor
from selfspec.loading.gguf_own import BY_MODEL_TYPE
from selfspec.loading.gguf_tensors import Source, find_parameters
from selfspec.loading.gguf_tokenizer import read_tokenizer
from selfspec.loading.without_weights import build_on_meta
from selfspec.memory import BASE_BYTES
from selfspec.model.mtp_modules import hold_head
from selfspec.runtimes.formats import GGUF_FORMATS, TILE, PackedFormat
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.mixtures import EXPERT_WEIGHTS
from selfspec.runtimes.packed import PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LINEARS = ("Linear", "Conv1D", "FalconLinear")
"""Classes of layers that can have weights of few bits: they multiply rows with them, and may add a bias."""

_EMBEDDINGS = (
    "Embedding",
    *(f"{name}ScaledWordEmbedding" for name in ("Gemma2Text", "Gemma3Text", "Gemma4Text", "MiniCPM3")),
)
"""Classes of embeddings that can have a table of few bits: they look rows up, and may scale them."""

_EXPERTS = ".experts"

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
    with open_early(path, dtype, packed=packed) as opened:
        file, chosen = opened.file, opened.dtype
        with naming(f"cannot load '{path}'"):
            config = read_config(file.metadata, file.tensors)
            model = build_on_meta(config)
            sources = find_parameters(file.tensors, model)
            head = GgufHead.find(file, model, lambda tensor: _values(tensor, opened.no_kernels))
        weights = _FileWeights(model, opened, sources)
        weights.check_memory()
        if opened.keeps:
            weights.warn()
        tokenizer = read_tokenizer(file)
        with torch.inference_mode(mode=False), torch.no_grad():
            fill(model, weights.found, chosen)
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


class _FileWeights:
    """What a file stores for the parameters of a model on ``meta``."""

    def __init__(self, model: "PreTrainedModel", opened: OpenedFile, sources: Mapping[str, Source]) -> None:
        self._opened, self._file, self._sources, self._dtype = opened, opened.file, sources, opened.dtype
        self._model, self._modules = model, dict(model.named_modules())
        self._shapes = {name: each.shape for name, each in model.state_dict().items()}
        self._whole = {_EXPANDING, *BY_MODEL_TYPE[model.config.model_type].whole}
        self.found = {name: self._stored(name) for name in sources}

    def _stored(self, name: str) -> StoredWeight:
        form = self._find_form(name) if self._opened.keeps else None
        pack = None if form is None else partial(self._pack, name, form)
        return StoredWeight(self._sources[name].tensors, partial(self._read, name), form, pack)

    def check_memory(self) -> None:
        """Refuses weights that do not fit into the memory that was available before any was read."""
        needed, available = BASE_BYTES + sum(map(self._bytes, self.found)), self._opened.available
        if available is not None and needed > available:
            raise OutOfMemoryError(
                f"the weights of '{self._file.path}' take {needed:,} bytes, but {available:,} are available; take a "
                "smaller model, or a file of fewer bits"
            )

    def _bytes(self, name: str) -> int:
        return self.found[name].bytes(self._shapes[name], self._dtype)

    def warn(self) -> None:
        """Says which weights of few bits do not keep their numbers, though they should."""
        names = [name for name in self._sources if self._is_unpacked(name)]
        if names:
            dtype = str(self._dtype).removeprefix("torch.")
            warnings.warn(
                f"{len(names)} of the weights of '{self._file.path}', as {names[0]}, are unpacked to {dtype} and take "
                f"{sum(map(self._bytes, names)) / 1e6:,.1f} MB, since no kernel computes what a "
                f"'{self._model.config.model_type}' model does with them",
                SelfSpecWarning,
                stacklevel=5,
            )

    def _is_unpacked(self, name: str) -> bool:
        """Whether a parameter has few bits in the file, and becomes numbers of the dtype."""
        few = any(self._file.tensors[tensor].type not in PLAIN for tensor in self._sources[name].tensors)
        return few and self.found[name].form is None and name.split(".")[-2] != _EXPANDING

    def _find_form(self, name: str) -> PackedFormat | None:
        """The format in which a parameter stays; ``None`` where it becomes numbers of the dtype."""
        path, _, kind = name.rpartition(".")
        if path.rpartition(".")[2] in self._whole:
            return None
        if path.endswith(_EXPERTS):
            if kind not in EXPERT_WEIGHTS:
                return None
            forms = {each: self._form_of(f"{path}.{each}") for each in EXPERT_WEIGHTS}
            return forms[kind] if all(forms.values()) and self._fit_tiles(path) else None
        fits = type(self._modules[path]).__name__ in (*_LINEARS, *_EMBEDDINGS)
        return self._form_of(name) if kind == "weight" and fits else None

    def _form_of(self, name: str) -> PackedFormat | None:
        source = self._sources[name]
        forms = {own_form(self._file.tensors[each], self._dtype) for each in source.tensors}
        return forms.pop() if len(forms) == 1 and source.change is None else None

    def _fit_tiles(self, path: str) -> bool:
        """Whether all tensors of experts have whole tiles of outputs for each expert."""
        names = [each for kind in EXPERT_WEIGHTS for each in self._sources[f"{path}.{kind}"].tensors]
        return all(self._file.tensors[name].shape[-2] % TILE == 0 for name in names)

    def _pack(self, name: str, form: PackedFormat) -> PackedWeights:
        """The weights of a matrix, or those of all experts one after the other, in their own numbers."""
        source = self._sources[name]
        if name.rpartition(".")[0].endswith(_EXPERTS):
            return self._pack_experts(source, form)
        packed = self._opened.early.take(*source.tensors) if source.rows is None else None
        packed = packed or self._pack_rows(source, form)
        if source.inputs is None:
            return packed
        return replace(packed, order=torch.from_numpy(np.argsort(source.inputs)).int())

    def _pack_experts(self, source: Source, form: PackedFormat) -> PackedWeights:
        tensors = [self._file.tensors[name] for name in source.tensors]
        count, each, inputs = tensors[0].shape
        outputs = each * len(tensors)
        packed = PackedWeights.empty(count * outputs, inputs, form)
        for expert in range(count):
            parts = [tensor.data().reshape(count, each, -1)[expert] for tensor in tensors]
            data = parts[0] if len(parts) == 1 else np.concatenate(parts)
            into = packed.rows(expert * outputs, outputs)
            PackedWeights.of_gguf(data, form, (outputs, inputs), source.order(each), into=into)
        _release(tensors)
        return packed

    def _pack_rows(self, source: Source, form: PackedFormat) -> PackedWeights:
        tensors = [self._file.tensors[each] for each in source.tensors]
        rows = [tensor.data().reshape(tensor.shape[0], -1) for tensor in tensors]
        data = rows[0] if len(rows) == 1 else np.concatenate(rows)
        outputs = len(data) if source.rows is None else len(source.rows)
        packed = PackedWeights.of_gguf(data, form, (outputs, tensors[0].shape[1]), source.rows)
        _release(tensors)
        return packed

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A parameter as numbers of a dtype."""
        source = self._sources[name]
        values = source.read(lambda tensor: _values(self._file.tensors[tensor], self._opened.no_kernels))
        own = values if values.flags.writeable else values.copy()  # not a view of the file
        made = torch.from_numpy(own).view(self._shapes[name]).to(dtype)
        _release([self._file.tensors[tensor] for tensor in source.tensors])
        return made


def _release(tensors: list[GgufTensor]) -> None:
    for tensor in tensors:
        tensor.release()


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
