"""What ``model.generate(custom_generate=..., trust_remote_code=True)`` runs from this repository."""

from collections.abc import Mapping
from typing import Any

from selfspec import custom_generate

_LOOPS = "_selfspec_hub_loops"
"""The attribute of a model that holds its decoding loops, so that each is built once and freed with the model."""


def generate(
    model: Any,
    *,
    method: str = "auto",
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    **arguments: Any,
) -> Any:
    """Generates the text of ``model.generate``, faster.

    Args:
        model: the model, from ``generate``.
        method: what drafts, one of ``selfspec methods``; ``auto`` takes what is fastest.
        settings: values of the method's settings by name.
        seed: with ``do_sample=True``, makes the text depend on this seed alone.
        **arguments: those of ``generate``.

    Returns:
        What ``generate`` returns.
    """
    loops = vars(model).setdefault(_LOOPS, {})
    key = (method, repr(settings), seed)
    if key not in loops:
        loops[key] = custom_generate(method, settings, seed=seed)
    return model.generate(**arguments, custom_generate=loops[key])
