"""The entry point through transformers: ``model.generate(..., custom_generate=selfspec.custom_generate)``."""

import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, overload

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError, InvalidPromptError
from selfspec.hf.padding import PaddedRow, processors_of, split_rows
from selfspec.methods.base import Method
from selfspec.methods.registry import DEFAULT_METHOD, find_method
from selfspec.model.adapters import check_call
from selfspec.model.families import find_family
from selfspec.types import SamplingParams

_CACHES = ("cache", "past_key_values", "cache_params")
"""What ``generate`` calls a cache: the first since transformers 5.24, the others before."""
_KNOWN_MODEL_ARGUMENTS = {"attention_mask", "cache_position", "logits_to_keep", "position_ids"}
_KEPT_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_INSTEAD = {
    "prompt_lookup_num_tokens": "custom_generate('prompt-lookup')",
    "assistant_early_exit": "custom_generate('layerskip', {'exit_layer': N})",
    "use_mtp": "custom_generate('mtp')",
}
"""By an argument with which ``generate`` drafts itself, how to draft that way here."""

_SAMPLING: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""Processors that are parameters of ours, with the names here and there, in the order in which ours work."""

_KEPT_LOOP = "_selfspec_custom_generate"
"""The attribute of a model that holds its loop of the default method."""


@overload
def custom_generate(
    method: str | type[Method] = DEFAULT_METHOD, settings: Mapping[str, Any] | None = None, *, seed: int | None = None
) -> "CustomGenerate": ...


@overload
def custom_generate(
    model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any
) -> GenerateDecoderOnlyOutput | torch.Tensor: ...


def custom_generate(*arguments: Any, **options: Any) -> Any:  # noqa: D417 - the arguments of the overloads
    """A decoding loop for ``transformers``' ``generate``, itself or made by a call.

    ``model.generate(..., custom_generate=custom_generate)`` drafts with the default method, ``"auto"``, which takes
    what is fastest for this model, machine and text. ``custom_generate=custom_generate("uniform", {...})`` drafts with
    another method. ``generate`` prepares prompt, processors and criteria as always and hands them over; the
    drafts then give the same tokens. ``CustomGenerate`` says what holds for batches.

    What is built for a model lasts from call to call. Without a call of ``custom_generate`` it is kept in an attribute
    of the model itself, so that it is freed together with the model.

    Args:
        method: the name of a method, or a class of your own.
        settings: values of its settings by name.
        seed: with ``do_sample=True``, makes the text depend on this seed alone (coupled sampling); without one,
            sampling draws from torch's global generator, as ``generate`` does.
        model: instead of all these the model, where ``generate`` makes the call.
        input_ids: the prompts, from ``generate``.
        **prepared: the rest of what ``generate`` prepared.

    Returns:
        What to pass as ``custom_generate``; prompt and output where ``generate`` makes the call.

    Raises:
        UnknownMethodError: there is no such method.
        InvalidSettingError: a setting is unknown, of the wrong type or out of range.
        InvalidParameterError: the seed is not a whole number.
    """
    first = arguments[0] if arguments else options.get("model")
    if not isinstance(first, PreTrainedModel):
        return CustomGenerate(*arguments, **options)
    # A dictionary with weak keys would keep every model alive: its engine, the value, holds the model.
    loop = vars(first).setdefault(_KEPT_LOOP, CustomGenerate())
    return loop(*arguments, **options)


class CustomGenerate:
    """The callable that ``custom_generate`` makes. It may be used from several threads, and for several models in turn.

    Rows of a batch are generated together, without their padding, which has to be at the left. Each row
    gives what ``generate`` gives for it alone; rows that end early are filled with the pad token at the right.
    Processors and stopping criteria see a row as ``[1, length]`` ids without padding. ``max_length`` and ``min_length``
    count the padding, as in ``generate``; ``max_new_tokens`` and ``min_new_tokens`` do not. ``max_time`` is the time of
    all rows together.

    With a seed, every row is what it is alone with this seed. Of several outputs for one prompt
    (``num_return_sequences``) output ``k`` has the seed ``seed + k``.

    An ``assistant_model`` is refused, and so is what makes ``generate`` draft by itself (``prompt_lookup_num_tokens``,
    ``assistant_early_exit``, ``use_mtp``) or choose otherwise (``dola_layers``, ``penalty_alpha``). What only tunes
    such drafts (``num_assistant_tokens``, ``assistant_confidence_threshold``) changes nothing, as in ``generate``
    without them. Adapters of layers are a part of the model; ``model.adapters`` says what is refused.

    Stop strings reach it as a criterion only if they are passed as one: ``generate`` does not pass its ``tokenizer`` on
    to a callable, and refuses ``stop_strings`` for that reason. Give a ``StopStringCriteria`` among the
    ``stopping_criteria`` instead.

    Its arguments are those of ``custom_generate``.
    """

    def __init__(
        self,
        method: str | type[Method] = DEFAULT_METHOD,
        settings: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        chosen = find_method(method)
        chosen.Settings.parse(chosen.name, settings or {})
        SamplingParams(seed=seed)  # checks it
        self._method = method
        self._settings = dict(settings or {})
        self._seed = seed
        self._engine: Engine | None = None
        self._placed: tuple[torch.dtype, torch.device] | None = None
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
        """Writes the output; called by ``generate`` with what it prepared.

        Returns:
            Prompt and output, long ``[batch, padded prompt + longest output]``, or an object that holds them, as the
            configuration asks.

        Raises:
            SelfSpecError: something was asked for that drafting with the model's own layers cannot give.
        """
        find_family(model.config)  # refuses an encoder-decoder model, which is called with other arguments
        check_call(model)
        streamer = _streamer_of_caller(model)
        _check_config(generation_config, len(input_ids), streamer)
        _check_model_arguments(model_kwargs)
        rows = split_rows(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        params = _parameters(input_ids, logits_processor, stopping_criteria, generation_config)
        copies = generation_config.num_return_sequences or 1
        requests = [(row.token_ids, self._for_row(row, params, copies)) for row in rows]
        engine = self._engine_for(model)
        if streamer is None:
            results = engine.generate_each(requests, name="row")
        else:
            (request,) = requests  # `_check_config` refused a batch
            stream = engine.stream(*request)
            for piece in stream:
                streamer.put(torch.tensor([piece.token_id]))
            streamer.end()
            results = [stream.result]
        outputs = [list(result.token_ids) for result in results]
        sequences = torch.cat([input_ids, _pad(outputs, generation_config, input_ids)], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what is pickled, has method, settings and seed, and makes its own engine."""
        return partial(CustomGenerate, self._method, self._settings, seed=self._seed), ()

    def _engine_for(self, model: PreTrainedModel) -> Engine:
        with self._lock:
            placed = model.dtype, model.device  # for which a method has planned
            if self._engine is None or self._engine.target.model is not model or self._placed != placed:
                self._engine, self._placed = Engine(model, None, self._method, settings=self._settings), placed
            return self._engine

    def _for_row(self, row: PaddedRow, params: SamplingParams, copies: int) -> SamplingParams:
        seed = None if self._seed is None else self._seed + row.index % copies
        return replace(params, seed=seed, logits_processors=processors_of(row, params.logits_processors))


