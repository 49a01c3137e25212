"""Unpacks GGUF files, once per dtype, into the user's cache folder; models are loaded from there."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from selfspec.errors import ModelLoadError
from selfspec.loading.catalog import InstallableModel
from selfspec.loading.devices import DTYPES
from selfspec.loading.gguf import SOURCE, GgufModel
from selfspec.user_cache import cache_folder

_LOGGER = logging.getLogger(__name__)

_FOLDER = "models"
_VERSION = 1
"""Version of the contents of an unpacked folder."""


def unpack(path: Path, dtype: str | torch.dtype = "auto", *, expected: InstallableModel | None = None) -> Path:
    """Unpacks a GGUF file into a folder: config, weights, tokenizer and chat template, as transformers saves them.

    Args:
        path: the GGUF file.
        dtype: of the weights; ``auto`` is the dtype of the file, or bfloat16 if the file is quantised.
        expected: the model whose hash the file must have; ``None`` accepts any file.

    Returns:
        A folder in the user's cache folder, named by the file's hash and the dtype. An existing folder is used again.

    Raises:
        ModelLoadError: the hash differs, the file cannot be read, or the cache folder cannot hold the model.
        UnsupportedModelError: the family cannot be read or is not supported.
    """
    digest = _hash(path)
    if expected is not None and digest != expected.sha256:
        raise ModelLoadError(
            f"'{path}' is damaged: its SHA-256 is {digest}, not {expected.sha256}; reinstall it by "
            f"`selfspec models install {expected.name} --force`"
        )
    place, stem = cache_folder() / _FOLDER, f"gguf{_VERSION}-{digest[:24]}"
    chosen = dtype if isinstance(dtype, torch.dtype) else _auto_dtype(place.glob(f"{stem}-*"))
    gguf = None
    if chosen is None:
        gguf = GgufModel(path)
        chosen = gguf.dtype_of("auto")
    folder = place / f"{stem}-{str(chosen).removeprefix('torch.')}"
    if not folder.is_dir():
        _fill(folder, path, gguf or GgufModel(path), chosen)
    return folder


def is_unpacked(folder: Path) -> bool:
    """Whether ``unpack`` made this folder."""
    return folder.parent == cache_folder() / _FOLDER


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(2**22):
                digest.update(block)
    except OSError as error:
        raise ModelLoadError(f"cannot read '{path}': {error.strerror or error}") from error
    return digest.hexdigest()


def _auto_dtype(unpacked: Iterable[Path]) -> torch.dtype | None:
    """The dtype that ``auto`` means for a file that was unpacked before; ``None`` if it was not."""
    for folder in unpacked:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return DTYPES[json.loads((folder / SOURCE).read_text(encoding="utf-8"))["auto_dtype"]]
    return None


def _fill(folder: Path, path: Path, gguf: GgufModel, dtype: torch.dtype) -> None:
    """Makes the folder. A failure leaves no files behind."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    elsewhere = "set the environment variable XDG_CACHE_HOME to a folder with room"
    try:
        partial.mkdir(parents=True)
        _LOGGER.info("unpacking %s to %s, once", path.name, folder)
        needed, free = gguf.unpacked_bytes(dtype), shutil.disk_usage(partial).free
        if needed > free:
            raise ModelLoadError(
                f"unpacked, '{path}' takes {needed:,} bytes, but {free:,} are free for the cache folder "
                f"'{folder.parent}'; make room, or {elsewhere}"
            )
        gguf.save(partial, dtype)
        if not folder.is_dir():  # another process may have made it in the meantime
            partial.replace(folder)
    except OSError as error:
        raise ModelLoadError(
            f"cannot keep '{path}' unpacked in '{folder.parent}': {error.strerror or error}; {elsewhere}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
