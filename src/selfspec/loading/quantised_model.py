"""The model of a quantised checkpoint in safetensors; weights keep their own numbers where the kernels run them."""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from selfspec.errors import ModelLoadError, SelfSpecWarning, first_line, naming
from selfspec.loading.filling import StoredWeight, fill
from selfspec.loading.gguf_own import BY_MODEL_TYPE
from selfspec.loading.quantised_bitsandbytes import find_bitsandbytes
from selfspec.loading.quantised_compressed import find_compressed_layout
from selfspec.loading.quantised_gptq import find_awq, find_gptq
from selfspec.loading.quantised_mxfp4 import find_experts
from selfspec.loading.quantised_weights import Finder
from selfspec.loading.without_weights import build_on_meta, stored_values
from selfspec.memory import BASE_BYTES, check_memory
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.kernels import DTYPES, why_no_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MXFP4 = "mxfp4"
"""The ``quant_method`` of checkpoints whose experts are in MXFP4."""

_NO_GRID = (
    "the kernels take integers with a scale for 32 inputs or a multiple; a GGUF file of the model keeps its few bits"
)

_NEEDLESS = r"\.rotary_emb\.inv_freq$"
"""Tensors that follow from the config."""


def read_quantised(source: str, dtype: torch.dtype | str, *, packed: bool) -> "PreTrainedModel | None":
    """The model of a checkpoint of GPTQ, AWQ, compressed-tensors, bitsandbytes or MXFP4, on the CPU in eval mode.

    Its tensors are read one by one. Linear layers keep the checkpoint's numbers where ``packed``, if they are a scale
    times the distance of an integer from a zero point, and so do experts in MXFP4; the others become numbers of the
    dtype, and a warning says what that takes.

    Args:
        source: a folder, or a name on the hub.
        dtype: ``auto`` for that of the config; where weights are packed and it has no kernels, bfloat16.
        packed: weights of few bits keep their numbers where there are kernels for them.

    Returns:
        ``None`` where transformers has to load it: other checkpoints, other layouts, other mixtures of experts.

    Raises:
        ModelLoadError: a tensor is missing, or not what its layer needs.
        UnsupportedModelError: inputs of layers or the cache are quantised, or a number of bits is not supported.
        OutOfMemoryError: the weights do not fit into the memory that is available; nothing has been read.
    """
    with naming(f"cannot load '{source}'"):
        return _read(source, dtype, packed=packed)


def _read(source: str, dtype: torch.dtype | str, *, packed: bool) -> "PreTrainedModel | None":
    config: Any = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    settings = getattr(config, "quantization_config", None)
    layout = find_layout(settings) if isinstance(settings, dict) else None
    files = None if layout is None else SafetensorsFiles.find(source)
    if layout is None or files is None:
        return None
    assert settings is not None
    del config.quantization_config  # the model is none of that package's
    model = build_on_meta(config)
    if _has_own_head(model, files):
        config.tie_word_embeddings = False
        model = build_on_meta(config)
    if settings.get("quant_method") != _MXFP4 and not _is_read(model, files):
        return None
    chosen = dtype if isinstance(dtype, torch.dtype) else _auto_dtype(config, packed=packed)
    weights = _CheckpointWeights(model, files, layout, chosen, packed=packed)
    weights.check()
    weights.warn(source)
    with torch.inference_mode(mode=False), torch.no_grad():
        fill(model, weights.found, chosen)
    config.dtype = chosen
    _set_generation_config(model, source)
    return model


def _is_read(model: "PreTrainedModel", files: SafetensorsFiles) -> bool:
    """Whether all parameters but those of linear layers are in the files as the model has them.

    Experts are not, nor is what has other names in the files. Models with convolutions are read where it is known that
    their code calls all linear layers, and reads the weights of none by itself.
    """
    embedding, modules = model.get_input_embeddings(), dict(model.named_modules())
    if not any(f"{path}.weight" in files.names for path, module in modules.items() if module is embedding):
        return False
    shapes = ((path, each.dim()) for path, module in modules.items() for each in module.parameters(recurse=False))
    deep = [path for path, dimensions in shapes if dimensions > 2]
    if not all(isinstance(modules[path], nn.Conv1d) for path in deep):
        return False
    family = BY_MODEL_TYPE.get(model.config.model_type)
    return not deep or (family is not None and family.whole.isdisjoint(path.rpartition(".")[2] for path in modules))


def _has_own_head(model: "PreTrainedModel", files: SafetensorsFiles) -> bool:
    """Whether weights that the config ties differ in the files; transformers does not tie them then."""
    for pair in model.all_tied_weights_keys.items():
        if all(name in files.names for name in pair):
            one, other = map(files.read, pair)
            if one.dtype != other.dtype or not torch.equal(one, other):
                return True
    return False


def _auto_dtype(config: PreTrainedConfig, *, packed: bool) -> torch.dtype:
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return own if own in DTYPES or not packed else torch.bfloat16


