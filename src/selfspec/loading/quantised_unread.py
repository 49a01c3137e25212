"""Quantised checkpoints that nothing would read right: their scales would be left out, and the text be noise."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from selfspec.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWN = frozenset({"gptq", "awq", "bitsandbytes", "mxfp4", "compressed-tensors"})
"""What selfspec reads itself, whatever the version of transformers knows."""

_SCALES = frozenset({"weight_scale", "weight_scale_2", "weight_scale_inv", "scales", "SCB"})
"""Last names of tensors that a weight is multiplied by, or divided."""

_REMEDY = "take the original model, a GGUF file of it, or one that GPTQ, AWQ or compressed-tensors quantised"


def refuse_unknown_method(content: Mapping[str, Any], source: str) -> None:
    """Refuses a checkpoint of a method that neither transformers nor selfspec knows; transformers would skip it.

    Args:
        content: that of its ``config.json``.
        source: its folder, or its name on the hub.

    Raises:
        UnsupportedModelError: the method is not known.
    """
    text = content.get("text_config")
    own = content.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not isinstance(own, dict) or own.get("load_in_8bit") or own.get("load_in_4bit"):  # which are bitsandbytes'
        return
    method = own.get("quant_method")
    if method is None or method in _OWN:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # which imports all of them

    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"the weights of '{source}' were quantised by '{str(method)[:40]}', which is not supported; {_REMEDY}"
        )


def refuse_unread_scales(
    model: "PreTrainedModel", config: PreTrainedConfig, unexpected: Iterable[str], source: str
) -> None:
    """Refuses a checkpoint whose config does not say that it is quantised, by scales that stand beside weights.

    Args:
        model: as transformers has loaded it.
        config: that of the checkpoint.
        unexpected: the names of tensors that it did not use.
        source: the folder of the checkpoint, or its name on the hub.

    Raises:
        UnsupportedModelError: there is such a scale.
    """
    if any(getattr(each, "quantization_config", None) for each in (config, config.get_text_config(decoder=True))):
        return  # what reads that knows its scales
    modules = {path for path, _ in model.named_modules()}
    for name in sorted(unexpected):
        path, _, kind = name.rpartition(".")
        experts, is_expert, _ = path.partition(".experts.")
        if kind in _SCALES and (f"{experts}.experts" if is_expert else path) in modules:
            raise UnsupportedModelError(
                f"the weights of '{source}' are quantised, but its config.json does not say how, so that nothing reads "
                f"{name[:80]}; {_REMEDY}"
            )
