"""Parses the header of one GGUF file in bounded time and memory: every count is checked before anything is allocated.

The layout, all of it little-endian: magic, version (u32), number of tensors (u64), number of keys (u64); the keys, each
a name, a value type (u32) and a value; the tensors, each a name, the number of dimensions (u32), the dimensions (u64),
the number type (u32) and its offset (u64) in the data section. The data section starts at the next multiple of the
alignment. A string is its length in bytes (u64) and UTF-8; an array the type of its items (u32), their number (u64) and
the items.
"""

import contextlib
import itertools
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.gguf_types import BLOCKS, NAMES

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

_MAX_HEADER_BYTES = 2**26
"""Headers have 4 to 16 MB, nearly all of it the vocabulary."""
_MAX_ENTRIES = 2**16
"""Keys, or tensors. Models have hundreds."""
_MAX_ARRAY_STRINGS = 2**21
"""Strings in all arrays together. Vocabularies have 300,000 tokens and 500,000 merges."""
_MAX_NAME_BYTES = 2**16 - 1
_MAX_STRING_BYTES = 2**24
_MAX_DIMENSIONS = 4
_MAX_TENSOR_BYTES = 2**50

_NUMBERS = {
    kind: np.dtype(code).newbyteorder("<")
    for kind, code in enumerate(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", None, None, "u8", "i8", "f8"))
    if code is not None
}
_STRING, _ARRAY = 8, 9
_KEY_BYTES, _TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8
"""The least that an entry takes."""


class Memory:
    """Where blocks of tensors are: a file mapped into memory, read-only, or numbers of its header."""

    def __init__(self, content: mmap.mmap | bytes) -> None:
        self._content: mmap.mmap | bytes | None = content

    @property
    def content(self) -> mmap.mmap | bytes:
        """All bytes. Raises ``ValueError`` if the file is closed."""
        if self._content is None:
            raise ValueError("the GGUF file is closed")
        return self._content

    def release(self, offset: int, nbytes: int) -> None:
        """Gives the pages of these bytes back to the system, if they are of a file."""
        if isinstance(self.content, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.content.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)

    def close(self) -> None:
        """Unmaps the file, now or with the last array that shows it."""
        content, self._content = self._content, None
        if isinstance(content, mmap.mmap):
            with contextlib.suppress(BufferError):  # arrays still show it: it is unmapped with the last of them
                content.close()


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: its name in the file.
        type: ggml's name of its number type, as in ``Q4_K``.
        shape: in numpy's order: (outputs, inputs) for a linear layer.
        nbytes: size of its blocks in bytes.
        offset: of its blocks from the start of their memory, in bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int = field(repr=False)
    _memory: Memory = field(repr=False, compare=False)

    def data(self) -> npt.NDArray[np.uint8]:
        """The blocks as they are in the file, row by row, in one dimension. Read-only; the pages are read when used.

        The array is valid as long as it exists, also after its file is closed.
        """
        return np.frombuffer(self._memory.content, np.uint8, self.nbytes, self.offset)

    def release(self) -> None:
        """Gives the memory of the tensor's pages back to the system; using ``data`` again reads them again.

        Does nothing on systems that cannot.
        """
        self._memory.release(self.offset, self.nbytes)


@dataclass(frozen=True)
class GgufPart:
    """The keys and tensors of one file, which may be a part of a model."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def parse_header(memory: Memory, path: Path) -> GgufPart:
    """Parses a file's header, and checks that its tensors are within the file and apart from each other.

    Raises:
        ModelLoadError: the file is no GGUF file, or cut short or damaged.
        UnsupportedModelError: it is of another version or byte order, or a tensor has an unknown number type.
    """
    return _Parser(memory, path).parse()


class _Parser:
    """A position in the header, and what can be read there."""

    def __init__(self, memory: Memory, path: Path) -> None:
        self._memory, self._content = memory, memory.content
        self._path = path
        self._size = len(self._content)
        self._end = min(self._size, _MAX_HEADER_BYTES)
        self._at = len(MAGIC)
        self._array_strings = 0

    def parse(self) -> GgufPart:
        self._check_version()
        tensor_count, key_count = self._read("QQ")
        self._check_count(tensor_count, _TENSOR_BYTES, _MAX_ENTRIES, "tensors")
        self._check_count(key_count, _KEY_BYTES, _MAX_ENTRIES, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string("a key", _MAX_NAME_BYTES)
            if key in metadata:
                self._refuse(f"the key '{short(key)}' is there twice")
            metadata[key] = self._value(key)
        tensors: dict[str, GgufTensor] = {}
        alignment = self._alignment(metadata)
        for _ in range(tensor_count):
            name = self._string("the name of a tensor", _MAX_NAME_BYTES)
            if name in tensors:
                self._refuse(f"the tensor '{short(name)}' is there twice")
            tensors[name] = self._tensor(name, alignment)
        start = -(-self._at // alignment) * alignment
        tensors = {name: replace(each, offset=start + each.offset) for name, each in tensors.items()}
        self._check_places(tensors.values())
        return GgufPart(self._path, metadata, tensors)

    def _check_version(self) -> None:
        if self._content[: len(MAGIC)] != MAGIC:
            raise ModelLoadError(f"'{self._path}' is not a GGUF file: it begins with {self._content[:4]!r}")
        (version,) = self._read("I")
        (swapped,) = struct.unpack(">I", struct.pack("<I", version))
        if version not in _VERSIONS and swapped in _VERSIONS:
            raise UnsupportedModelError(
                f"'{self._path}' is a big-endian GGUF file; take the little-endian one, or convert it with gguf-py's "
                "`gguf_convert_endian.py`"
            )
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"'{self._path}' has GGUF version {version}, which cannot be read; convert the model to version 3"
            )

    def _value(self, key: str) -> Any:
        (kind,) = self._read("I")
        what = f"'{short(key)}'"
        if kind == _STRING:
            return self._string(what, _MAX_STRING_BYTES)
        if kind != _ARRAY:
            return self._numbers(kind, 1, what)[0].item()
        kind, count = self._read("IQ")
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            self._refuse(f"{what} is an array of arrays, which no model has")
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> npt.NDArray[Any]:
        if kind not in _NUMBERS:
            self._refuse(f"{what} has the value type {kind}, which does not exist")
        dtype = _NUMBERS[kind]
        size = count * dtype.itemsize
        self._check_left(size, what)
        start, self._at = self._at, self._at + size
        content = self._content[start : self._at]  # copied: a view would keep the file mapped
        if dtype == np.bool_:  # any byte but 0 is true; as a bool it would be undefined
            return np.frombuffer(content, np.uint8).astype(np.bool_)
        return np.frombuffer(content, dtype)

    def _string(self, what: str, limit: int) -> str:
        (size,) = self._read("Q")
        if size > limit:
            self._refuse(f"{what} takes {size:,} bytes, and at most {limit:,} are allowed")
        self._check_left(size, what)
        start, self._at = self._at, self._at + size
        return self._decode(start, self._at, what)

    def _strings(self, count: int, what: str) -> list[str]:
        self._check_count(count, 8, _MAX_ARRAY_STRINGS - self._array_strings, f"strings in {what}")
        self._array_strings += count
        # Hundreds of thousands of them: this loop is most of the time that a header takes.
        content, end, unpack, strings = self._content, self._end, struct.Struct("<Q").unpack_from, []
        at = self._at
        for _ in range(count):
            if at + 8 > end:
                self._refuse_cut(what)
            start = at + 8
            at = start + unpack(content, at)[0]
            if at > end:
                self._refuse_cut(what)
            try:
                strings.append(content[start:at].decode())
            except UnicodeDecodeError:
                self._decode(start, at, what)
        self._at = at
        return strings

    def _decode(self, start: int, end: int, what: str) -> str:
        try:
            return self._content[start:end].decode()
        except UnicodeDecodeError:
            self._refuse(f"{what} is not UTF-8")

    def _tensor(self, name: str, alignment: int) -> GgufTensor:
        what = f"the tensor '{short(name)}'"
        (dimensions,) = self._read("I")
        if dimensions > _MAX_DIMENSIONS:
            self._refuse(f"{what} has {dimensions} dimensions")
        shape = tuple(reversed(self._read("Q" * dimensions)))
        number, offset = self._read("IQ")
        kind = self._type(number, what)
        block = BLOCKS[kind]
        row = shape[-1] if shape else 1
        if 0 in shape:
            self._refuse(f"{what} is empty: its shape is {shape}")
        if row % block.size:
            self._refuse(f"rows of {row:,} numbers of {what} are not whole blocks of {block.size} ({kind})")
        nbytes = math.prod(shape) // block.size * block.bytes
        if nbytes > _MAX_TENSOR_BYTES:
            self._refuse(f"{what} has an impossible shape, {shape}")
        if offset % alignment:
            self._refuse(f"{what} is at {offset:,}, which is no multiple of the alignment {alignment}")
        return GgufTensor(name, kind, shape, nbytes, offset, self._memory)

    def _type(self, number: int, what: str) -> str:
        name = NAMES[number] if number < len(NAMES) else f"number type {number}"
        if name not in BLOCKS:
            raise UnsupportedModelError(
                f"{what} of '{self._path}' is stored as {name}, which is not supported; take a file of another type, "
                "as Q4_K_M, Q6_K or Q8_0"
            )
        return name

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._refuse("general.alignment is not a power of two")
        return alignment

    def _check_places(self, tensors: Iterable[GgufTensor]) -> None:
        """Refuses tensors that overlap, or are beyond the end of the file."""
        ordered = sorted(tensors, key=lambda each: each.offset)
        for tensor, following in itertools.pairwise(ordered):
            if tensor.offset + tensor.nbytes > following.offset:
                self._refuse(f"the tensors '{short(tensor.name)}' and '{short(following.name)}' overlap")
        if ordered and (missing := ordered[-1].offset + ordered[-1].nbytes - self._size) > 0:
            raise ModelLoadError(
                f"'{self._path}' is truncated: {missing:,} of {self._size + missing:,} bytes are missing; "
                "download it again"
            )

    def _read(self, layout: str) -> tuple[int, ...]:
        size = struct.calcsize("<" + layout)
        self._check_left(size, "the header")
        self._at += size
        return struct.unpack_from("<" + layout, self._content, self._at - size)

    def _check_count(self, count: int, least: int, limit: int, what: str) -> None:
        """Refuses a number of entries that cannot be in the file, since each takes ``least`` bytes or more."""
        if count * least > self._size - self._at:
            self._refuse(f"{count:,} {what} do not fit into a file of {self._size:,} bytes")
        if count > limit:
            self._refuse(f"{count:,} {what} are more than a model has")

    def _check_left(self, size: int, what: str) -> None:
        if size > self._end - self._at:
            self._refuse_cut(what)

    def _refuse_cut(self, what: str) -> NoReturn:
        if self._end < self._size:
            self._refuse(f"its header is longer than {self._end:,} bytes")
        self._refuse(f"the file ends within {what}")

    def _refuse(self, reason: str) -> NoReturn:
        raise ModelLoadError(f"'{self._path}' is truncated or damaged ({reason}); download it again")


def short(text: str) -> str:
    """A name for a message of one line."""
    line = text if text.isprintable() else repr(text)[1:-1]
    return line if len(line) <= 80 else f"{line[:79]}…"
