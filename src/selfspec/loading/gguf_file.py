"""GGUF files: header and tensors, mapped into memory and not copied; all parts of a split file as one."""

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.errors import ModelLoadError
from selfspec.loading.gguf_header import Header, parse_header, short

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT, _NUMBER, _TENSOR_COUNT = "split.count", "split.no", "split.tensors.count"

XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""Parameters of the activation xIELU, which a header gives as lists of numbers by layer (``xielu.NAME``)."""

MOST_LAYERS = 2**12
"""No model has nearly as many."""


class _FileMapping:
    """A file mapped into memory, read-only."""

    def __init__(self, path: Path) -> None:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
                raise ModelLoadError(f"'{path}' is not a file")
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise ModelLoadError(f"'{path}' is not a GGUF file: it is empty")
                self._content: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"cannot read '{path}': {error.strerror or error}") from error

    @property
    def content(self) -> mmap.mmap:
        if self._content is None:
            raise ValueError("the GGUF file is closed")
        return self._content

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.content, np.uint8, nbytes, offset)

    def release(self, offset: int, nbytes: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.content.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)

    def close(self) -> None:
        content, self._content = self._content, None
        if content is not None:
            with contextlib.suppress(BufferError):  # arrays still show it: it is unmapped with the last of them
                content.close()


class _Numbers:
    """Numbers of a header in the place of a mapped file."""

    def __init__(self, values: npt.NDArray[np.float32]) -> None:
        self._bytes = values.view(np.uint8)
        self._bytes.flags.writeable = False

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._bytes[offset : offset + nbytes]

    def release(self, offset: int, nbytes: int) -> None:
        """Does nothing: they are in memory."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: its name in the file.
        type: ggml's name of its number type, as in ``Q4_K``.
        shape: in numpy's order: (outputs, inputs) for a linear layer.
        nbytes: size of its blocks in bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    _offset: int = field(repr=False)
    _mapping: _FileMapping | _Numbers = field(repr=False, compare=False)

    def data(self) -> npt.NDArray[np.uint8]:
        """The blocks as they are in the file, row by row, in one dimension. Read-only; the pages are read when used.

        The array is valid as long as it exists, also after its file is closed.
        """
        return self._mapping.view(self._offset, self.nbytes)

    def release(self) -> None:
        """Gives the memory of the tensor's pages back to the system; using ``data`` again reads them again.

        Does nothing on systems that cannot.
        """
        self._mapping.release(self._offset, self.nbytes)


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

    def __init__(self, path: Path, parts: "list[_Part]", opened: contextlib.ExitStack) -> None:
        self.path = path
        self.parts = tuple(part.path for part in parts)
        self.metadata = MappingProxyType(parts[0].header.metadata)
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
            count = _whole_number(first.header, _COUNT, path)
            parts = _open_parts(first, count, opened) if count > 1 else [first]
            return cls(path, parts, opened)

    def close(self) -> None:
        """Unmaps the files, or those that arrays of ``GgufTensor.data`` still show as soon as these are gone."""
        self._opened.close()

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Part:
    path: Path
    mapping: _FileMapping
    header: Header


def _open(path: Path, opened: contextlib.ExitStack) -> _Part:
    """Maps a file and parses its header; ``opened`` closes it."""
    mapping = _FileMapping(path)
    opened.callback(mapping.close)
    return _Part(path, mapping, parse_header(mapping.content, path))


def _open_parts(given: _Part, count: int, opened: contextlib.ExitStack) -> list[_Part]:
    """All parts of a split file, in order, one of which is open."""
    named = _PART.fullmatch(given.path.name)
    number = _whole_number(given.header, _NUMBER, given.path)
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
        if (_whole_number(part.header, _NUMBER, path), _whole_number(part.header, _COUNT, path)) != (i, count):
            raise ModelLoadError(f"'{path}' is not part {i + 1} of {count} of a split model; download it again")
        parts.append(part)
    return parts


def _join(parts: list[_Part]) -> dict[str, GgufTensor]:
    """The tensors of all parts."""
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        for name, entry in part.header.tensors.items():
            if name in tensors:
                raise ModelLoadError(
                    f"the tensor '{short(name)}' of '{part.path}' is in another part, too; download the parts again"
                )
            tensors[name] = GgufTensor(
                name, entry.type, entry.shape, entry.nbytes, part.header.start + entry.offset, part.mapping
            )
    expected = _whole_number(parts[0].header, _TENSOR_COUNT, parts[0].path)
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
            mapping, size = _Numbers(values.copy()), values.itemsize
            for layer in range(len(values)):
                tensor = f"blk.{layer}.xielu.{name}"
                found[tensor] = GgufTensor(tensor, "F32", (1,), size, layer * size, mapping)
    return found


def _whole_number(header: Header, key: str, path: Path) -> int:
    value = header.metadata.get(key, 0)
    if type(value) is not int or value < 0:
        raise ModelLoadError(f"'{path}' is truncated or damaged ({key} is not a whole number); download it again")
    return value
