"""From the bytes of a body to token ids. All work of a request's size is done here, in a process of its own.

Imports no torch: such a process is small, and starts in a second.
"""

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from selfspec.constraint import Constraint, problem_of
from selfspec.serve.api_errors import UNSUPPORTED, ApiError, as_invalid, exceeds_context, invalid, renaming, too_long
from selfspec.serve.encoding import RequestEncoder
from selfspec.serve.formats.dialect import Asked
from selfspec.serve.forms import asked_form
from selfspec.serve.interfaces.infill import InfillRequest
from selfspec.serve.interfaces.messages import CountTokensRequest, MessagesRequest
from selfspec.serve.interfaces.responses import ResponsesRequest
from selfspec.serve.limits import Limits
from selfspec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from selfspec.serve.responses import Detokenized, Tokenized, as_json

_COMPLETION_TOKENS, _FILL_TOKENS = 16, 128
"""New tokens of completions whose request names no number, as in OpenAI's API, and of what fills a gap."""

_MOST_REPEATED = 2**20
"""Characters of prompts that the answers to a request repeat, unless one prompt has more."""

Parsed = TypeVar("Parsed", bound=BaseModel)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Prepared:
    """A request that was read: without its texts, with the token ids of its prompts.

    Each prompt fits the context, and is one piece of memory: an event loop unpacks what a process has read.
    ``choices`` are those of each prompt. ``usual_tokens`` are the most new tokens where the request names no number;
    without it, there are as many as there is room for. ``constraint`` is what the answers have to be. ``echoed`` are
    the texts and ids of each prompt's tokens, where answers begin with their prompts; one text where no
    log-probabilities are reported. ``asked`` and ``thinks`` say how the answer of a chat is to be read. ``names`` are
    the request's fields by what the library, or the interface of chats and completions, calls them; ``repeated`` is a
    JSON object of the request's fields that a response has, too, and ``namespaces`` are those of tools, with their
    names there, by the names that the model sees.
    """

    request: GenerationRequest
    prompts: "list[array[int]]"
    choices: int
    usual_tokens: int | None = None
    constraint: Constraint | None = None
    echoed: list[list[tuple[str, int]]] | None = None
    asked: Asked | None = None
    thinks: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    repeated: str = ""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)


