"""Identifies a model by its shape, its dtype and a digest of its weights."""

import hashlib
from typing import Any

import torch

from selfspec.model.stored import stored_tensors
from selfspec.runtimes.target import Target

_SAMPLES = 1024


def fingerprint(target: Target) -> dict[str, Any]:
    """The identity of a model, for state files and latency profiles.

    The digest reads up to 1,024 elements of every weight, evenly spread. That distinguishes checkpoints of the same
    architecture, fine-tuned versions included, and takes far less time than loading them. It does not depend on the
    device.

    Args:
        target: the model.

    Returns:
        ``family``, ``layers``, ``hidden_size``, ``vocabulary``, ``dtype`` and ``weights``, a hexadecimal digest.
    """
    digest = hashlib.sha256()
    for weight in target.model.parameters():
        for tensor in stored_tensors(weight):
            digest.update(str(list(tensor.shape)).encode())
            digest.update(_sample(tensor).numpy().tobytes())
    return {
        "family": target.config.model_type,
        "layers": target.layer_count,
        "hidden_size": target.hidden_size,
        "vocabulary": target.vocab_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": digest.hexdigest()[:16],
    }


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Some elements of a weight, float32 ``[n]`` on the CPU, which holds every smaller dtype exactly."""
    flat = weight.flatten()
    # An odd step, so that the elements of a matrix are not all from a few of its columns.
    step = max(1, len(flat) // _SAMPLES) | 1
    return flat[::step].to("cpu", torch.float32)
