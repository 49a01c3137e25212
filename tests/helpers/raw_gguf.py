"""GGUF files made byte by byte, so that each byte can be wrong."""

import struct
from collections.abc import Sequence
from typing import Any

UINT8, UINT32, FLOAT32, STRING, ARRAY, UINT64 = 0, 4, 6, 8, 9, 10
F32, Q4_0 = 0, 2
_LAYOUTS = {UINT8: "B", UINT32: "I", FLOAT32: "f", UINT64: "Q"}


def string(text: str | bytes, size: int | None = None) -> bytes:
    """A string; ``size`` is the length that it claims."""
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content) if size is None else size) + content


def key(name: str, kind: int, value: Any) -> bytes:
    """A key with one value, which may be the bytes themselves."""
    if isinstance(value, bytes):
        content = value
    else:
        content = string(value) if kind == STRING else struct.pack(f"<{_LAYOUTS[kind]}", value)
    return string(name) + struct.pack("<I", kind) + content


def array(name: str, kind: int, items: bytes, count: int) -> bytes:
    """A key with an array."""
    return key(name, ARRAY, struct.pack("<IQ", kind, count) + items)


def tensor(name: str, shape: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """A tensor's entry; the shape is in numpy's order."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; ``counts`` are the numbers of tensors and keys that it claims."""
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys)))) + b"".join([*keys, *tensors])
    return head + b"\0" * (-len(head) % alignment) + data
