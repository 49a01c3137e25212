"""Loads models and their tokenizers, from any source."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from selfspec.errors import (
    DeviceError,
    InvalidParameterError,
    ModelLoadError,
    OutOfMemoryError,
    SelfSpecError,
    UnsupportedModelError,
    first_line,
)
from selfspec.gpu import DEVICES as TRITON_DEVICES
from selfspec.gpu import has_triton
from selfspec.limits import is_out_of_memory
from selfspec.loading.catalog import InstallableModel, installed_file, resolve_name
from selfspec.loading.devices import parse_device, parse_dtype
from selfspec.loading.divided import DeviceMap, Division
from selfspec.loading.gguf_hub import HubFile, download, find_hint
from selfspec.loading.gguf_model import read_gguf, read_gguf_config
from selfspec.loading.hub import reaching_hub
from selfspec.loading.quantised_model import read_quantised
from selfspec.loading.quantised_unread import refuse_unknown_method, refuse_unread_scales
from selfspec.loading.without_weights import shapes_of
from selfspec.memory import check_memory
from selfspec.model.families import find_family
from selfspec.runtimes.packed import ACTIVATIONS, set_activations
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.quantise import check_quantisable, parse_weights, quantise_in_place
from selfspec.runtimes.threads import keep_to_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NO_VOCABULARY = (
    "no file such as tokenizer.json is there, or it is damaged; copy it from where the model is from, or give Engine "
    "the loaded model alone and prompts as token ids"
)
_CLEARER = {
    "instantiate the backend tokenizer": _NO_VOCABULARY,
    "read a `tiktoken` file": "to read tokenizer.model, run: pip install sentencepiece protobuf (or "
    "tiktoken, where it is one of that); or copy tokenizer.json from where the model is from",
    "deserializing header": "a file of weights is cut short or damaged (incomplete header or data); download it again",
    "Should have a `model_type` key": "it has no config.json that names a model_type; give the folder that "
    "save_pretrained or the hub has written, or a GGUF file",
}
"""What errors of transformers and safetensors mean for the user, by words in them."""


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    weights: str | Precision | None = None,
    unpack: bool = False,
    activations: str = "auto",
    device_map: DeviceMap | None = None,
    tp_plan: str | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Loads a model and its tokenizer.

    Args:
        name: an installed model (``smollm2``), a bundled checkpoint (``tiny``, ``tiny-early-exit``), a local folder, a
            GGUF file, or a name on the hub: ``OWNER/REPO``, or ``OWNER/REPO:Q4_K_M`` for one of its GGUF files.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the dtype of the checkpoint (bfloat16 for a
            quantised GGUF file, and for a quantised checkpoint in float16 on the CPU).
        device: a torch device, or ``auto`` for CUDA if available.
        weights: ``int8`` or ``int4`` for low-bit weights (see ``quantise``); default: the checkpoint's.
        unpack: turn the weights of a quantised GGUF file or checkpoint (GPTQ, AWQ, compressed-tensors, bitsandbytes,
            MXFP4) into numbers of the dtype. On the CPU, and on CUDA with Triton, in float32 and bfloat16, they else
            stay the file's own, which is faster and takes less memory.
        activations: ``int8`` rounds what is multiplied with weights of few bits to 8 bits, in blocks of 32 with a scale
            each: faster for many rows, with a text of its own. ``exact`` multiplies all bits of the dtype. ``auto`` is
            ``int8`` for the own numbers of a quantised GGUF file or checkpoint in bfloat16, else ``exact``.
        device_map: divides the model over several devices, as transformers' ``from_pretrained`` does; needs accelerate.
        tp_plan: ``auto`` shares every weight with the other processes that ``torchrun`` started.

    Returns:
        The model in eval mode on the device, or divided, and its tokenizer.

    Raises:
        DeviceError: the dtype or the device is unknown or not available.
        InvalidParameterError: ``weights`` is unknown, or the model cannot be divided so.
        MissingPackageError: ``device_map`` needs accelerate.
        UnsupportedModelError: the family is not supported, has no ``tp_plan``, or cannot have low-bit weights; or parts
            of the model are on disk.
        ModelLoadError: there is no such model, or its files are missing or corrupt.
        OutOfMemoryError: the weights do not fit into memory.
    """
    if activations not in ACTIVATIONS:
        raise InvalidParameterError(f"there are no activations '{activations}'; choose {' or '.join(ACTIVATIONS)}")
    division, precision = Division(device_map, tp_plan), parse_weights(weights)
    for given, what in ((device != "auto", "a device"), (precision is not None, "low-bit weights"), (unpack, "unpack")):
        if given:
            division.refuse_with(what)
    keep_to_limit()
    with reaching(name):
        loaded = _load(name, parse_dtype(dtype), device, precision, division, unpack=unpack)
    set_activations(loaded[0], activations)
    return loaded


