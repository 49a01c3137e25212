"""From the prompts of a request to token ids."""

import inspect
import json
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from selfspec.decoding.output import TextStream
from selfspec.errors import SelfSpecError
from selfspec.prompts import PromptEncoder
from selfspec.serve.api_errors import ApiError, as_api_error
from selfspec.serve.requests import ChatRequest, CompletionRequest, FunctionCall, Message, Tool
from selfspec.serve.tools import TAG

_ROLES = {"developer": "system"}
"""Roles that chat templates do not know, and what they are there."""


class RequestEncoder:
    """Encodes the prompts of requests. Used from one thread at a time, with a tokenizer of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, vocab_size)
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        """The token ids of each prompt; refuses empty prompts, and ids out of the vocabulary."""
        prompts = as_prompts(request.prompt)
        encoded = []
        for index, prompt in enumerate(prompts):
            field = "prompt" if prompt is request.prompt else f"prompt[{index}]"
            try:
                encoded.append(
                    self._encoder.encode_text(prompt, add_special_tokens=request.add_special_tokens)
                    if isinstance(prompt, str)
                    else self._encoder.encode(prompt)
                )
            except SelfSpecError as error:
                raise as_api_error(error, prompt=field) from error
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
        tools = None if request.tool_choice == "none" else request.tools
        if tools:
            self._check_tools()
        return self.messages(request.messages, tools=_as_dicts(tools), **variables)

    def messages(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The token ids of messages, by the chat template with these variables."""
        given = {name: value for name, value in variables.items() if value is not None}
        try:
            return self._encoder.encode_chat([as_dict(message) for message in messages], **given)
        except SelfSpecError as error:
            raise as_api_error(error, prompt="messages") from error

    def text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text; an empty one has none where there is no BOS token."""
        try:
            return self._encoder.encode_text(text, add_special_tokens=add_special_tokens) if text else []
        except SelfSpecError as error:
            raise as_api_error(error) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; refuses ids out of the vocabulary."""
        try:
            known = self._encoder.encode(list(token_ids)) if token_ids else []
        except SelfSpecError as error:
            raise as_api_error(error, prompt="tokens") from error
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


def as_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Any]:
    """The prompts of a request as a list: text or token ids each."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def as_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: content as one text, arguments of calls as they were given."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    fields: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": content or ""}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call.function)} for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _function(call: FunctionCall) -> dict[str, Any]:
    """A call as templates take it: they write the arguments as JSON themselves."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"name": call.name, "arguments": arguments}


def _as_dicts(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def _variables(template: str | dict[str, str]) -> set[str]:
    """Names of the variables that a chat template reads."""
    if not isinstance(template, str):
        return set()
    try:
        return meta.find_undeclared_variables(Environment().parse(template))
    except TemplateError:  # a template with extensions of transformers; its words have to do
        return {"tools"} if "tools" in template else set()
