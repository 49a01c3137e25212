"""The door through transformers: ``model.generate(..., custom_generate=selfspec.custom_generate("layerskip"))``."""

import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError, InvalidPromptError
from selfspec.methods.registry import find_method
from selfspec.methods.settings import parse_settings
from selfspec.types import SamplingParams

_KNOWN_MODEL_ARGUMENTS = {"attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids"}
_KEPT_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def custom_generate(
    method: str, settings: Mapping[str, Any] | None = None, *, seed: int | None = None
) -> "CustomGenerate":
    """A decoding loop for ``transformers``' ``generate``.

    ``generate`` prepares prompt, processors and criteria as always and hands them over; the method's drafts then make
    the same tokens. What the method learns lasts from call to call. Rows of a batch are written one after the other.

    Args:
        method: the name of a method.
        settings: values of its settings by name.
        seed: with ``do_sample=True``, makes the text depend on this seed alone (coupled sampling); without one,
            sampling draws from torch's global generator, as ``generate`` does.

    Returns:
        What to pass as ``custom_generate``.

    Raises:
        UnknownMethodError: there is no such method.
        InvalidSettingError: a setting is unknown, of the wrong type or out of range.
    """
    parse_settings(find_method(method).Settings, method, settings or {})
    return CustomGenerate(method, settings, seed)


class CustomGenerate:
    """The callable that ``custom_generate`` makes. It may be used from several threads, and for several models in turn.

    Stop strings reach it as a criterion only if they are passed as one: ``generate`` does not pass its ``tokenizer`` on
    to a callable, and refuses ``stop_strings`` for that reason. Give a ``StopStringCriteria`` among the
    ``stopping_criteria`` instead.
    """

    def __init__(self, method: str, settings: Mapping[str, Any] | None, seed: int | None) -> None:
        self._method = method
        self._settings = settings
        self._seed = seed
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Writes the output; called by ``generate``.

        Args:
            model: the model.
            input_ids: long ``[batch, prompt]``.
            logits_processor: the processors that ``generate`` prepared.
            stopping_criteria: the criteria that it prepared.
            generation_config: the prepared configuration.
            **model_kwargs: further arguments of the model's forward.

        Returns:
            Prompt and output, long ``[batch, length]``, or an object that holds them, as the configuration asks.

        Raises:
            SelfSpecError: something was asked for that drafting with the model's own layers cannot give.
        """
        streamer = _streamer_of_caller(model)
        _check_config(generation_config, len(input_ids), streamer)
        _check_model_arguments(model_kwargs, input_ids)
        engine = self._engine_for(model)
        params = self._parameters(input_ids, logits_processor, stopping_criteria, generation_config)
        outputs = []
        for prompt in input_ids:
            stream = engine.stream(prompt, params)
            for piece in stream:
                if streamer is not None:
                    streamer.put(torch.tensor([piece.token_id]))
            outputs.append(list(stream.result.token_ids))
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, _pad(outputs, generation_config, input_ids)], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _engine_for(self, model: PreTrainedModel) -> Engine:
        with self._lock:
            if self._engine is None or self._engine.target.model is not model:
                self._engine = Engine(model, None, self._method, settings=self._settings)
            return self._engine

    def _parameters(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
    ) -> SamplingParams:
        """The prepared arguments in our words. Temperature and the like are among the processors already."""
        own = (MaxLengthCriteria, EosTokenCriteria)
        eos = generation_config.eos_token_id
        eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return SamplingParams(
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            temperature=1.0 if generation_config.do_sample else 0.0,
            seed=self._seed,
            ignore_eos=True,
            stop_token_ids=tuple(eos_ids),
            logits_processors=tuple(logits_processor),
            stopping_criteria=tuple(criterion for criterion in stopping_criteria if not isinstance(criterion, own)),
        )


def _pad(outputs: list[list[int]], config: GenerationConfig, like: torch.Tensor) -> torch.Tensor:
    """The rows' outputs side by side; the shorter ones end in padding, as in ``generate``."""
    width = max(len(output) for output in outputs)
    fill = config.pad_token_id if config.pad_token_id is not None else 0
    return torch.tensor([output + [fill] * (width - len(output)) for output in outputs], device=like.device)


def _check_config(config: GenerationConfig, batch: int, streamer: Any) -> None:
    if (config.num_beams or 1) > 1:
        raise InvalidParameterError(f"num_beams={config.num_beams}: drafts are verified for one beam; use num_beams=1")
    for name in _KEPT_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise InvalidParameterError(f"{name}=True: only the sequences are kept; run generate without it")
    if streamer is not None and batch > 1:
        raise InvalidParameterError(f"a streamer takes one sequence, not a batch of {batch}")


def _check_model_arguments(arguments: Mapping[str, Any], input_ids: torch.Tensor) -> None:
    """Refuses what would change the model's forward; what ``generate`` itself adds for a plain prompt is redundant."""
    mask, positions, cache = (arguments.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    if mask is not None and not bool((mask == 1).all()):
        raise InvalidPromptError("the prompts are padded; call generate for each prompt alone, without padding")
    if positions is not None:
        expected = torch.arange(input_ids.shape[1], device=positions.device)
        if positions.shape[-1] != len(expected) or not bool((positions == expected).all()):
            raise InvalidPromptError("position_ids must count from 0; leave them out")
    if cache is not None and cache.get_seq_length() > 0:
        raise InvalidPromptError("past_key_values are filled; give the whole prompt and no cache")
    for name, value in arguments.items():
        if name not in _KNOWN_MODEL_ARGUMENTS and name != "use_cache" and value is not None:
            raise InvalidParameterError(f"the argument {name} is not supported with custom_generate")


def _streamer_of_caller(model: PreTrainedModel) -> Any:
    """The ``streamer`` that ``generate`` was called with, which it does not pass on to a callable.

    ``generate`` keeps it in a local variable (and has put the prompt into it), so that is where it is read.

    Raises:
        InvalidParameterError: ``generate`` was given an ``assistant_model``, which would be silently ignored.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        given = frame.f_locals
        if frame.f_code.co_name == "generate" and given.get("self") is model:
            if given.get("assistant_model") is not None:
                raise InvalidParameterError("an assistant_model drafts instead of the model's own layers; leave it out")
            return given.get("streamer")
        frame = frame.f_back
    return None
