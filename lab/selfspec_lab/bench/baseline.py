"""Transformers' ``generate`` with the same weights, as a second baseline."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from selfspec_lab.measuring import wait_for

VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "dynamic": dict,
    "static": lambda: {"cache_implementation": "static", "disable_compile": True},
    "compiled": lambda: {"cache_implementation": "static", "compile_config": _compile_everywhere()},
}
"""Options of ``generate`` by variant: none, a static cache, a static cache with a compiled step."""

_NO_TOKEN = -1


@dataclass(frozen=True)
class TimedOutput:
    """An output of ``generate``.

    Attributes:
        token_ids: the output.
        prefill_seconds: time to the first token.
        seconds: time from the first token to the last.
    """

    token_ids: tuple[int, ...]
    prefill_seconds: float
    seconds: float


def generate_timed(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    options: Mapping[str, Any],
    *,
    eos_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> TimedOutput:
    """Generates and times an output.

    If the first step gives several tokens (assisted generation), ``seconds`` is the time of the later tokens, scaled to
    all tokens after the first. So the speed is that of the later steps.

    Args:
        model: the model.
        prompt_ids: the prompt.
        max_new_tokens: longest output.
        options: further options of the generation config, as in ``VARIANTS``.
        eos_ids: tokens that end the output; without any it has exactly ``max_new_tokens``.
        temperature: 0 is greedy; otherwise tokens are sampled with torch's global generator.
        top_p: tokens are sampled from the most probable ones up to this total.
    """
    inputs = torch.tensor([list(prompt_ids)], device=model.device)
    first_step = _FirstStepClock(len(prompt_ids))
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
    sampling = drawn if temperature > 0 else {"do_sample": False}
    generate: Any = model.generate
    config: Any = GenerationConfig
    started = time.perf_counter()
    output = generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        # No token has this id; without an id, ``generate`` would use the model's own.
        generation_config=config(
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(eos_ids) or _NO_TOKEN,
            pad_token_id=0,
            **sampling,
            **options,
        ),
        stopping_criteria=StoppingCriteriaList([first_step]),
    )
    wait_for(model.device)
    seconds = time.perf_counter() - first_step.seen
    token_ids = tuple(output[0, len(prompt_ids) :].tolist())
    later = len(token_ids) - first_step.tokens
    stretched = seconds * (len(token_ids) - 1) / later if later > 0 else seconds
    return TimedOutput(token_ids, first_step.seen - started, stretched)


class _FirstStepClock(StoppingCriteria):
    """Records the end of the first step and its number of tokens; never stops generation."""

    def __init__(self, prompt_length: int) -> None:
        self.seen = 0.0
        self.tokens = 0
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Called by ``generate`` after every step."""
        if not self.seen:
            wait_for(input_ids.device)
            self.seen = time.perf_counter()
            self.tokens = input_ids.shape[1] - self._prompt_length
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _compile_everywhere() -> CompileConfig:
    """The default configuration, extended from accelerators to all devices."""
    config: Any = CompileConfig()
    config._compile_all_devices = True
    return config  # type: ignore[no-any-return]
