"""The limits of a request, and the token ids of its prompts."""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from selfspec.decoding.text import TextStream
from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.serve.api_errors import ApiError, as_api_error
from selfspec.serve.control_tokens import ControlTokens
from selfspec.serve.requests import ChatRequest, CompletionRequest, FunctionCall, Message
from selfspec.serve.tools import TAG
from selfspec.text_encoder import TextEncoder

_ROLES = {"developer": "system"}
"""Roles that chat templates do not know, and what they are there."""


@dataclass(frozen=True)
class RequestLimits:
    """The largest request that is taken; ``None`` is no limit but the model's context.

    ``prompt_chars`` are those of the texts of a prompt, or of a chat with its tools; ``None`` is ``chars_per_token``
    for each token of the context. ``default_new_tokens`` are those of a chat's answer where the request names no
    number; ``choices`` are prompts times ``n``; ``logprobs`` are all that a request reports, alternatives included.
    ``body_seconds`` is the time for a client to send a body, ``read_seconds`` to parse and encode it,
    ``request_seconds`` until the answer is complete.
    """

    body_bytes: int = 4 * 2**20
    prompt_chars: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    default_new_tokens: int = 1024
    choices: int = 128
    logprobs: int = 2**17
    schema_chars: int = 2**16
    body_seconds: float = 30.0
    read_seconds: float = 20.0
    request_seconds: float = 3600.0

    chars_per_token: ClassVar[int] = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise InvalidParameterError(f"{field.name} must be above 0, not {value}")


class RequestEncoder:
    """Encodes the prompts of requests. Used from one thread at a time, with a tokenizer of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer, vocab_size)
        self._control = ControlTokens(tokenizer)
        self._reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "self", "messages"} - {"kwargs"}

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        """The token ids of each prompt; refuses empty prompts, and ids out of the vocabulary."""
        encoded = []
        for index, prompt in enumerate(request.prompts):
            with _naming("prompt" if prompt is request.prompt else f"prompt[{index}]"):
                encoded.append(
                    self._encoder.encode_text(prompt, add_special_tokens=request.add_special_tokens)
                    if isinstance(prompt, str)
                    else self._encoder.check_ids(list(prompt))
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
        """The token ids of messages, by the chat template with these variables.

        Control tokens are what the template writes; in the texts of messages and variables they are text.
        """
        given = {name: value for name, value in variables.items() if value is not None}
        encoder, control = self._encoder, self._control
        with _naming("messages"):
            text = encoder.render_chat(control.hide([as_dict(message) for message in messages]), control.hide(given))
            add = not encoder.starts_with_bos(text)
            token_ids: list[int] = []
            for part, is_control in control.split(text):
                token_ids += encoder.tokens(part, add_special_tokens=add, split_special_tokens=is_control)
                add = False
            return encoder.check_ids(token_ids)

    def text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text; an empty one has none where there is no BOS token."""
        return self._encoder.encode_text(text, add_special_tokens=add_special_tokens) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; refuses ids out of the vocabulary."""
        with _naming("tokens"):
            known = self._encoder.check_ids(list(token_ids)) if token_ids else []
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