class RequestReader:
    """Reads the bodies of requests for a model that is served under some names and with some methods.

    Everything is refused by ``ApiError``, and what can be counted before it is encoded, before.
    """

    def __init__(
        self,
        encoder: RequestEncoder,
        *,
        names: Sequence[str],
        methods: Sequence[str],
        context: int,
        limits: Limits,
    ) -> None:
        self._encoder, self._names, self._methods, self._limits = encoder, tuple(names), tuple(methods), limits
        self._context = context
        self._most = limits.prompt_chars(context)

    def chat(self, body: bytes) -> Prepared:
        """Reads a request to ``/v1/chat/completions``."""
        return self._fitting(self.prepare_chat(_parse(ChatRequest, body)))

    def completion(self, body: bytes) -> Prepared:
        """Reads a request to ``/v1/completions``."""
        return self._completion(_parse(CompletionRequest, body))

    def infill(self, body: bytes) -> Prepared:
        """Reads a request to ``/infill``."""
        request = _parse(InfillRequest, body)
        with renaming(request.fields):
            self._check_characters([*map(_plain, request.input_extra or ())], "input_extra")
            read = self._completion(_translated(request.as_completion), request.files)
        return replace(read, names=_renamed(read.names, request.fields), usual_tokens=_FILL_TOKENS)

    def message(self, body: bytes) -> Prepared:
        """Reads a request to ``/v1/messages``."""
        return self._fitting(self.prepare_chat(_translated(_parse(MessagesRequest, body).as_chat)))

    def count_tokens(self, body: bytes) -> bytes:
        """The answer to a request to ``/v1/messages/count_tokens``."""
        prepared = self.prepare_chat(_translated(_parse(CountTokensRequest, body).as_chat))
        return json.dumps({"input_tokens": len(prepared.prompts[0])}).encode()

    def response(self, body: bytes) -> Prepared:
        """Reads a request to ``/v1/responses``."""
        request = _parse(ResponsesRequest, body)
        with renaming(request.fields):
            prepared = self._fitting(self.prepare_chat(_translated(request.as_chat)))
        names = _renamed(prepared.names, request.fields)
        return replace(prepared, names=names, repeated=request.repeated(), namespaces=request.namespaces())

    def _completion(self, request: CompletionRequest, files: Sequence[tuple[str, str]] = ()) -> Prepared:
        self._check(request)
        _check_completion(request)
        n = _count_choices(request, len(request.prompts), self._limits)
        for index, prompt in enumerate(request.prompts):
            name = "prompt" if prompt is request.prompt else f"prompt[{index}]"
            if isinstance(prompt, str):
                self._check_characters(prompt, name)
            elif len(prompt) > self._context:
                raise too_long(len(prompt), self._context, name)
        if request.suffix is not None:
            self._check_characters(request.suffix, "suffix")
            prompts = [self._encoder.fill(str(request.prompt), request.suffix, files)]
        else:
            prompts = self._encoder.completion(request)
        echoed = None
        if request.echo and request.logprobs is not None:
            check_reported(n * sum(map(len, prompts)) * (1 + request.logprobs), self._limits)
            echoed = [self._encoder.texts(prompt[: self._context]) for prompt in prompts]
        elif request.echo:
            echoed = [
                [(given if isinstance(given, str) else self._encoder.decode(prompt[: self._context]), 0)]
                for given, prompt in zip(request.prompts, prompts, strict=True)
            ]
            self._check_repeated(n, [text for [(text, _)] in echoed])
        form, name = asked_form(request) or (None, "")
        self._check_constraint(form, name)
        _try_constraint(form, name)
        prepared = Prepared(
            request.without_texts(),
            [array("i", prompt) for prompt in prompts],
            n,
            usual_tokens=_COMPLETION_TOKENS,
            constraint=form,
            echoed=echoed,
            names=_names("prompt", form, name),
        )
        return self._fitting(prepared)

    def tokenize(self, body: bytes) -> bytes:
        """The answer to a request to ``/tokenize``."""
        request = _parse(TokenizeRequest, body)
        self._check_model(request.model)
        field = "messages" if request.prompt is None else "prompt"
        self._check_characters([request.prompt, *map(_plain, request.messages or ())], field)
        if request.messages is not None:
            found = self._encoder.messages(request.messages, add_generation_prompt=request.add_generation_prompt)
        else:
            found = self._encoder.text(request.prompt or "", add_special_tokens=request.add_special_tokens)
        answer = Tokenized(count=len(found), max_model_len=self._context, tokens=found)
        if request.return_token_strs:
            answer["token_strs"] = self._encoder.token_strings(found)
        return as_json(answer).encode()

    def detokenize(self, body: bytes) -> bytes:
        """The answer to a request to ``/detokenize``."""
        request = _parse(DetokenizeRequest, body)
        self._check_model(request.model)
        if len(request.tokens) > self._context:
            text = f"there are {len(request.tokens)} tokens, and the context is {self._context}; shorten it"
            raise exceeds_context(text, "tokens")
        return as_json(Detokenized(prompt=self._encoder.decode(request.tokens))).encode()

    def prepare_chat(self, request: ChatRequest) -> Prepared:
        """Checks and encodes a chat."""
        self._check(request)
        n = _count_choices(request, 1, self._limits)
        texts = [_plain(part) for part in (*request.messages, *(request.tools or ()))]
        self._check_characters([*texts, request.chat_template_kwargs], "messages")
        form, name = asked_form(request) or (None, "tools")
        self._check_constraint(form, name)
        chat = self._encoder.chat(request)
        self._check_constraint(chat.constraint, name)  # of tools, too
        _try_constraint(chat.constraint, name)
        return Prepared(
            request.without_texts(),
            [array("i", chat.token_ids)],
            n,
            constraint=chat.constraint,
            names=_names("messages", chat.constraint, name),
            asked=chat.asked,
            thinks=chat.thinks,
        )

    def _fitting(self, prepared: Prepared) -> Prepared:
        """A request whose prompts are not too long."""
        request, context, limit = prepared.request, self._context, self._limits.max_prompt_tokens
        most = context if asked_tokens(request)[0] == 0 else context - 1
        for count in map(len, prepared.prompts):
            if limit is not None and count > limit:
                raise too_long(count, limit, prepared.names["prompt"])
            if count > most:
                more = f", since the maximum context length is {context} tokens, those of the answer included"
                raise too_long(count, most, prepared.names["prompt"], more=more)
        return prepared

    def _check(self, request: GenerationRequest) -> None:
        self._check_model(request.model)
        asked = request.speculative.method
        if asked is not None and asked not in self._methods:
            text = f"there is no method '{asked}' here; this server has {', '.join(self._methods)} (--methods)"
            raise invalid(text, "speculative.method")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise unknown_model(name, self._names)

    def _check_characters(self, value: object, field: str) -> None:
        count = _characters(value)
        if count > self._most:
            raise too_long(count, self._most, field, "characters")

    def _check_repeated(self, n: int, texts: Sequence[str]) -> None:
        """Refuses answers that would repeat long prompts often."""
        count, most = n * sum(map(len, texts)), max(_MOST_REPEATED, self._most)
        if count > most:
            text = f"the answers would repeat {count} characters of their prompts, and this server repeats {most}"
            raise invalid(f"{text}; ask for fewer choices, or without echo", "echo", "too_many_choices")

    def _check_constraint(self, form: Constraint | None, name: str) -> None:
        if form is not None and len(form.text) > self._limits.schema_chars:
            most = self._limits.schema_chars
            raise invalid(f"the {form.kind} has {len(form.text)} characters, and this server takes {most}", name)


