"""From the fields of a request to ``SamplingParams``, within the limits of the server."""

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.serve.api_errors import ApiError, as_api_error
from selfspec.serve.requests import ChatRequest, CompletionRequest, ResponseFormat, Sampled
from selfspec.types import SamplingParams

FIELDS = {
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format.json_schema.schema",
    "prompt_logprobs": "logprobs",
}
"""The request's names of parameters that the library calls otherwise."""

COMPLETION_TOKENS = 16
"""New tokens of a completion where the request names no number, as in OpenAI's API."""

ANY_OBJECT = {"type": "object"}
"""The schema of any JSON object."""

_AS_THEY_ARE = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens")


@dataclass(frozen=True)
class RequestLimits:
    """The largest request that is taken.

    Attributes:
        body_bytes: bytes of a request's body.
        prompt_tokens: tokens of a prompt; ``None`` for what fits the model's context.
        new_tokens: tokens of an answer; ``None`` for what fits.
        default_new_tokens: tokens of a chat's answer where the request names no number, if they fit.
        choices: choices of one request: prompts times ``n``.
        body_seconds: time for a client to send a body.
    """

    body_bytes: int = 4 * 2**20
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    default_new_tokens: int = 1024
    choices: int = 128
    body_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise InvalidParameterError(f"{field.name} must be above 0, not {value}")


def to_params(request: Sampled, prompt_length: int, context: int, limits: RequestLimits) -> SamplingParams:
    """The parameters of a request for one of its prompts.

    Raises:
        ApiError: a value is out of range, or prompt and answer do not fit the context or the limits.
    """
    _check_length(request, prompt_length, limits)
    values: dict[str, Any] = {name: getattr(request, name) for name in _AS_THEY_ARE}
    values["temperature"] = 1.0 if request.temperature is None else request.temperature
    values["top_k"] = None if request.top_k is None else max(0, request.top_k)
    values["stop"] = stop_strings(request) or None
    values["stop_token_ids"] = tuple(request.stop_token_ids or ()) or None
    values["ignore_eos"] = request.ignore_eos or None
    values["logit_bias"] = {int(key): bias for key, bias in (request.logit_bias or {}).items()} or None
    values["json_schema"] = schema_of(request.response_format)
    values["max_new_tokens"] = _new_tokens(request, prompt_length, context, limits)
    values["logprobs"] = asked_logprobs(request)
    values["prompt_logprobs"] = values["logprobs"] if isinstance(request, CompletionRequest) and request.echo else None
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return SamplingParams(**given)
    except SelfSpecError as error:
        raise as_api_error(error, FIELDS) from error


def choices_of(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of each of ``n`` choices: a seed is counted up, so that they differ."""
    if params.seed is None:
        return [params] * n
    return [replace(params, seed=params.seed + index) for index in range(n)]


def count_choices(request: Sampled, prompts: int, limits: RequestLimits) -> int:
    """The number of choices of each prompt, if they are not too many."""
    n = request.n or 1
    if n * prompts > limits.choices:
        raise ApiError(
            400,
            f"{prompts} prompts with {n} choices each are more than the {limits.choices} that this server takes in a "
            "request; send several requests",
            param="n" if n > 1 else "prompt",
            code="too_many_choices",
        )
    return n


def check_completion(request: CompletionRequest) -> None:
    """Refuses ``best_of``, ``suffix``, and streams that would have to begin with what is known at their ends."""
    if request.echo and request.stream and request.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported in a stream; leave stream out", param="echo")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(
            400,
            "best_of is not supported: it would write texts only to drop them; ask for n choices and compare them",
            param="best_of",
            code="unsupported_parameter",
        )
    if request.suffix:
        raise ApiError(400, "suffix is not supported: text is only continued", param="suffix")


def stop_strings(request: Sampled) -> tuple[str, ...]:
    """The stop strings of a request."""
    stop = request.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def schema_of(response_format: ResponseFormat | None) -> str | None:
    """The JSON schema that a text has to follow; ``None`` for any text."""
    if response_format is None or response_format.type == "text":
        return None
    given = response_format.json_schema
    return json.dumps(ANY_OBJECT if given is None else given.schema_)


def asked_logprobs(request: Sampled) -> int | None:
    """The number of alternatives to report with each token; ``None`` for no log-probabilities."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs


def _check_length(request: Sampled, prompt_length: int, limits: RequestLimits) -> None:
    if limits.prompt_tokens is not None and prompt_length > limits.prompt_tokens:
        raise ApiError(
            400,
            f"the prompt has {prompt_length} tokens, and this server takes {limits.prompt_tokens}; shorten it",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )


def _new_tokens(request: Sampled, prompt_length: int, context: int, limits: RequestLimits) -> int:
    chat = isinstance(request, ChatRequest)
    asked, field = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked, field = request.max_completion_tokens, "max_completion_tokens"
    room = context - prompt_length
    if room < (0 if asked == 0 else 1):
        raise ApiError(
            400,
            f"the prompt has {prompt_length} tokens, and the model's context of {context} leaves no room for an "
            "answer; shorten it",
            param="messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    if asked is None:
        return min(room, limits.default_new_tokens if chat else COMPLETION_TOKENS, limits.new_tokens or room)
    if asked == 0 and not (isinstance(request, CompletionRequest) and request.echo):
        raise ApiError(400, f"{field} must be at least 1; 0 is for completions with echo", param=field)
    if limits.new_tokens is not None and asked > limits.new_tokens:
        raise ApiError(400, f"{field} is {asked}, and this server writes at most {limits.new_tokens}", param=field)
    if asked > room:
        raise ApiError(
            400,
            f"a prompt of {prompt_length} tokens and {asked} new tokens do not fit the model's context of {context}; "
            f"ask for at most {room}",
            param=field,
            code="context_length_exceeded",
        )
    return asked
