"""What a method has learned, as a file: versioned, and bound to the model that it was learned on."""

import hashlib
import json
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from selfspec.errors import StateError
from selfspec.files import replace_file

FORMAT = "selfspec-state"
VERSION = 1


@dataclass(frozen=True)
class LearnedState:
    """What a method carries from one request to the next.

    Attributes:
        values: what JSON can represent: finite numbers, strings, booleans, ``None``, lists and mappings with string
            keys. A tuple becomes a list.
        tensors: larger data.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def write_state(path: Path, state: LearnedState, method: str, model: Mapping[str, Any]) -> None:
    """Writes a state file.

    An existing file is replaced atomically: readers get the old or the new state, an interrupted write loses nothing,
    and of several writers the last one wins.
    """
    check_destination(path)
    values = json.dumps(_plain(state.values, "values"))
    # Cloned, because safetensors refuses two tensors that share memory.
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.tensors.items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "method": method,
        "model": json.dumps(dict(model)),
        "values": values,
        "checksum": _checksum(values, tensors),
    }
    try:
        replace_file(path.resolve(), save(tensors, metadata))
    except (OSError, SafetensorError) as error:
        raise StateError(f"the state cannot be written to '{path}': {_reason(error)}") from error


def read_state(path: Path, method: str, model: Mapping[str, Any]) -> LearnedState:
    """Reads a state file; refuses a damaged one, and one of another version, method or model."""
    check_source(path)
    try:
        content = path.read_bytes()  # read once: another process may replace the file at any time
        metadata = _metadata(content)
        _check_origin(path, metadata, method, model)
        tensors = load(content)
        if metadata["checksum"] != _checksum(metadata["values"], tensors):
            raise ValueError("its checksum is wrong")
        return LearnedState(json.loads(metadata["values"]), tensors)
    except OSError as error:
        raise StateError(f"state file '{path}' cannot be read: {_reason(error)}") from error
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"'{path}' is not a state file of selfspec, or it is damaged: {error}") from error


def check_source(path: Path) -> None:
    """Refuses a path that is no regular file; opening a pipe could block for ever."""
    try:
        is_file = path.is_file()
    except OSError as error:
        raise StateError(f"state file '{path}' cannot be read: {_reason(error)}") from error
    if not is_file:
        raise StateError(f"there is no state file '{path}'")


def check_destination(path: Path) -> None:
    """Refuses a path to which no state file can be written, before time is spent on learning."""
    cannot = f"the state cannot be written to '{path}'"
    try:
        folder = path.resolve().parent
        if path.exists() and not path.is_file():
            raise StateError(f"{cannot}: it is no file")
        if not folder.is_dir():
            raise StateError(f"{cannot}: there is no folder '{folder}'; make it first")
    except OSError as error:
        raise StateError(f"{cannot}: {_reason(error)}") from error
    if not os.access(folder, os.W_OK):
        raise StateError(f"{cannot}: the folder '{folder}' is write-protected")


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file: its header is JSON, after eight bytes with its length."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return dict(header.get("__metadata__") or {})


def _check_origin(path: Path, metadata: Mapping[str, str], method: str, model: Mapping[str, Any]) -> None:
    if metadata.get("format") != FORMAT:
        raise StateError(f"'{path}' is not a state file of selfspec")
    if metadata["version"] != str(VERSION):
        raise StateError(
            f"'{path}' has version {metadata['version']} of the state format, this selfspec reads version {VERSION}; "
            "learn it again, or use the selfspec that wrote it"
        )
    if metadata["method"] != method:
        raise StateError(
            f"'{path}' was learned by the method {metadata['method']}, not by {method}; choose that, or another file"
        )
    learned_on = dict(json.loads(metadata["model"]))
    for key, value in model.items():
        if learned_on.get(key) != value:
            raise StateError(
                f"'{path}' was learned on another model ({key.replace('_', ' ')} {learned_on.get(key)}, here {value}); "
                "load that one, or give another file"
            )


def _plain(value: Any, where: str) -> Any:
    """A value in the types of JSON, with numpy's numbers converted.

    ``json.dumps`` would merge the keys 1 and "1", and write NaN, which is not JSON.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise StateError(f"the state cannot be written: {where} is {value!r}, which is no JSON; correct the method")


def _checksum(values: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(values.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():  # an empty one may have strides that cannot be viewed as bytes
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
