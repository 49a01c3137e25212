"""From the bytes of a body to token ids. All work of a request's size is done here, in a process of its own.

Imports no torch: such a process is small, and starts in a second.
"""

import inspect
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerBase

from selfspec.chat_encoder import ChatEncoder
from selfspec.constraint import Constraint, problem_of
from selfspec.decoding.text import TextStream
from selfspec.serve.answer_bodies import Detokenized, Tokenized, as_json
from selfspec.serve.api_errors import UNSUPPORTED, ApiError, as_invalid, exceeds_context, invalid, renaming, too_long
from selfspec.serve.capacity import Limits
from selfspec.serve.chats import as_dicts, asked_of, prefilled, variables_of
from selfspec.serve.fill import FillTokens
from selfspec.serve.formats.dialect import Asked, Dialect
from selfspec.serve.forms import asked_form
from selfspec.serve.interfaces.infill import InfillRequest
from selfspec.serve.interfaces.messages import CountTokensRequest, MessagesRequest
from selfspec.serve.interfaces.responses import ResponsesRequest
from selfspec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
)

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
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        *,
        names: Sequence[str],
        methods: Sequence[str],
        context: int,
        limits: Limits,
    ) -> None:
        self._names, self._methods, self._limits, self._context = tuple(names), tuple(methods), limits, context
        self._tokenizer, self._encoder = tokenizer, ChatEncoder(tokenizer, vocab_size)
        self._dialect, self._fill = Dialect(tokenizer), FillTokens(tokenizer)
        self._reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "self", "messages"} - {"kwargs"}
        self._most = limits.prompt_chars(context)

    def chat(self, body: bytes) -> Prepared:
        """Reads a request to ``/v1/chat/completions``."""
        return self._fitting(self.prepare_chat(ChatRequest.from_body(body)))

    def completion(self, body: bytes) -> Prepared:
        """Reads a request to ``/v1/completions``."""
        return self._completion(CompletionRequest.from_body(body))

    def infill(self, body: bytes) -> Prepared:
        """Reads a request to ``/infill``."""
        request = InfillRequest.from_body(body)
        with renaming(request.fields):
            self._check_characters([*map(_plain, request.input_extra or ())], "input_extra")
            read = self._completion(_translated(request.as_completion), request.files)
        return replace(read, names=_renamed(read.names, request.fields), usual_tokens=_FILL_TOKENS)

    def message(self, body: bytes) -> Prepared:
        """Reads a request to ``/v1/messages``."""
        return self._fitting(self.prepare_chat(_translated(MessagesRequest.from_body(body).as_chat)))

    def count_tokens(self, body: bytes) -> bytes:
        """The answer to a request to ``/v1/messages/count_tokens``."""
        prepared = self.prepare_chat(_translated(CountTokensRequest.from_body(body).as_chat))
        return json.dumps({"input_tokens": len(prepared.prompts[0])}).encode()

    def response(self, body: bytes) -> Prepared:
        """Reads a request to ``/v1/responses``."""
        request = ResponsesRequest.from_body(body)
        with renaming(request.fields):
            prepared = self._fitting(self.prepare_chat(_translated(request.as_chat)))
        names = _renamed(prepared.names, request.fields)
        return replace(prepared, names=names, repeated=request.repeated(), namespaces=request.namespaces())

    def _completion(self, request: CompletionRequest, files: Sequence[tuple[str, str]] = ()) -> Prepared:
        self._check(request)
        _check_completion(request)
        n = _count_choices(request, len(request.prompts), self._limits)
        named = {"prompt" if each is request.prompt else f"prompt[{i}]": each for i, each in enumerate(request.prompts)}
        for name, prompt in named.items():
            if isinstance(prompt, str):
                self._check_characters(prompt, name)
            elif len(prompt) > self._context:
                raise too_long(len(prompt), self._context, name)
        if request.suffix is not None:
            self._check_characters(request.suffix, "suffix")
            prompts = [self._encode_gap(str(request.prompt), request.suffix, files)]
        else:
            prompts = [self._encode(prompt, name, special=request.add_special_tokens) for name, prompt in named.items()]
        echoed = None
        if request.echo and request.logprobs is not None:
            check_reported(n * sum(map(len, prompts)) * (1 + request.logprobs), self._limits)
            echoed = [self._texts(prompt[: self._context]) for prompt in prompts]
        elif request.echo:
            echoed = [
                [(given if isinstance(given, str) else self._decode(prompt[: self._context]), 0)]
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
        request = TokenizeRequest.from_body(body)
        self._check_model(request.model)
        field = "messages" if request.prompt is None else "prompt"
        self._check_characters([request.prompt, *map(_plain, request.messages or ())], field)
        if request.messages is not None:
            found = self.encode_messages(request.messages, add_generation_prompt=request.add_generation_prompt)
        elif request.prompt:
            found = self._encode(request.prompt, "prompt", special=request.add_special_tokens)
        else:
            found = []  # not even BOS
        answer = Tokenized(count=len(found), max_model_len=self._context, tokens=found)
        if request.return_token_strs:
            answer["token_strs"] = [str(token) for token in self._tokenizer.convert_ids_to_tokens(found)]
        return as_json(answer).encode()

    def detokenize(self, body: bytes) -> bytes:
        """The answer to a request to ``/detokenize``."""
        request = DetokenizeRequest.from_body(body)
        self._check_model(request.model)
        if len(request.tokens) > self._context:
            text = f"there are {len(request.tokens)} tokens, and the context is {self._context}; shorten it"
            raise exceeds_context(text, "tokens")
        return as_json(Detokenized(prompt=self._decode(request.tokens))).encode()

    def prepare_chat(self, request: ChatRequest) -> Prepared:
        """Checks and encodes a chat."""
        self._check(request)
        n = _count_choices(request, 1, self._limits)
        texts = [_plain(part) for part in (*request.messages, *(request.tools or ()))]
        self._check_characters([*texts, request.chat_template_kwargs], "messages")
        form, name = asked_form(request) or (None, "tools")
        self._check_constraint(form, name)
        dialect = self._dialect
        asked = asked_of(request, dialect, form)
        token_ids = self.encode_messages(request.messages, **variables_of(request, dialect, self._reserved))
        thinks = dialect.is_thinking(token_ids, prefilled(request))
        constraint = dialect.constraint(asked, token_ids, thinks=thinks)
        self._check_constraint(constraint, name)  # of tools, too
        _try_constraint(constraint, name)
        return Prepared(
            request.without_texts(),
            [array("i", token_ids)],
            n,
            constraint=constraint,
            names=_names("messages", constraint, name),
            asked=asked,
            thinks=thinks,
        )

    def encode_messages(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The token ids of messages, by the chat template with these variables.

        Control tokens are what the template writes; in the texts of messages and variables they are text.
        """
        given = {name: value for name, value in variables.items() if value is not None}
        with renaming({"prompt": "messages"}):
            return self._encoder.encode_chat(as_dicts(messages, self._dialect), given)

    def _encode(self, prompt: str | list[int], field: str, *, special: bool) -> list[int]:
        """The token ids of a prompt of that field; refuses an empty one, and ids out of the vocabulary."""
        with renaming({"prompt": field}):
            if isinstance(prompt, str):
                return self._encoder.encode_text(prompt, add_special_tokens=special)
            return self._encoder.check_ids(list(prompt))

    def _encode_gap(self, before: str, after: str, files: Sequence[tuple[str, str]]) -> list[int]:
        """The token ids after which a model writes what is between two texts; refused where there are none."""
        if not self._fill.can_fill:
            text = "the tokenizer of this model has no tokens to fill in the middle; leave suffix out"
            raise invalid(text, "suffix", UNSUPPORTED)
        return self._encoder.check_ids(self._fill.encode(before, after, self._encoder.words, files))

    def _decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; refuses ids out of the vocabulary."""
        with renaming({"prompt": "tokens"}):
            known = self._encoder.check_ids(list(token_ids)) if token_ids else []
        return str(self._tokenizer.decode(known, skip_special_tokens=False))

    def _texts(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """The tokens of a prompt, each with its text; the texts, joined, are the prompt's."""
        stream = TextStream(self._tokenizer, skip_special_tokens=False)
        texts = [stream.push(token_id) for token_id in token_ids]
        texts[-1] += stream.flush()
        return list(zip(texts, token_ids, strict=True))

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
