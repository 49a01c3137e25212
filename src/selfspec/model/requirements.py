"""Checks that a model has the modules that its family's row names, before anything runs."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.model.families import Branch, Family

_DECODER = ("model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb")


def check_decoder(model: PreTrainedModel, family: Family) -> None:
    """Refuses a model that lacks a module outside its layers."""
    _require(model, _DECODER, f"this {family.name} model", family)


def check_layer(layer: nn.Module, index: int, family: Family) -> None:
    """Refuses a layer that lacks a module which its family's row names.

    The linear layers of a module are checked only if it is of the family's own class: another one (a mixture of
    experts, a quantised or a user's own module) is called as it is.
    """
    for branch in (family.attention, family.mlp):
        _require(layer, _names(layer, branch, family), f"layer {index} of this {family.name} model", family)


def check_activations(model: PreTrainedModel) -> None:
    """Refuses a model that quantises the inputs of its layers, not only their weights.

    A scale that several rows share makes the rows of a verification depend on each other. Even with a scale for each
    row, rounding to few integers turns differences in the last bit into differences that change a text. Layers are
    recognised by their names in torchao and bitsandbytes, so that neither package is needed.
    """
    for name, module in model.named_modules():
        kind = _activation_quantiser(module)
        if kind is not None:
            raise UnsupportedModelError(
                f"layer '{name}' quantises its inputs while the model runs ({kind}), so that a row can depend on the "
                "rows verified with it; quantise the weights only (torchao's weight-only configurations, "
                "bitsandbytes' 4 bits), or load the model unquantised with weights='int8'"
            )


def _activation_quantiser(module: nn.Module) -> str | None:
    """What quantises the inputs of a module; ``None`` where nothing does."""
    kind = type(module)
    if kind.__name__ == "Linear8bitLt":
        return "bitsandbytes' Linear8bitLt"
    if kind.__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return f"torch's dynamic {kind.__name__}"
    weight = vars(module)["_parameters"].get("weight")
    attributes = ("act_quant_kwargs", "activation_quantization", "input_quant_func")  # torchao's, old and new
    quantises = any(getattr(weight, attribute, None) is not None for attribute in attributes)
    return f"torchao's {type(weight).__name__}" if quantises else None


def _names(layer: nn.Module, branch: Branch, family: Family) -> list[str]:
    names = [name for name in (branch.module, branch.norm_before, branch.norm_after) if name is not None]
    if family.owns(getattr(layer, branch.module, None), branch):
        names += [f"{branch.module}.{part}" for part in branch.parts]
    return names


def _require(root: nn.Module, names: Iterable[str], owner: str, family: Family) -> None:
    missing = [name for name in names if _find(root, name) is None]
    if missing:
        raise UnsupportedModelError(
            f"{owner} has no module '{missing[0]}', which {family.name} models of transformers have; "
            "load the model with AutoModelForCausalLM and leave its modules in their places"
        )


def _find(root: Any, name: str) -> Any:
    for part in name.split("."):
        root = getattr(root, part, None)
    return root
