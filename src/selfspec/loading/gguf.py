"""Reads GGUF files with transformers, and unpacks each, once per dtype, into the user's cache folder."""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from selfspec.errors import ModelLoadError, UnsupportedModelError, first_line
from selfspec.files import cache_folder
from selfspec.loading.catalog import InstallableModel
from selfspec.loading.devices import DTYPES
from selfspec.model.families import find_family

_LOGGER = logging.getLogger(__name__)

SOURCE = "source.json"
"""File of an unpacked folder that names the source of the model."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED_DTYPE = torch.bfloat16

_FOLDER = "models"
_VERSION = 1
"""Version of the contents of an unpacked folder."""


class GgufModel:
    """The model in a GGUF file. The constructor reads and checks its header, ``save`` its weights."""

    def __init__(self, path: Path) -> None:
        self._path = path
        require_packages()
        self._reader = _open(path)
        self.family = str(self._field("general.architecture", ""))
        if not self.family:
            raise ModelLoadError(f"'{path}' does not name the family of its model; convert the model again")
        if int(self._field("split.count", 0)) > 1:
            raise ModelLoadError(
                f"'{path}' is one part of a split model; join the parts with `llama-gguf-split --merge`"
            )
        find_family(self.config)
        self._check_rope()
        if not self._field("tokenizer.ggml.model", "") or "tokenizer.ggml.tokens" not in self._reader.fields:
            raise ModelLoadError(
                f"'{path}' holds no tokenizer; convert the model with one, or load it by transformers and give it to "
                "selfspec.Engine, which takes token ids without a tokenizer"
            )

    @cached_property
    def config(self) -> Any:
        """The config of the model, as transformers reads it."""
        folder, name = str(self._path.parent), self._path.name
        try:
            return AutoConfig.from_pretrained(folder, gguf_file=name)
        except Exception as error:  # each reader of transformers has its own errors
            if "not supported" in str(error) or "model_type" in str(error) or isinstance(error, (KeyError, ValueError)):
                raise UnsupportedModelError(
                    f"the family '{self.family}' of '{self._path}' cannot be read by transformers: {first_line(error)}"
                ) from error
            raise ModelLoadError(f"cannot read the config of '{self._path}': {first_line(error)}") from error

    def dtype_of(self, dtype: str | torch.dtype) -> torch.dtype:
        """The dtype to unpack to; ``auto`` is the dtype of the matrices, or bfloat16 if they are quantised."""
        if isinstance(dtype, torch.dtype):
            return dtype
        kinds = {tensor.tensor_type.name for tensor in self._reader.tensors if len(tensor.shape) > 1}
        return _FLOATS[kinds.pop()] if len(kinds) == 1 and kinds <= _FLOATS.keys() else _QUANTISED_DTYPE

    def unpacked_bytes(self, dtype: str | torch.dtype) -> int:
        """Size of the unpacked weights in bytes."""
        numbers = sum(int(tensor.n_elements) for tensor in self._reader.tensors)
        return numbers * self.dtype_of(dtype).itemsize

    def save(self, folder: Path, dtype: str | torch.dtype) -> None:
        """Writes model, tokenizer and source into an existing, empty folder, as transformers loads them."""
        place: Any = {"pretrained_model_name_or_path": str(self._path.parent), "gguf_file": self._path.name}
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(**place)
            model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=self.dtype_of(dtype), **_unpacking())
        except Exception as error:  # numpy, gguf, tokenizers and transformers have their own errors
            raise ModelLoadError(f"cannot read '{self._path}': {first_line(error)}") from error
        self._check_complete(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / SOURCE).write_text(json.dumps(self._describe(), indent=1) + "\n", encoding="utf-8")

    def _check_rope(self) -> None:
        """Refuses rope settings that transformers would ignore: the model would silently generate wrong text."""
        scaling = self._field(f"{self.family}.rope.scaling.type", "none")
        own = [tensor.name for tensor in self._reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
        if (own or scaling != "none") and self.config.rope_parameters["rope_type"] == "default":
            raise UnsupportedModelError(
                f"'{self._path}' scales its rope ({own[0] if own else scaling}), which transformers does not read from "
                "GGUF; take the model's folder or its name on the hub"
            )
        for name, read in self._rope_read().items():
            value = self._field(f"{self.family}.rope.{name}", read)
            if not math.isclose(value, read, rel_tol=1e-6):
                raise UnsupportedModelError(
                    f"'{self._path}' has rope.{name} {value:g}, of which transformers reads {read:g}; "
                    "take the model's folder or its name on the hub"
                )

    def _rope_read(self) -> dict[str, float]:
        """The rope settings of transformers' config by GGUF's names; empty if they differ between layer types."""
        config, rope = self.config, self.config.rope_parameters
        if "rope_theta" not in rope:
            return {}
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        return {"freq_base": rope["rope_theta"], "dimension_count": rotated}

    def _check_complete(self, model: Any) -> None:
        """Refuses a model with more or fewer numbers than the file: transformers ignored or invented a tensor."""
        there = sum(int(tensor.n_elements) for tensor in self._reader.tensors)
        read = sum(parameter.numel() for parameter in model.parameters())
        if there != read:
            raise UnsupportedModelError(
                f"transformers reads {read:,} of the {there:,} numbers in '{self._path}'; take the model's folder or "
                "its name on the hub"
            )

    def _describe(self) -> dict[str, Any]:
        """The contents of ``source.json``."""
        return {
            "file": self._path.name,
            "name": self._field("general.name", None),
            "licence": self._field("general.license", None),
            "types": sorted({tensor.tensor_type.name for tensor in self._reader.tensors}),
            "auto_dtype": str(self.dtype_of("auto")).removeprefix("torch."),
        }

    def _field(self, name: str, default: Any) -> Any:
        field = self._reader.fields.get(name)
        return default if field is None else field.contents()


def unpack(path: Path, dtype: str | torch.dtype = "auto", *, expected: InstallableModel | None = None) -> Path:
    """Unpacks a GGUF file into a folder: config, weights, tokenizer and chat template, as transformers saves them.

    The folder is in the user's cache folder, named by the file's hash and the dtype; an existing one is used again.
    ``expected`` is the model whose hash the file must have; ``None`` accepts any file.
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


def require_packages() -> None:
    """Checks that the packages that read GGUF files are installed."""
    try:
        import accelerate  # noqa: F401 - transformers' reader needs it
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelLoadError(
            f"reading a GGUF file needs the package {error.name}; install it by `pip install 'selfspec[gguf]'`"
        ) from error


def _open(path: Path) -> Any:
    """Reads the header of the file, and checks that all tensors are in it."""
    from gguf import GGUFReader

    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"cannot read '{path}': {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ModelLoadError(f"'{path}' is not a GGUF file: it begins with {magic!r}")
    try:
        return GGUFReader(path)
    except Exception as error:  # numpy has many errors for missing bytes
        if "version" in str(error):
            raise ModelLoadError(f"'{path}' has a GGUF version that cannot be read: {first_line(error)}") from error
        raise ModelLoadError(f"'{path}' is truncated or damaged ({first_line(error)}); download it again") from error


def _unpacking() -> dict[str, Any]:
    """Arguments that make ``from_pretrained`` unpack the weights; before transformers 5.20 it always does."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
