"""The peers: what transformers itself offers to write the same output with the same weights."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers import PreTrainedModel

from selfspec.bench.baseline import TimedOutput, generate_timed
from selfspec.bench.options import EXIT_SHARE
from selfspec.errors import InvalidParameterError
from selfspec.methods.settings import suggest

PEERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "transformers": lambda layers: {},
    "transformers-early-exit": lambda layers: {"assistant_early_exit": max(1, int(layers * EXIT_SHARE))},
    "transformers-prompt-lookup": lambda layers: {"prompt_lookup_num_tokens": 10},
}
"""By name what ``generate`` is told, given the model's number of layers."""


def find_peers(names: Sequence[str]) -> list[str]:
    """The peers of some names, each once; ``all`` is all of them, ``none`` none.

    Raises:
        InvalidParameterError: there is no such peer.
    """
    if "all" in names:
        return list(PEERS)
    for name in names:
        if name not in PEERS and name != "none":
            raise InvalidParameterError(
                f"there is no peer '{name}'{suggest(name, PEERS)}; choose all, none or from {', '.join(PEERS)}"
            )
    return [name for name in dict.fromkeys(names) if name != "none"]


def run_peer(
    name: str,
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    eos_ids: Collection[int],
    temperature: float,
) -> TimedOutput:
    """Lets a peer write an output; see ``generate_timed``."""
    config: Any = model.config
    layers = config.num_hidden_layers
    try:
        return generate_timed(
            model, prompt_ids, max_new_tokens, PEERS[name](layers), eos_ids=eos_ids, temperature=temperature
        )
    finally:
        config.num_hidden_layers = layers  # which early exit lowers, and leaves low where it fails
