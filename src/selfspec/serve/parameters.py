"""The sampling parameters of a request, within the limits of the server."""

import copy
from collections.abc import Sequence
from typing import Any

from selfspec.serve.api_errors import ApiError, exceeds_context
from selfspec.serve.capacity import Limits
from selfspec.serve.reader import Prepared, asked_tokens, check_reported
from selfspec.serve.requests import CompletionRequest
from selfspec.serve.served_engine import ServedEngine
from selfspec.types import SamplingParams

_SHARE, _FEW = 0.25, 1024
"""An answer whose request names no number of tokens has room for as many as this share of the memory for keys and
values holds, or for ``_FEW``, if all of it does: that much is kept free for the request admitted first."""

_AS_THEY_ARE = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens")


def to_params(prepared: Prepared, engine: ServedEngine, limits: Limits, adapter: str | None) -> list[SamplingParams]:
    """The parameters of a request for each of its prompts. All but the number of new tokens is checked once.

    Raises:
        ApiError: prompt and answer do not fit the context or the limits.
        InvalidParameterError: a value is out of range.
    """
    counts = [_new_tokens(prepared, len(prompt), engine, limits) for prompt in prepared.prompts]
    least = _params(prepared, min(counts), adapter)
    return [least if count == least.max_new_tokens else _with(least, "max_new_tokens", count) for count in counts]


def _params(prepared: Prepared, new_tokens: int, adapter: str | None) -> SamplingParams:
    request = prepared.request
    values: dict[str, Any] = {name: getattr(request, name) for name in _AS_THEY_ARE}
    values["max_new_tokens"] = new_tokens
    values["temperature"] = 1.0 if request.temperature is None else request.temperature
    values["top_k"] = None if request.top_k is None else max(0, request.top_k)
    values["stop"] = request.stop_strings or None
    values["stop_token_ids"] = tuple(request.stop_token_ids or ()) or None
    values["ignore_eos"] = request.ignore_eos or None
    values["logit_bias"] = {int(key): bias for key, bias in (request.logit_bias or {}).items()} or None
    if prepared.constraint is not None:
        values[prepared.constraint.kind] = prepared.constraint.text
    values["adapter"] = adapter
    values["logprobs"] = request.alternatives
    values["prompt_logprobs"] = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def check_logprobs(params: Sequence[SamplingParams], prompt_lengths: Sequence[int], limits: Limits) -> None:
    """Counts the log-probabilities that a request would report: see ``check_reported``."""
    reported = 0
    for each, length in zip(params, prompt_lengths, strict=True):
        reported += 0 if each.logprobs is None else each.max_new_tokens * (1 + each.logprobs)
        reported += 0 if each.prompt_logprobs is None else length * (1 + each.prompt_logprobs)
    check_reported(reported, limits)


def choices_of(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of each of ``n`` choices: a seed is counted up, so that they differ."""
    if params.seed is None:
        return [params] * n
    return [_with(params, "seed", params.seed + index) for index in range(n)]


def _with(params: SamplingParams, name: str, value: int) -> SamplingParams:
    """A copy with another value; not ``replace``, which would check again what is checked already."""
    other = copy.copy(params)
    object.__setattr__(other, name, value)
    return other


def _new_tokens(prepared: Prepared, prompt_length: int, engine: ServedEngine, limits: Limits) -> int:
    """The number of new tokens, if prompt and answer fit."""
    request, context = prepared.request, engine.context
    asked, field = asked_tokens(request)
    room = context - prompt_length
    if asked is None:
        return _usual_tokens(prepared, prompt_length, engine, limits)
    if asked == 0 and not (isinstance(request, CompletionRequest) and request.echo):
        raise ApiError(400, f"{field} must be at least 1; 0 is for completions with echo", param=field)
    if limits.max_new_tokens is not None and asked > limits.max_new_tokens:
        raise ApiError(400, f"{field} is {asked}, and this server writes at most {limits.max_new_tokens}", param=field)
    if asked > room:
        said = prepared.names.get(field, field)
        raise exceeds_context(
            f"input length and `{said}` exceed context limit: {prompt_length} + {asked} > {context}, decrease input "
            f"length or `{said}` and try again; the maximum context length is {context} tokens",
            field,
        )
    return asked


def _usual_tokens(prepared: Prepared, prompt_length: int, engine: ServedEngine, limits: Limits) -> int:
    """The number of new tokens where the request names none: what is left, or what its interface has then."""
    queue, request = engine.queue, prepared.request
    room = queue.room(prompt_length)
    chosen = prepared.usual_tokens or limits.default_new_tokens
    most = [room, chosen] if chosen else [max(queue.room(prompt_length, _SHARE), min(room, _FEW))]
    if limits.max_new_tokens is not None:
        most.append(limits.max_new_tokens)
    if request.alternatives is not None:
        answers = prepared.choices * len(prepared.prompts)
        most.append(limits.max_logprobs // (answers * (1 + request.alternatives)))
    return max(1, min(most))
