"""Low-bit copies in files of the user's cache folder: later processes read them instead of making them.

A file holds the copy of one product. It is named by what the copy depends on (sums over the weights, format, version),
so that other weights have other files. It begins with a digest of that and of its contents, which is checked.
"""

import hashlib
import json
import warnings
from pathlib import Path

import torch

from selfspec.errors import FallbackWarning
from selfspec.files import cache_folder, check_own, replace_file
from selfspec.runtimes.formats import PackedFormat
from selfspec.runtimes.packed import PackedWeights

_VERSION = 2
"""Of the layout of ``PackedWeights`` and of how values are rounded."""

_DIGEST_BYTES = 32


class CopyStore:
    """Keeps copies as files. Nothing goes wrong without them: what cannot be read or written is made again."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = cache_folder() / "copies" if folder is None else folder
        self._warned = False

    def get(self, weight: torch.Tensor, form: PackedFormat) -> PackedWeights:
        """The copy of weights ``[outputs, inputs]``, read from its file; without one, made and kept.

        A damaged file, or one of other weights, is replaced, with a warning.
        """
        key = _key(weight, form)
        path = self._folder / f"{hashlib.sha256(key).hexdigest()[:32]}.bin"
        outputs, inputs = weight.shape
        packed = PackedWeights.empty(outputs, inputs, form)
        try:
            if _read(path, key, packed):
                return packed
            self._warn(f"the kept low-bit copy {path} is damaged or of other weights; it is made again")
        except OSError:
            pass  # there is none
        packed = PackedWeights.of(weight, form)
        self._write(path, key, packed)
        return packed

    def _write(self, path: Path, key: bytes, packed: PackedWeights) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, b"".join([_digest(key, packed), _memory(packed)]))
        except OSError as error:
            self._warn(f"low-bit copies cannot be kept in {self._folder}: {error.strerror or error}")

    def _warn(self, message: str) -> None:
        """Warns once; there are as many files as products."""
        if not self._warned:
            warnings.warn(message, FallbackWarning, stacklevel=2)
        self._warned = True


def _read(path: Path, key: bytes, packed: PackedWeights) -> bool:
    """Fills a copy from a file; false where the file is not that copy."""
    check_own(path)
    if path.stat().st_size != _DIGEST_BYTES + packed.bytes:
        return False
    with path.open("rb", buffering=0) as file:
        digest = file.read(_DIGEST_BYTES)
        if file.readinto(_memory(packed)) != packed.bytes:
            return False
    return digest == _digest(key, packed)


def _digest(key: bytes, packed: PackedWeights) -> bytes:
    """SHA-256 of what a file has to be about and of what it holds."""
    digest = hashlib.sha256(key)
    digest.update(_memory(packed))
    return digest.digest()


def _memory(packed: PackedWeights) -> memoryview:
    """The bytes of a copy."""
    return memoryview(packed.tiles.numpy().reshape(-1))  # type: ignore[arg-type]


def _key(weight: torch.Tensor, form: PackedFormat) -> bytes:
    """What a copy depends on."""
    described = {
        "version": _VERSION,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype),
        "format": [form.bits, form.group],
        "weights": _sums(weight),
    }
    return json.dumps(described, sort_keys=True).encode()


def _sums(weight: torch.Tensor) -> list[int]:
    """Two sums over all weights, modulo 2^64, with another odd factor for each row and for each column of words.

    One changed weight changes both. They take as long as reading the weights.
    """
    words = weight.view(torch.int64)
    totals = (words.sum(1), words.sum(0))
    return [int((total * torch.arange(1, 2 * len(total), 2)).sum()) for total in totals]
