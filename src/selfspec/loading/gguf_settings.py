"""The settings of a model in the header of a GGUF file, checked one by one; none is passed over."""

import math
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np

from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.gguf_file import MOST_LAYERS
from selfspec.loading.gguf_header import short

_MOST = 2**31 - 1

_WITHOUT_EFFECT = frozenset(
    {
        "vocab_size",  # the embedding has as many rows
        "tensor_data_layout",
        "rope.scaling.finetuned",
        "use_parallel_residual",  # converters write it wrong; whether there is a norm before the MLP tells it
    }
)
"""Settings that change nothing that is computed, or nothing that tensors do not tell."""

_NEUTRAL: dict[str, frozenset[Any]] = {
    "attention.causal": frozenset({True}),
    "attention.clamp_kqv": frozenset({0}),
    "attention.max_alibi_bias": frozenset({0}),
    "attention.scale": frozenset({0}),
    "attention.sliding_window": frozenset({0}),
    "embedding_scale": frozenset({0, 1}),
    "expert_count": frozenset({0}),
    "expert_gating_func": frozenset({0, 1}),  # not set, softmax
    "expert_group_count": frozenset({0, 1}),
    "expert_group_used_count": frozenset({0, 1}),
    "expert_shared_count": frozenset({0}),
    "expert_shared_feed_forward_length": frozenset({0}),
    "expert_used_count": frozenset({0}),
    "expert_weights_norm": frozenset({True}),
    "expert_weights_scale": frozenset({0, 1}),
    "leading_dense_block_count": frozenset({0}),
    "logit_scale": frozenset({0, 1}),
    "nextn_predict_layers": frozenset({0}),
    "pooling_type": frozenset({0}),
    "residual_scale": frozenset({0, 1}),
    "rope.scaling.yarn_ext_factor": frozenset({1}),
    "rope.scaling.yarn_log_multiplier": frozenset({0}),
}
"""The values of settings at which they change nothing, for families that do not read them."""


class Settings:
    """The keys of a header that begin with the name of its architecture.

    Args:
        metadata: all keys of the header.

    Attributes:
        architecture: what the file names the model's family.

    Raises:
        ModelLoadError: the file does not name its architecture.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise damaged("this GGUF file does not name the family of its model (general.architecture)")
        self.architecture = architecture
        prefix = f"{architecture}."
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._unread = set(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def key(self, name: str) -> str:
        """The whole key of a setting."""
        return f"{self.architecture}.{name}"

    def get(self, name: str) -> Any:
        """The value of a setting as it is in the header; ``None`` if it is not there."""
        self._unread.discard(name)
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, most: int = _MOST) -> int:
        """A whole number of at least 0; required if there is no default. It is the same for all layers."""
        value = self._one(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise damaged(
                f"this GGUF file has {self.key(name)} = {str(value)[:40]}, no whole number from 0 to {most:,}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required if there is no default."""
        value = self._one(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise damaged(f"this GGUF file has {self.key(name)} = {str(value)[:40]}, which is no number")
        return _shortest(float(value))

    def by_layer(self, name: str) -> list[int]:
        """Whole numbers of the layers, one each; truth values are 0 and 1."""
        values = self.get(name)
        is_list = isinstance(values, (list, tuple, np.ndarray)) and len(values) <= MOST_LAYERS
        if not is_list or not all(isinstance(each, (int, np.integer, np.bool_)) for each in values):
            raise damaged(
                f"this GGUF file has {self.key(name)} = {str(values)[:40]}, no list of whole numbers by layer"
            )
        return [int(each) for each in values]

    def largest(self, name: str, default: int | None = None) -> int:
        """The largest of a number's values in the layers."""
        values = self.get(name)
        is_list = isinstance(values, (list, tuple, np.ndarray))
        return max(self.by_layer(name), default=0) if is_list else self.integer(name, default)

    def refuse_unread(self) -> None:
        """Refuses settings that nothing has read and that may change what is computed.

        Raises:
            UnsupportedModelError: there is one; the message names it.
        """
        for name in sorted(self._unread - _WITHOUT_EFFECT):
            value = self._values[name]
            if isinstance(value, (str, Sized)) or value not in _NEUTRAL.get(name, ()):
                raise refused(
                    f"this GGUF file has {short(self.key(name))} = {str(value)[:40]}, a setting that selfspec does not "
                    f"know for '{self.architecture}'"
                )

    def _one(self, name: str, default: float | None) -> Any:
        """The value of a setting, which a list may give for each layer."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise damaged(f"this GGUF file has no {self.key(name)}")
            return default
        if isinstance(value, (list, tuple, np.ndarray)):
            if len(value) > MOST_LAYERS:
                raise damaged(f"this GGUF file has {self.key(name)} of {len(value):,} layers")
            values = set(value.tolist() if isinstance(value, np.ndarray) else value)
            if len(values) != 1:
                raise UnsupportedModelError(
                    f"the layers of this GGUF file differ in {self.key(name)}, which is not supported; take a model "
                    "whose layers are alike"
                )
            return values.pop()
        return value


def _shortest(value: float) -> float:
    """The shortest decimal number with the same float32: 1e-05 is stored as 9.99999974737875e-06."""
    single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def refused(reason: str) -> UnsupportedModelError:
    """The error of a file whose model is not supported as the file has it."""
    return UnsupportedModelError(f"{reason}; take the model's folder or its name on the hub")


def damaged(reason: str) -> ModelLoadError:
    """The error of a file whose header makes no sense."""
    return ModelLoadError(f"{reason}; convert the model again")
