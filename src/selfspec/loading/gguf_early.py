"""Opens a GGUF file, and lays out its weights in a thread while Python imports what makes the model that takes them.

To import transformers' modules takes seconds on one core. The kernels that lay out weights need no Python meanwhile. A
command begins as soon as it knows the file (``begin``), and ``load_model`` finds it begun.
"""

import atexit
import contextlib
import math
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import torch

from selfspec.loading.devices import parse_device, parse_dtype
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_header import GgufTensor
from selfspec.memory import BASE_BYTES, available_bytes
from selfspec.runtimes.formats import GGUF_FORMATS, TILE, PackedFormat
from selfspec.runtimes.kernels import DTYPES, why_no_kernels
from selfspec.runtimes.packed import PackedWeights

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The number types that are dtypes of torch."""

_QUANTISED_DTYPE = torch.bfloat16

_REORDERED = ("attn_q", "attn_k")
"""Beginnings of names, after the block, of tensors whose rows some families have in another order, or in parts."""


class EarlyLayout:
    """Matrices, whole and in the order of the file, that a thread lays out.

    Args:
        tensors: those of the file that keep their numbers; it stays open meanwhile.
        room: bytes that the weights may take; where they need more, nothing is laid out. ``None`` for any number.
    """

    def __init__(self, tensors: Mapping[str, GgufTensor], room: int | None) -> None:
        chosen = [tensor for tensor in tensors.values() if _is_whole(tensor)]
        every = [(GGUF_FORMATS[tensor.type], tensor.shape) for tensor in tensors.values()]
        needed = sum(form.bytes(math.prod(shape[:-1]), shape[-1]) for form, shape in every)
        self._begun: dict[str, Future[PackedWeights]] = {}
        if room is None or needed <= room:
            self._begun = {tensor.name: Future() for tensor in chosen}
        given = [(tensor, self._begun[tensor.name]) for tensor in chosen if self._begun]
        # The end of the process does not wait for all of it, as where an option turns out to be wrong.
        self._thread = Thread(target=_lay_out_all, args=(given,), name="selfspec-layout", daemon=True)
        self._thread.start()

    def take(self, *names: str) -> PackedWeights | None:
        """The weights of a tensor, waiting for them if the thread is at them.

        ``None`` for several tensors, and if the thread has not begun; then it leaves them to the caller.
        """
        future = self._begun.pop(names[0], None) if len(names) == 1 else None
        return None if future is None or future.cancel() else future.result()

    def close(self) -> None:
        """Ends the thread after the tensor that it is at."""
        for future in self._begun.values():
            future.cancel()
        self._thread.join()


def _is_whole(tensor: GgufTensor) -> bool:
    last = tensor.name.rpartition(".")[0].rpartition(".")[2]
    return tensor.type in GGUF_FORMATS and len(tensor.shape) == 2 and not last.startswith(_REORDERED)


def _lay_out_all(given: list[tuple[GgufTensor, "Future[PackedWeights]"]]) -> None:
    for tensor, future in given:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(_lay_out(tensor))
            except BaseException as error:  # ``take`` raises it, and would wait for ever without it
                future.set_exception(error)


def _lay_out(tensor: GgufTensor) -> PackedWeights:
    threads = max(1, torch.get_num_threads() - 1)  # one core imports meanwhile
    outputs, inputs = tensor.shape
    data = tensor.data().reshape(outputs, -1)
    packed = PackedWeights.of_gguf(data, GGUF_FORMATS[tensor.type], (outputs, inputs), threads=threads)
    tensor.release()
    return packed


class OpenedFile:
    """A GGUF file whose weights are being laid out. A context manager that closes it.

    Args:
        path: the file, or a part of a split one.
        dtype: ``auto`` for that of the file's matrices, bfloat16 where it has no kernels.
        packed: matrices keep their numbers where there are kernels for them.

    Attributes:
        file: the file.
        dtype: of the weights that are numbers of a dtype.
        keeps: whether matrices of few bits keep their numbers.
        no_kernels: why there are no kernels; ``None`` where there are.
        available: bytes of memory that were available before any weights were read; ``None`` if that is not known.
        early: the weights that are laid out.
    """

    def __init__(self, path: Path, dtype: torch.dtype | str, *, packed: bool) -> None:
        self.key = path, dtype, packed
        with contextlib.ExitStack() as opened:
            self.file = opened.enter_context(GgufFile.open(path))
            self.no_kernels, self.available = why_no_kernels(), available_bytes()
            packed = packed and self.no_kernels is None
            self.dtype = dtype if isinstance(dtype, torch.dtype) else auto_dtype(self.file, packed=packed)
            self.keeps = packed and self.dtype in DTYPES
            tensors = self.file.tensors
            kept = {name: each for name, each in tensors.items() if self.keeps and own_form(each, self.dtype)}
            beside = BASE_BYTES + sum(each.nbytes for name, each in tensors.items() if name not in kept)
            self.early = EarlyLayout(kept, None if self.available is None else self.available - beside)
            opened.callback(self.early.close)
            self._opened = opened.pop_all()

    def __enter__(self) -> "OpenedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


_begun: list[OpenedFile] = []
"""What ``begin`` has opened."""


def begin(name: str, *, dtype: str, device: str, weights: str | None, unpack: bool) -> None:
    """Opens the file that ``load_model`` will be called for with these arguments, if its weights stay as they are.

    Whatever is wrong with it is said by ``load_model``.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and weights is None and not unpack:
        with contextlib.suppress(Exception):
            if parse_device(device).type == "cpu":
                forget()
                _begun.append(OpenedFile(path, parse_dtype(dtype), packed=True))


@atexit.register
def forget() -> None:
    """Closes what was begun and not taken."""
    while _begun:
        _begun.pop().__exit__()


def open_early(path: Path, dtype: torch.dtype | str, *, packed: bool) -> OpenedFile:
    """The file that was begun, once, or else opened now; see ``OpenedFile``.

    Raises:
        ModelLoadError: the file is missing or damaged.
        UnsupportedModelError: a tensor has a number type that does not run.
    """
    begun = _begun.pop() if _begun and _begun[0].key == (path, dtype, packed) else None
    return begun or OpenedFile(path, dtype, packed=packed)


def auto_dtype(file: GgufFile, *, packed: bool) -> torch.dtype:
    """The dtype of a file's matrices, or bfloat16 where they differ or have few bits.

    It is bfloat16, too, where matrices that stay as they are (``packed``) have a dtype without kernels.
    """
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtype = PLAIN[kinds.pop()] if len(kinds) == 1 and kinds <= PLAIN.keys() else _QUANTISED_DTYPE
    return _QUANTISED_DTYPE if packed and dtype not in DTYPES else dtype


def own_form(tensor: GgufTensor, dtype: torch.dtype) -> PackedFormat | None:
    """The format in which a tensor stays; ``None`` for numbers of the dtype, and where blocks or tiles do not fit."""
    form = GGUF_FORMATS.get(tensor.type)
    if form is None or tensor.type not in PLAIN:
        return form
    *outputs, inputs = tensor.shape
    fits = inputs % form.unit == 0 and bool(outputs) and outputs[-1] >= TILE
    return form if fits and PLAIN[tensor.type] != dtype else None