def _load(
    name: str | Path,
    dtype: Any,
    device: str | torch.device,
    precision: Precision | None,
    division: Division,
    *,
    unpack: bool,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    chosen_device = torch.device("cpu") if precision is not None and device == "auto" else parse_device(device)
    has_kernels = chosen_device.type == "cpu" or (chosen_device.type in TRITON_DEVICES and has_triton())
    packed = not unpack and precision is None
    if precision is not None and not has_kernels:
        raise DeviceError(
            f"low-bit weights of a target run on the CPU, or on CUDA with Triton, not on '{chosen_device}'; use device "
            "cpu, or run: pip install 'selfspec[triton]'"
        )
    with _explain_failure(name):
        source = resolve_name(name)
        if (file := _gguf_file(source)) is not None:
            division.refuse_with("a GGUF file")
            expected = source if isinstance(source, InstallableModel) else None
            model, tokenizer = read_gguf(file, dtype, packed=packed and has_kernels, expected=expected)
            return _finish(model, precision, chosen_device), tokenizer
        source = str(source)
        config = _check_family(source)
        if precision is not None:
            _check_quantisable(source, dtype, precision)
    with _explain_failure(name, "the tokenizer of "):
        tokenizer = load_tokenizer(source)
    with _explain_failure(name):
        own = not division and (has_kernels or unpack)
        quantised = read_quantised(source, dtype, packed=packed) if own else None
        if quantised is not None:
            return _finish(quantised, precision, chosen_device), tokenizer
        if chosen_device.type == "cpu" and not division:
            _check_fp8_memory(config, source)
        model, report = division.load(source, dtype)
        refuse_unread_scales(model, config, report.get("unexpected_keys") or (), source)
        _check_weights(report)
        return (model if division else _finish(model, precision, chosen_device)), tokenizer


def _finish(model: Any, precision: Precision | None, device: torch.device) -> "PreTrainedModel":
    """A model on its device, with low-bit weights where asked for, which are made on the CPU."""
    placed: PreTrainedModel = (model if precision is None else quantise_in_place(model, precision)).to(device)
    return placed


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of a name on the hub.

    Raises:
        ValueError: its files are missing; of some families transformers then makes one of special tokens alone.
        Exception: any of transformers and the hub client.
    """
    tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if tokenizer.get_vocab().keys() == tokenizer.get_added_vocab().keys():
        raise ValueError(_NO_VOCABULARY)
    return tokenizer


def load_config(name: str | Path) -> PreTrainedConfig:
    """Loads the configuration of a model and checks its family."""
    with reaching(name), _explain_failure(name):
        source = resolve_name(name)
        if (file := _gguf_file(source)) is not None:
            return read_gguf_config(file)
        return _check_family(str(source))


def find_gguf_file(name: str | Path) -> Path | None:
    """The GGUF file of a model, downloaded if it is on the hub; ``None`` for a model of another format."""
    with reaching(name):
        return _gguf_file(resolve_name(name))


def count_parameters(config: PreTrainedConfig) -> int:
    """Counts the parameters of a model with this configuration, without allocating them."""
    return sum(parameter.numel() for parameter in shapes_of(config).parameters())


def _gguf_file(source: str | Path | InstallableModel | HubFile) -> Path | None:
    """The GGUF file of a source, downloaded if it is on the hub; ``None`` where it is no such file."""
    if isinstance(source, InstallableModel):
        return installed_file(source)
    if isinstance(source, HubFile):
        return download(source)
    return source if isinstance(source, Path) and source.is_file() else None


def reaching(name: str | Path) -> contextlib.AbstractContextManager[None]:
    """``reaching_hub`` if a model's name is one on the hub."""
    return reaching_hub() if isinstance(resolve_name(name), (str, HubFile)) else contextlib.nullcontext()


@contextlib.contextmanager
def _explain_failure(name: str | Path, part: str = "") -> Iterator[None]:
    """Turns the errors of transformers, safetensors, torch and the hub client into errors of selfspec."""
    try:
        yield
    except SelfSpecError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"out of memory while loading '{name}'; load it in bfloat16") from None
        if isinstance(name, str) and (hint := find_hint(name)) is not None:
            raise ModelLoadError(hint) from error
        text = first_line(error)
        reason = next((clear for words, clear in _CLEARER.items() if words in text), text)
        raise ModelLoadError(f"cannot load {part}'{name}': {reason}") from error


def _check_family(source: str) -> PreTrainedConfig:
    """Refuses a family that is not supported, also if transformers does not know it, and an adapter.

    Returns:
        The config of the checkpoint.
    """
    adapter = Path(source) / "adapter_config.json"
    if adapter.is_file() and not adapter.with_name("config.json").exists():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise UnsupportedModelError(
            f"'{source}' is an adapter of the model '{base}'; name the model, and the adapter beside it: "
            f"--adapter {source}, or adapters= of Engine"
        )
    content, _ = PreTrainedConfig.get_config_dict(source)
    refuse_unknown_method(content, source)
    known = content.get("model_type") in (None, *transformers.CONFIG_MAPPING)
    config: Any = _read_config(source) if known else SimpleNamespace(**content)
    find_family(config)
    checked: PreTrainedConfig = config
    return checked


def _read_config(source: str) -> PreTrainedConfig:
    """The config of a checkpoint, whose code is never run."""
    config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    return config


def _check_quantisable(source: str, dtype: Any, precision: Precision) -> None:
    """Refuses low-bit weights for a model that cannot have them, by its shapes."""
    config: Any = _read_config(source)
    model = shapes_of(config, dtype=(config.dtype or torch.float32) if dtype == "auto" else dtype)
    check_quantisable(model.eval(), precision)


def _check_fp8_memory(config: PreTrainedConfig, source: str) -> None:
    """Refuses weights in FP8 that do not fit into memory as bfloat16, which transformers makes of them on a CPU."""
    settings = getattr(config, "quantization_config", None)
    if isinstance(settings, Mapping) and settings.get("quant_method") == "fp8":
        needed = 2 * count_parameters(config)
        what = f"the weights in FP8 of '{source}' become bfloat16 on a CPU and take {needed:,} bytes"
        check_memory(needed, what, "take a GGUF file of the model, which keeps its few bits")


def _check_weights(report: Mapping[str, Any]) -> None:
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, among them {missing[0]}")
    mismatched = sorted(report.get("mismatched_keys") or ())
    if mismatched:
        weight, found, expected = mismatched[0]
        raise ValueError(f"{weight} is {list(found)} in the weights, but {list(expected)} by config.json")
