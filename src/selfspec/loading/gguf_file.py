"""GGUF files: header and tensors, mapped into memory and not copied; all parts of a split file as one."""

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from selfspec.errors import ModelLoadError
from selfspec.loading.gguf_header import GgufPart, GgufTensor, Memory, parse_header, short

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT, _NUMBER, _TENSOR_COUNT = "split.count", "split.no", "split.tensors.count"

XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""Parameters of the activation xIELU, which a header gives as lists of numbers by layer (``xielu.NAME``)."""

MOST_LAYERS = 2**12
"""No model has nearly as many."""


class GgufFile:
    """A GGUF file, or all parts of a split one. A context manager that closes it.

    Attributes:
        path: the file that was opened.
        parts: all of its files, in order; the file itself if it is not split.
        metadata: the keys of the (first) file: numbers, strings and booleans of Python; arrays of strings as lists,
            arrays of numbers and booleans as numpy arrays.
        tensors: the tensors of all parts by name, in the order of the file; after them, as tensors of one number, the
            parameters of layers that a header gives (``XIELU``).
    """

    def __init__(self, path: Path, parts: list[GgufPart], opened: contextlib.ExitStack) -> None:
        self.path = path
        self.parts = tuple(part.path for part in parts)
        self.metadata = MappingProxyType(parts[0].metadata)
        self.tensors = MappingProxyType({**_join(parts), **_parameters(self.metadata)})
        self._opened = opened.pop_all()

    @classmethod
    def open(cls, path: str | Path) -> "GgufFile":
        """Parses the header of a file. Weights are not read.

        Args:
            path: a GGUF file of version 2 or 3, little-endian. Any part of a split file stands for all of it.

        Raises:
            ModelLoadError: the file, or a part of it, is missing, cut short or damaged.
            UnsupportedModelError: the file is big-endian, or a tensor has a number type that does not run.
        """
        path = Path(path)
        with contextlib.ExitStack() as opened:
            first = _open(path, opened)
            count = _whole_number(first, _COUNT)
            parts = _open_parts(first, count, opened) if count > 1 else [first]
            return cls(path, parts, opened)

    def close(self) -> None:
        """Unmaps the files, or those that arrays of ``GgufTensor.data`` still show as soon as these are gone."""
        self._opened.close()

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path, opened: contextlib.ExitStack) -> GgufPart:
    """Maps a file and parses its header; ``opened`` closes it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise ModelLoadError(f"'{path}' is not a file")
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ModelLoadError(f"'{path}' is not a GGUF file: it is empty")
            memory = Memory(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelLoadError(f"cannot read '{path}': {error.strerror or error}") from error
    opened.callback(memory.close)
    return parse_header(memory, path)


def _open_parts(given: GgufPart, count: int, opened: contextlib.ExitStack) -> list[GgufPart]:
    """All parts of a split file, in order, one of which is open."""
    named = _PART.fullmatch(given.path.name)
    number = _whole_number(given, _NUMBER)
    if named is None or (int(named["number"]), int(named["count"])) != (number + 1, count):
        raise ModelLoadError(
            f"'{given.path}' is part {number + 1} of {count} of a split model, but its name does not say so; name the "
            f"parts NAME-00001-of-{count:05}.gguf and so on"
        )
    paths = [given.path.with_name(f"{named['name']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of the {count} parts of the model are missing: '{missing[0]}' is not there; download it"
        )
    parts = []
    for i, path in enumerate(paths):
        part = given if i == number else _open(path, opened)
        if (_whole_number(part, _NUMBER), _whole_number(part, _COUNT)) != (i, count):
            raise ModelLoadError(f"'{path}' is not part {i + 1} of {count} of a split model; download it again")
        parts.append(part)
    return parts


def _join(parts: list[GgufPart]) -> dict[str, GgufTensor]:
    """The tensors of all parts."""
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelLoadError(
                    f"the tensor '{short(name)}' of '{part.path}' is in another part, too; download the parts again"
                )
            tensors[name] = tensor
    expected = _whole_number(parts[0], _TENSOR_COUNT)
    if len(parts) > 1 and expected != len(tensors):
        raise ModelLoadError(
            f"the parts of '{parts[0].path}' hold {len(tensors)} tensors, not {expected}; download the parts again"
        )
    return tensors


def _parameters(metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
    """Parameters of layers that are settings of the header, named as tensors are: ``blk.0.xielu.beta``."""
    found = {}
    for name in XIELU:
        values = metadata.get(f"xielu.{name}")
        if isinstance(values, np.ndarray) and values.dtype == np.float32 and len(values) <= MOST_LAYERS:
            memory, size = Memory(values.tobytes()), values.itemsize
            for layer in range(len(values)):
                tensor = f"blk.{layer}.xielu.{name}"
                found[tensor] = GgufTensor(tensor, "F32", (1,), size, layer * size, memory)
    return found


def _whole_number(part: GgufPart, key: str) -> int:
    value = part.metadata.get(key, 0)
    if type(value) is not int or value < 0:
        raise ModelLoadError(f"'{part.path}' is truncated or damaged ({key} is not a whole number); download it again")
    return value