def _set_generation_config(model: "PreTrainedModel", source: str) -> None:
    """What ``generate`` and the ends of a text follow, where the checkpoint says it."""
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    except OSError:  # it has no such file; then it follows the config
        return


def find_layout(settings: Mapping[str, Any]) -> Finder | None:
    """The layout that a config's ``quantization_config`` names; ``None`` for those that only transformers knows.

    Raises:
        UnsupportedModelError: inputs of layers, or keys and values, are quantised as well.
    """
    method = settings.get("quant_method")
    kind = settings.get("checkpoint_format") or settings.get("version") or settings.get("format")
    if method == "gptq" and kind in (None, "gptq", "gptq_v2"):
        return partial(find_gptq, subtracted=kind != "gptq_v2")
    if method == "awq" and str(kind or "gemm").lower() == "gemm":
        return find_awq
    if method == "bitsandbytes":
        return find_bitsandbytes
    if method == _MXFP4:
        return lambda files, name, shape: None  # no linear layer has few bits
    if method == "compressed-tensors":
        return find_compressed_layout(settings)
    return None


class _CheckpointWeights:
    """What a checkpoint stores for the parameters of a model on ``meta``."""

    def __init__(
        self, model: "PreTrainedModel", files: SafetensorsFiles, layout: Finder, dtype: torch.dtype, *, packed: bool
    ) -> None:
        self._model, self._files, self._dtype, self._packed = model, files, dtype, packed
        self._no_kernels = _why_unpacked(dtype)
        self._shapes = {name: each.shape for name, each in model.state_dict().items()}
        self._few = dict(self._find(layout))
        kept = {name: self._kept(each) for name, each in self._few.items()}
        dense = {
            name: StoredWeight((name,), partial(self._read, name)) for name in stored_values(model) if name not in kept
        }
        self.found = kept | dense

    def _find(self, layout: Finder) -> Iterator[tuple[str, StoredWeight]]:
        """The parameters that are not stored as ordinary numbers, by name."""
        for path, module in self._model.named_modules():
            yield from find_experts(self._files, path, module)
            if type(module) is nn.Linear:
                found = layout(self._files, path, (module.out_features, module.in_features))
                if found is not None:
                    yield f"{path}.weight", found

    def check(self) -> None:
        """Refuses tensors that are missing, of another shape or not used, and weights that do not fit into memory."""
        if not self._few:
            raise ModelLoadError(
                "the config says that weights are quantised, but none are; download the checkpoint again"
            )
        for name in self.found.keys() - self._few.keys():
            self._files.check(name, tuple(self._shapes[name]), "F16", "BF16", "F32")
        self._check_all_used()
        needed = BASE_BYTES + sum(map(self._bytes, self.found))
        check_memory(needed, f"the weights take {needed:,} bytes", "take a smaller model")

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._files.read(name).to(dtype, copy=True)

    def _kept(self, stored: StoredWeight) -> StoredWeight:
        """What becomes of a weight of few bits."""
        keeps = self._packed and self._no_kernels is None
        return stored if keeps else replace(stored, form=None, pack=None)

    def _bytes(self, name: str) -> int:
        return self.found[name].bytes(self._shapes[name], self._dtype)

    def _check_all_used(self) -> None:
        """Refuses tensors that nothing reads: they would change what is computed."""
        used = {name for stored in self._few.values() for name in stored.names}
        used.update(self._model.state_dict())
        needless = re.compile("|".join([_NEEDLESS, *(self._model._keys_to_ignore_on_load_unexpected or ())]))
        for name in sorted(set(self._files.names) - used):
            if not (needless.search(name) or self._is_empty_bias(name)):
                raise ModelLoadError(
                    f"the tensor {name[:80]} of the checkpoint is no part of this {self._model.config.model_type} "
                    "model; take another checkpoint of it"
                )

    def _is_empty_bias(self, name: str) -> bool:
        """Zeros that writers of GPTQ add to layers without a bias."""
        path, _, kind = name.rpartition(".")
        return kind == "bias" and f"{path}.weight" in self._few and not self._files.read(name).any()

    def warn(self, source: str) -> None:
        """Says which layers do not keep their numbers, though they should."""
        names = [name for name in self._few if self.found[name].form is None]
        if self._packed and names:
            dtype = str(self._dtype).removeprefix("torch.")
            warnings.warn(
                f"{len(names)} layers of '{source}' are unpacked to {dtype} and take "
                f"{sum(map(self._bytes, names)) / 1e6:,.1f} MB, since {self._no_kernels or _NO_GRID}",
                SelfSpecWarning,
                stacklevel=6,
            )


def _why_unpacked(dtype: torch.dtype) -> str | None:
    """Why no layer can keep its numbers, in words."""
    if dtype not in DTYPES:
        return "only float32 and bfloat16 have kernels for few bits; choose one of them"
    error = why_no_kernels()
    return None if error is None else f"there are no kernels for few bits ({first_line(error)})"
