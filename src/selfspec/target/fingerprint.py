"""What tells a model apart from others: its shape, its dtype and a digest of its weights."""

import hashlib
from typing import Any

import torch

from selfspec.target.stack import Target

_SAMPLES = 16


def fingerprint(target: Target) -> dict[str, Any]:
    """What a state file is bound to.

    The digest reads a few elements of every sublayer's weights: enough to tell checkpoints of one architecture apart,
    little enough to cost nothing.

    Returns:
        ``family``, ``layers``, ``hidden_size``, ``vocabulary``, ``dtype`` and ``weights``, a hexadecimal digest.
    """
    digest = hashlib.sha256()
    for sublayer in target.sublayers:
        for parameter in sublayer.parameters():
            flat = parameter.detach().flatten()
            stride = max(1, len(flat) // _SAMPLES)
            digest.update(flat[::stride][:_SAMPLES].to("cpu", torch.float32).numpy().tobytes())
    return {
        "family": target.config.model_type,
        "layers": target.layer_count,
        "hidden_size": target.hidden_size,
        "vocabulary": target.vocab_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": digest.hexdigest()[:16],
    }
