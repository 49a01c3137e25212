"""The tensors of a checkpoint in safetensors, read one by one."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils.hub import cached_file

from selfspec.errors import ModelLoadError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class _Tensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """By its name in safetensors, as ``BF16``."""


class SafetensorsFiles:
    """The tensors of one checkpoint by name. A file is mapped only while one of its tensors is read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._tensors: dict[str, _Tensor] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            with opened as handle:
                for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                    part = handle.get_slice(name)
                    self._tensors[name] = _Tensor(file, tuple(part.get_shape()), str(part.get_dtype()))

    @staticmethod
    def find(source: str, *, download: bool = True) -> "SafetensorsFiles | None":
        """Those of a folder, or of a name on the hub, downloaded if need be; ``None`` where there are none."""
        options = {"_raise_exceptions_for_missing_entries": False, "local_files_only": not download}
        if (whole := cached_file(source, _WHOLE, **options)) is not None:  # an index beside it is an older one
            return SafetensorsFiles([Path(whole)])
        index = cached_file(source, _INDEX, **options)
        return None if index is None else SafetensorsFiles(_parts(source, Path(index), **options))

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which is there."""
        return self._tensors[name].shape

    def check(self, name: str, shape: tuple[int, ...], *dtypes: str) -> str:
        """Refuses a tensor that is missing, or of another shape or dtype (by safetensors' names); returns its name."""
        found = self._tensors.get(name)
        if found is None:
            raise ModelLoadError(f"the tensor {name} is missing; download the checkpoint again")
        if found.shape != shape or (dtypes and found.dtype not in dtypes):
            raise ModelLoadError(
                f"{name} is {found.dtype} {list(found.shape)} in the weights, but its layer needs "
                f"{' or '.join(dtypes) or 'numbers'} {list(shape)}; the checkpoint is damaged or of another layout"
            )
        return name

    def read(self, name: str) -> torch.Tensor:
        """The values of a tensor; they are mapped, so copy what has to stay."""
        opened: Any = safe_open(self._tensors[name].file, framework="pt")
        with opened as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor


def _parts(source: str, index: Path, **options: Any) -> list[Path]:
    """The files that an index names."""
    content = json.loads(index.read_text(encoding="utf-8"))
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, Mapping) or not all(isinstance(each, str) for each in weights.values()):
        raise ModelLoadError(f"{_INDEX} of '{source}' names no files; download the checkpoint again")
    found = {name: cached_file(source, name, **options) for name in sorted(set(weights.values()))}
    return [Path(path) for path in found.values() if path is not None]
