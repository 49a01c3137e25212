"""What a method has learned, as a file: versioned, and bound to the model that it was learned on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from selfspec.errors import StateError

FORMAT = "selfspec-state"
VERSION = 1


@dataclass(frozen=True)
class LearnedState:
    """What a method carries from one request to the next.

    Attributes:
        values: numbers, strings, lists and mappings of them: whatever JSON can hold.
        tensors: what is too large for that.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def write_state(path: Path, state: LearnedState, method: str, model: Mapping[str, Any]) -> None:
    """Writes a state file; an existing one is replaced in one go, so that an interrupted write loses nothing.

    Args:
        path: the file.
        state: what was learned.
        method: name of the method that learned it.
        model: what tells the model apart from others (``selfspec.target.fingerprint``).

    Raises:
        StateError: the file cannot be written.
    """
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "method": method,
        "model": json.dumps(dict(model)),
        "values": json.dumps(dict(state.values)),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    # A file without any tensor is not valid safetensors for all readers.
    tensors = tensors or {"empty": torch.zeros(1)}
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, part, metadata)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise StateError(f"the state cannot be written to {path}: {error}") from error


def read_state(path: Path, method: str, model: Mapping[str, Any]) -> LearnedState:
    """Reads a state file.

    Args:
        path: the file.
        method: name of the method that wants it.
        model: what tells its model apart from others.

    Raises:
        StateError: there is no such file, it is no state file, or it belongs to another version, method or model.
    """
    if not path.is_file():
        raise StateError(f"there is no state file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_origin(path, metadata, method, model)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            values = json.loads(metadata["values"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StateError(f"{path} is not a state file that selfspec has written, or it is damaged: {error}") from error
    tensors.pop("empty", None)
    return LearnedState(values, tensors)


def _check_origin(path: Path, metadata: Mapping[str, str], method: str, model: Mapping[str, Any]) -> None:
    if metadata.get("format") != FORMAT:
        raise StateError(f"{path} is not a state file of selfspec")
    if metadata["version"] != str(VERSION):
        raise StateError(
            f"{path} has version {metadata['version']} of the state format, this selfspec reads version {VERSION}; "
            "learn it anew"
        )
    if metadata["method"] != method:
        raise StateError(
            f"{path} was learned by {metadata['method']}, not by {method}; give --method that or another file"
        )
    learned_on = json.loads(metadata["model"])
    for key, value in model.items():
        if learned_on.get(key) != value:
            raise StateError(
                f"{path} was learned on another model: its {key} is {learned_on.get(key)}, here it is {value}; "
                "give another file, or learn it anew"
            )
