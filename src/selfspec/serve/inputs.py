"""From a request to what the engine takes: token ids, and ``SamplingParams`` within the limits of the server."""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from selfspec.decoding.text import TextStream
from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.prompts import PromptEncoder
from selfspec.serve.api_errors import ApiError, as_api_error
from selfspec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    GenerationRequest,
    Message,
    ResponseFormat,
)
from selfspec.serve.tools import TAG
from selfspec.types import SamplingParams

FIELDS = {
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format.json_schema.schema",
    "prompt_logprobs": "logprobs",
}
"""The request's names of parameters that the library calls otherwise."""

COMPLETION_TOKENS = 16
"""New tokens of a completion where the request names no number, as in OpenAI's API."""

_AS_THEY_ARE = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens")
_ROLES = {"developer": "system"}
"""Roles that chat templates do not know, and what they are there."""


@dataclass(frozen=True)
class RequestLimits:
    """The largest request that is taken; ``None`` is no limit but the model's context.

    ``default_new_tokens`` are those of a chat's answer where the request names no number; ``choices`` are prompts times
    ``n``; ``body_seconds`` is the time for a client to send a body.
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


class RequestEncoder:
    """Encodes the prompts of requests. Used from one thread at a time, with a tokenizer of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, vocab_size)
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        """The token ids of each prompt; refuses empty prompts, and ids out of the vocabulary."""
        given = request.prompt
        prompts: Sequence[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        encoded = []
        for index, prompt in enumerate(prompts):
            with _naming("prompt" if prompt is given else f"prompt[{index}]"):
                encoded.append(
                    self._encoder.encode_text(prompt, add_special_tokens=request.add_special_tokens)
                    if isinstance(prompt, str)
                    else self._encoder.encode(prompt)
                )
        return encoded

    def chat(self, request: ChatRequest) -> list[int]:
        """The token ids of a chat; refuses what its template does."""
        variables = request.chat_template_kwargs or {}
        for name in variables:
            if name in self._reserved:
                raise ApiError(
                    400,
                    f"'{name}' cannot be set here; chat_template_kwargs are more variables of the template",
                    param=f"chat_template_kwargs.{name}",
                    code="invalid_value",
                )
        if request.offered_tools:
            self._check_tools()
            tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
            variables = {**variables, "tools": tools}
        return self.messages(request.messages, **variables)

    def messages(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The token ids of messages, by the chat template with these variables."""
        given = {name: value for name, value in variables.items() if value is not None}
        with _naming("messages"):
            return self._encoder.encode_chat([as_dict(message) for message in messages], **given)

    def text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text; an empty one has none where there is no BOS token."""
        return self._encoder.encode_text(text, add_special_tokens=add_special_tokens) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; refuses ids out of the vocabulary."""
        with _naming("tokens"):
            known = self._encoder.encode(list(token_ids)) if token_ids else []
        return str(self._tokenizer.decode(known, skip_special_tokens=False))

    def texts(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """The tokens of a prompt, each with its text; the texts, joined, are the prompt's."""
        stream = TextStream(self._tokenizer, skip_special_tokens=False)
        texts = [stream.push(token_id) for token_id in token_ids]
        texts[-1] += stream.flush()
        return list(zip(texts, token_ids, strict=True))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokenizer's own strings of tokens."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def _check_tools(self) -> None:
        template = getattr(self._tokenizer, "chat_template", None) or ""
        if "tools" not in _variables(template):
            raise ApiError(400, "the chat template of this model knows no tools; leave them out", param="tools")
        if TAG not in template:
            raise ApiError(
                400,
                f"this model writes calls of tools in a form that is not known here (only {TAG} with JSON is); "
                "leave the tools out, or read them from the text of an ordinary answer",
                param="tools",
            )


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Makes errors about a prompt name its field."""
    try:
        yield
    except SelfSpecError as error:
        raise as_api_error(error, prompt=field) from error


def as_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: content as one text, arguments of calls as they were given."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    given: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": content or ""}
    if message.name is not None:
        given["name"] = message.name
    if message.tool_calls:
        given["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call.function)} for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        given["tool_call_id"] = message.tool_call_id
    return given


def _function(call: FunctionCall) -> dict[str, Any]:
    """A call as templates take it: they write the arguments as JSON themselves."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"name": call.name, "arguments": arguments}


def _variables(template: str | dict[str, str]) -> set[str]:
    """Names of the variables that a chat template reads."""
    if not isinstance(template, str):
        return set()
    try:
        return meta.find_undeclared_variables(Environment().parse(template))
    except TemplateError:  # a template with extensions of transformers; its words have to do
        return {"tools"} if "tools" in template else set()


def to_params(request: GenerationRequest, prompt_length: int, context: int, limits: RequestLimits) -> SamplingParams:
    """The parameters of a request for one of its prompts.

    Raises:
        ApiError: a value is out of range, or prompt and answer do not fit the context or the limits.
    """
    values: dict[str, Any] = {name: getattr(request, name) for name in _AS_THEY_ARE}
    values["max_new_tokens"] = _new_tokens(request, prompt_length, context, limits)
    values["temperature"] = 1.0 if request.temperature is None else request.temperature
    values["top_k"] = None if request.top_k is None else max(0, request.top_k)
    values["stop"] = request.stop_strings or None
    values["stop_token_ids"] = tuple(request.stop_token_ids or ()) or None
    values["ignore_eos"] = request.ignore_eos or None
    values["logit_bias"] = {int(key): bias for key, bias in (request.logit_bias or {}).items()} or None
    values["json_schema"] = _schema(request.response_format)
    values["logprobs"] = request.alternatives
    values["prompt_logprobs"] = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
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


def count_choices(request: GenerationRequest, prompts: int, limits: RequestLimits) -> int:
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


def _schema(response_format: ResponseFormat | None) -> str | None:
    """The JSON schema that a text has to follow; ``None`` for any text."""
    if response_format is None or response_format.type == "text":
        return None
    given = response_format.json_schema
    return json.dumps({"type": "object"} if given is None else given.schema_)


def _new_tokens(request: GenerationRequest, prompt_length: int, context: int, limits: RequestLimits) -> int:
    """The number of new tokens, if prompt and answer fit."""
    if limits.prompt_tokens is not None and prompt_length > limits.prompt_tokens:
        raise _too_long(
            request.prompt_field,
            f"the prompt has {prompt_length} tokens, and this server takes {limits.prompt_tokens}; shorten it",
        )
    asked, field, default = request.max_tokens, "max_tokens", COMPLETION_TOKENS
    if isinstance(request, ChatRequest):
        default = limits.default_new_tokens
        if request.max_completion_tokens is not None:
            asked, field = request.max_completion_tokens, "max_completion_tokens"
    room = context - prompt_length
    if room < (0 if asked == 0 else 1):
        raise _too_long(
            request.prompt_field,
            f"the prompt has {prompt_length} tokens, and the model's context of {context} leaves no room for an "
            "answer; shorten it",
        )
    if asked is None:
        return min(room, default, limits.new_tokens or room)
    if asked == 0 and not (isinstance(request, CompletionRequest) and request.echo):
        raise ApiError(400, f"{field} must be at least 1; 0 is for completions with echo", param=field)
    if limits.new_tokens is not None and asked > limits.new_tokens:
        raise ApiError(400, f"{field} is {asked}, and this server writes at most {limits.new_tokens}", param=field)
    if asked > room:
        raise _too_long(
            field,
            f"a prompt of {prompt_length} tokens and {asked} new tokens do not fit the model's context of {context}; "
            f"ask for at most {room}",
        )
    return asked


def _too_long(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field, code="context_length_exceeded")
