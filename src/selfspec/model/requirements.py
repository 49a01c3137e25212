"""Checks that a model has the modules that its family's row names, before anything runs."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.model.families import Branch, Family

_DECODER = ("model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb")


def check_decoder(model: PreTrainedModel, family: Family) -> None:
    """Refuses a model that lacks a module outside its layers.

    Args:
        model: the model.
        family: the row of its family.

    Raises:
        UnsupportedModelError: it lacks one; the message names it.
    """
    _require(model, _DECODER, f"this {family.name} model", family)


def check_layer(layer: nn.Module, index: int, family: Family) -> None:
    """Refuses a layer that lacks a module which its family's row names.

    What is inside a module counts only where it is of the family's own class: another one (a mixture of experts, a
    quantised or a user's own module) is called as it is.

    Args:
        layer: the decoder layer.
        index: its index, for the message.
        family: the row of its family.

    Raises:
        UnsupportedModelError: it lacks one; the message names it.
    """
    for branch in (family.attention, family.mlp):
        _require(layer, _names(layer, branch, family), f"layer {index} of this {family.name} model", family)


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