def _try_constraint(constraint: Constraint | None, name: str) -> None:
    """Refuses what cannot be compiled, or not in the time that a process has: in the server nothing could end it."""
    if constraint is None:
        return
    try:
        problem = problem_of(constraint)
    except ImportError:  # which the engine says
        return
    if problem:
        raise invalid(f"{constraint.kind} cannot be compiled: {problem}", name)


def read(reader: RequestReader, do: Callable[[RequestReader, bytes], Result], body: bytes) -> Result:
    """What a method of the reader makes of a body; raises ``ApiError`` for one that no process could read."""
    try:
        return do(reader, body)
    except RecursionError as error:
        raise invalid("the body is nested too deeply; make it flatter", None) from error
    except MemoryError as error:
        raise too_much() from error


def too_much() -> ApiError:
    """The answer to a body that takes more time or memory to read than there is for it."""
    return ApiError(400, "the request takes too long, or too much memory, to read; send less", code="request_too_large")


def _names(prompt: str, constraint: Constraint | None, field: str) -> dict[str, str]:
    """The fields of a request by what the library calls them, where the names differ."""
    names = {"prompt": prompt, "max_new_tokens": "max_tokens", "prompt_logprobs": "logprobs"}
    return names if constraint is None else {**names, constraint.kind: field}


def _renamed(names: Mapping[str, str], fields: Mapping[str, str]) -> dict[str, str]:
    """``names`` as ``fields`` has them, which are those of another interface by ours, and ``fields`` with them."""
    return {**fields, **{own: fields.get(name, name) for own, name in names.items()}}


def asked_tokens(request: GenerationRequest) -> tuple[int | None, str]:
    """The number of new tokens that a request names, and the name of the field."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def check_reported(count: int, limits: Limits) -> None:
    """Refuses requests that would report too many log-probabilities, those of alternatives included."""
    if count > limits.max_logprobs:
        text = f"the answer could report {count} log-probabilities, and this server reports {limits.max_logprobs}"
        raise invalid(f"{text}; ask for fewer tokens, choices or alternatives", "logprobs", "too_many_logprobs")


def unknown_model(name: str, names: Sequence[str]) -> ApiError:
    """The answer to a request for a model that is not served."""
    text = f"there is no model '{name[:200]}' here; this server has {' and '.join(names)}"
    return ApiError(404, text, param="model", code="model_not_found")


def _parse(model: type[Parsed], body: bytes) -> Parsed:
    """The request of a body."""
    try:
        parsed = json.loads(body, parse_float=_number, parse_constant=_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body cannot be read: it must be JSON in UTF-8") from error
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error.msg}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from error
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        raise as_invalid(error.errors(include_url=False, include_input=False), parsed) from error


def _number(text: str) -> float:
    """A number of a body; none that is infinite or no number, which could not be repeated as JSON."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.32} is no number")
    return number


def _translated(make: Callable[[], Parsed]) -> Parsed:
    """The request of another interface as one of ours."""
    try:
        return make()
    except ValidationError as error:
        raise as_invalid(error.errors(include_url=False, include_input=False), {}) from error


def _plain(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(exclude_none=True)


def _characters(value: object) -> int:
    """How many characters a template may write for a JSON value: its texts, and for what is not text, its JSON."""
    count, waiting = 0, [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                count += len(text)
            case dict() as fields:
                count += 2 + 4 * len(fields)  # brackets, quotes, colons and commas
                waiting += fields.keys()
                waiting += fields.values()
            case list() as values:
                count += 2 + len(values)
                waiting += values
            case None:
                pass
            case number:
                count += len(str(number))
    return count


def _count_choices(request: GenerationRequest, prompts: int, limits: Limits) -> int:
    """The number of choices of each prompt, if they are not too many."""
    n, most = request.n or 1, min(limits.max_choices, limits.max_batch + limits.max_waiting)
    if n * prompts > most:
        text = f"{prompts} prompts with {n} choices each are more than the {most} that this server takes in a request"
        raise invalid(f"{text}; send several requests", "n" if n > 1 else "prompt", "too_many_choices")
    return n


def _check_completion(request: CompletionRequest) -> None:
    """Refuses ``best_of``, a ``suffix`` of several texts, and streams that begin with what is known at the end."""
    if request.echo and request.stream and request.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported in a stream; leave stream out", param="echo")
    if request.best_of is not None and request.best_of != (request.n or 1):
        text = "best_of is not supported: it would write texts only to drop them; ask for n choices and compare them"
        raise invalid(text, "best_of", UNSUPPORTED)
    if request.suffix is not None and (not isinstance(request.prompt, str) or request.echo):
        raise ApiError(400, "suffix is for one prompt that is a text, without echo", param="suffix")