def _parameters(
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> SamplingParams:
    """The prepared arguments as our parameters; where there are other processors, all stay processors."""
    own = MaxLengthCriteria, EosTokenCriteria
    sampling = _sampling_of(processors)
    if sampling is None:
        sampling = {}
    else:
        processors = LogitsProcessorList()
    sampling = {"temperature": 1.0} | sampling if config.do_sample else sampling | {"temperature": 0.0}
    lengths = [criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
    ends = [criterion.eos_token_id for criterion in stopping_criteria if type(criterion) is EosTokenCriteria]
    return SamplingParams(
        max_new_tokens=max(1, min(lengths, default=config.max_length) - input_ids.shape[1]),
        **sampling,
        ignore_eos=True,
        stop_token_ids=tuple(token_id for ids in ends for token_id in ids.tolist() if token_id >= 0),
        logits_processors=tuple(processors),
        stopping_criteria=tuple(criterion for criterion in stopping_criteria if type(criterion) not in own),
    )


def _sampling_of(processors: LogitsProcessorList) -> dict[str, Any] | None:
    """All processors as parameters; ``None`` where there are others, or they come in another order."""
    places = [list(_SAMPLING).index(type(each)) for each in processors if type(each) in _SAMPLING]
    keep_more = any(getattr(each, "min_tokens_to_keep", 1) != 1 for each in processors)
    fill = any(getattr(each, "filter_value", -torch.inf) != -torch.inf for each in processors)
    ignores = any(getattr(each, "prompt_ignore_length", None) is not None for each in processors)
    if len(places) < len(processors) or places != sorted(set(places)) or keep_more or fill or ignores:
        return None
    names = [_SAMPLING[type(each)] for each in processors]
    return {ours: getattr(each, theirs) for (ours, theirs), each in zip(names, processors, strict=True)}


def _pad(outputs: list[list[int]], config: GenerationConfig, like: torch.Tensor) -> torch.Tensor:
    """The rows' outputs side by side; the shorter ones end in padding, as in ``generate``."""
    width = max(len(output) for output in outputs)
    eos = config.eos_token_id
    fill = config.pad_token_id
    if fill is None:  # the rest is what `generate` chooses then
        fill = eos if isinstance(eos, int) else next(iter(eos or ()), 0)
    return torch.tensor([output + [fill] * (width - len(output)) for output in outputs], device=like.device)


def _check_config(config: GenerationConfig, batch: int, streamer: Any) -> None:
    if (config.num_beams or 1) > 1:
        raise InvalidParameterError(f"num_beams={config.num_beams}: drafts are verified for one beam; use num_beams=1")
    for name, instead in _INSTEAD.items():
        if getattr(config, name, None):
            raise InvalidParameterError(
                f"{name} lets generate draft itself; leave it out, or use {instead} for such drafts"
            )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InvalidParameterError(
            f"{mode.value} is another way to choose tokens; drafts are for greedy and sampled text"
        )
    for name in _KEPT_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise InvalidParameterError(f"{name}=True: only the sequences are kept; run generate without it")
    if streamer is not None and batch > 1:
        raise InvalidParameterError(f"a streamer takes one sequence, not a batch of {batch}")


def _check_model_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuses what would change the model's forward; what ``generate`` itself adds is redundant or read elsewhere."""
    for name in _CACHES:
        if (cache := arguments.get(name)) is not None and _is_filled(cache):
            raise InvalidPromptError(f"{name}: the cache is filled; give the whole prompt and no cache")
    for name, value in arguments.items():
        if name not in (*_CACHES, *_KNOWN_MODEL_ARGUMENTS) and name != "use_cache" and value is not None:
            raise InvalidParameterError(f"the argument {name} is not supported with custom_generate")


def _is_filled(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # of a cache that keeps states alone
        return bool(cache.has_previous_state())


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
