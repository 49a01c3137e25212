"""The other baseline: transformers' own ``generate`` with the same weights."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from selfspec.bench.timing import wait_for

VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "dynamic": dict,
    "static": lambda: {"cache_implementation": "static", "disable_compile": True},
    "compiled": lambda: {"cache_implementation": "static", "compile_config": _compile_everywhere()},
}
"""By name what ``generate`` is told beside length and prompt: nothing, a static cache, one with a compiled step."""

_NO_TOKEN = -1


@dataclass(frozen=True)
class TimedOutput:
    """An output of ``generate``.

    Attributes:
        token_ids: its tokens.
        seconds: from the first token to the last, without the prefill.
    """

    token_ids: tuple[int, ...]
    seconds: float


def generate_timed(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, options: Mapping[str, Any]
) -> TimedOutput:
    """Writes a greedy output of exactly the given length, whatever ends a text for the model.

    Args:
        model: the model.
        prompt_ids: the prompt.
        max_new_tokens: length of the output.
        options: more of the generation config, one of ``VARIANTS``.
    """
    inputs = torch.tensor([list(prompt_ids)], device=model.device)
    first_token = _FirstTokenClock()
    generate: Any = model.generate
    config: Any = GenerationConfig
    output = generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        # An id that no token has: without one ``generate`` falls back on the model's own.
        generation_config=config(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0, **options
        ),
        stopping_criteria=StoppingCriteriaList([first_token]),
    )
    wait_for(model.device)
    return TimedOutput(tuple(output[0, len(prompt_ids) :].tolist()), time.perf_counter() - first_token.seen)


class _FirstTokenClock(StoppingCriteria):
    """Notes when the first token was there, and never stops."""

    def __init__(self) -> None:
        self.seen = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Called by ``generate`` after every token."""
        if not self.seen:
            wait_for(input_ids.device)
            self.seen = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _compile_everywhere() -> CompileConfig:
    """The default configuration, which ``generate`` follows on accelerators only unless it is told otherwise."""
    config: Any = CompileConfig()
    config._compile_all_devices = True
    return config  # type: ignore[no-any-return]
