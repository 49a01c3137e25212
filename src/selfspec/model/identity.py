"""Which model this is: digests of its weights, what processes that share it compare, and what holds a weight."""

import hashlib
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from selfspec.model.placement import kept_weight
from selfspec.model.ranks import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLES = 1024
"""Elements of every weight that a digest reads."""

_PIECES, _PIECE = 64, 4096
"""Pieces of a file that a digest reads, and the bytes of one."""


def weights_digest(model: nn.Module) -> str:
    """A digest of the weights in this process, of up to 1,024 elements of each, evenly spread.

    That distinguishes checkpoints of the same architecture, fine-tuned versions included, and takes far less time than
    loading them. It does not depend on the device.
    """
    return _digest(weight for _, weight in _weights(model))


def shared_traits(model: "PreTrainedModel") -> dict[str, Any]:
    """By name, what all processes that share a model by a ``tp_plan`` have to have in common.

    Of its weights, those that are not divided; a checkpoint that differs in the others alone is recognised by its
    revision on the hub, or by its files.
    """
    config: Any = model.config
    values = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    whole = [weight for _, weight in _weights(model) if not is_sharded(weight)]
    return {
        "the versions of selfspec, torch and transformers": [
            version(name) for name in ("selfspec", "torch", "transformers")
        ],
        "the config of their model": values,
        "the weights of their model": [
            _digest(whole),
            getattr(config, "_commit_hash", None),
            list(_files(Path(getattr(config, "_name_or_path", None) or "/dev/null"))),
        ],
    }


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by name, each once, as ``parameters`` has them; offloaded ones from where they are kept."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, weight in vars(module)["_parameters"].items():
            if weight is not None and id(weight) not in seen:
                seen.add(id(weight))
                yield f"{prefix}.{name}", kept_weight(module, name)


def _digest(weights: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for weight in weights:
        for tensor in stored_tensors(weight):
            digest.update(str(list(tensor.shape)).encode())
            digest.update(_sample(tensor).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Some elements of a weight, float32 ``[n]`` on the CPU, which holds every smaller dtype exactly."""
    flat = weight.flatten()
    # An odd step, so that the elements of a matrix are not all from a few of its columns.
    step = max(1, len(flat) // _SAMPLES) | 1
    return flat[::step].to("cpu", torch.float32)


def _files(folder: Path) -> Iterator[tuple[str, int, str]]:
    """The weight files of a folder: name, size, and a digest of some pieces of each, evenly spread."""
    for path in sorted(folder.glob("*.safetensors")):
        size, digest = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for index in range(_PIECES):
                file.seek(index * max(0, size - _PIECE) // _PIECES)
                digest.update(file.read(_PIECE))
        yield path.name, size, digest.hexdigest()[:16]


def stored_tensors(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ordinary tensors that hold a weight: itself, or those inside of a wrapper (torchao's quantised weights)."""
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        yield weight.detach()
        return
    names, _ = flatten()
    for part in (getattr(weight, name) for name in names):
        if isinstance(part, torch.Tensor):  # a weight that processes share also names their mesh
            yield from stored_tensors(part)


def stored_bytes(weight: torch.Tensor) -> int:
    """What a weight takes, in bytes."""
    return sum(tensor.nbytes for tensor in stored_tensors(weight))
