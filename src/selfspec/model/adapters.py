"""Models that PEFT has adapted: adapters of layers are a part of the target, and what acts elsewhere is refused."""

from functools import partial
from typing import Any

from selfspec.errors import UnsupportedModelError


def unwrapped(model: Any) -> Any:
    """The model inside of a ``PeftModel``, with the adapters in its layers; any other model itself.

    Raises:
        UnsupportedModelError: the active adapter puts tokens of its own before the prompt (prompt and prefix tuning),
            or begins at certain tokens (aLoRA), so that it is no part of the layers.
    """
    if not _is_of_peft(type(model)):
        return model
    active = getattr(model, "active_peft_config", None)
    if getattr(active, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(active).__name__}: this adapter puts tokens of its own before the prompt, and only adapters of "
            "layers (as LoRA) can draft; generate without selfspec"
        )
    if getattr(active, "alora_invocation_tokens", None):
        raise _begins_late()
    return model.get_base_model() if hasattr(model, "get_base_model") else model.model


def check_call(model: Any) -> None:
    """Refuses a call of ``generate`` through PEFT whose adapter is no part of the model's layers.

    PEFT then replaces how inputs are prepared, or hooks the layers for this call alone.

    Raises:
        UnsupportedModelError: see ``unwrapped``; or ``adapter_names`` chooses an adapter for each row.
    """
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", model)
    if owner is not model:
        unwrapped(owner)
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, partial) and _is_of_peft(hook.func):
                if "alora_offsets" in hook.keywords:
                    raise _begins_late()
                raise UnsupportedModelError(
                    "adapter_names chooses an adapter for each row, and the rows of a forward share one here; call "
                    "set_adapter and generate the rows of each adapter by themselves"
                )


def _begins_late() -> UnsupportedModelError:
    return UnsupportedModelError(
        "an aLoRA adapter begins at certain tokens of a prompt, and only adapters of all tokens can draft; generate "
        "without selfspec"
    )


def _is_of_peft(kind: Any) -> bool:
    """Whether a class or function is defined in PEFT."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "peft"
