"""The two interfaces of OpenAI's API: how a prompt is asked, and where an answer has its text and its tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from selfspec_lab.conformance.answer import Answer, ServerFaultError, Token, member, text_or_empty

Prompt: TypeAlias = str | list[dict[str, str]]
"""A text, or the messages of a chat."""

ALTERNATIVES = 5
"""Log-probabilities asked for with each token; OpenAI's completions allow no more."""


class Interface(ABC):
    """One of the interfaces."""

    name: ClassVar[str]
    path: ClassVar[str]
    prompt_field: ClassVar[str]
    logprobs: ClassVar[Mapping[str, Any]]
    """The fields that ask for log-probabilities."""

    @abstractmethod
    def prompt(self, text: str) -> Prompt:
        """The prompt that asks about a text."""

    @abstractmethod
    def followed(self, prompt: Prompt, answer: str, text: str) -> Prompt:
        """The prompt that goes on with a text after an answer: in a chat, the next turn."""

    @abstractmethod
    def text(self, choice: Any) -> str:
        """The text of a choice, or in a stream what an event adds to it."""

    @abstractmethod
    def tokens(self, choice: Any) -> tuple[Token, ...] | None:
        """The tokens of a choice; ``None`` without log-probabilities."""

    def answer(self, body: Any) -> Answer:
        """Reads the body of an answer, or an event of a stream.

        Raises:
            ServerFaultError: it has no choices, or the server says that it failed.
        """
        if member(body, "error") is not None:
            message = member(body, "error", "message") or member(body, "error")
            raise ServerFaultError(f"the answer is an error: {message}")
        choices = member(body, "choices")
        if not isinstance(choices, list):
            raise ServerFaultError(f"the answer has no 'choices': {str(body)[:120]}")
        choice = member(choices, 0)  # the last event of a stream may have usage alone
        cached = member(body, "usage", "prompt_tokens_details", "cached_tokens")
        reason = member(choice, "finish_reason")
        return Answer(self.text(choice), reason, self.tokens(choice), cached if isinstance(cached, int) else None)


class Completions(Interface):
    """``/v1/completions``."""

    name, path, prompt_field = "completions", "/v1/completions", "prompt"
    logprobs: ClassVar[Mapping[str, Any]] = {"logprobs": ALTERNATIVES}

    def prompt(self, text: str) -> Prompt:
        """See ``Interface``."""
        return text

    def followed(self, prompt: Prompt, answer: str, text: str) -> Prompt:
        """See ``Interface``."""
        return f"{prompt}{answer}\n\n{text}"

    def text(self, choice: Any) -> str:
        """See ``Interface``."""
        return text_or_empty(member(choice, "text"))

    def tokens(self, choice: Any) -> tuple[Token, ...] | None:
        """See ``Interface``."""
        lists = [member(choice, "logprobs", name) for name in ("tokens", "token_logprobs", "top_logprobs")]
        if not all(isinstance(each, list) for each in lists):
            return None
        return tuple(
            Token(text, logprob, _alternatives(top.items() if isinstance(top, dict) else ()))
            for text, logprob, top in zip(*lists, strict=False)
            if isinstance(text, str) and _is_number(logprob)
        )


class Chat(Interface):
    """``/v1/chat/completions``."""

    name, path, prompt_field = "chat", "/v1/chat/completions", "messages"
    logprobs: ClassVar[Mapping[str, Any]] = {"logprobs": True, "top_logprobs": ALTERNATIVES}

    def prompt(self, text: str) -> Prompt:
        """See ``Interface``."""
        return [{"role": "user", "content": text}]

    def followed(self, prompt: Prompt, answer: str, text: str) -> Prompt:
        """See ``Interface``."""
        assert not isinstance(prompt, str)
        return [*prompt, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]

    def text(self, choice: Any) -> str:
        """See ``Interface``; reasoning comes before the answer."""
        said = member(choice, "message") or member(choice, "delta")
        reasoning = text_or_empty(member(said, "reasoning_content")) or text_or_empty(member(said, "reasoning"))
        return reasoning + text_or_empty(member(said, "content"))

    def tokens(self, choice: Any) -> tuple[Token, ...] | None:
        """See ``Interface``."""
        content = member(choice, "logprobs", "content")
        if not isinstance(content, list):
            return None
        return tuple(
            Token(each["token"], each["logprob"], _alternatives(_chat_alternatives(each)))
            for each in content
            if isinstance(member(each, "token"), str) and _is_number(member(each, "logprob"))
        )


INTERFACES: tuple[Interface, ...] = (Completions(), Chat())


@dataclass(frozen=True)
class Request:
    """What is asked of a server.

    Attributes:
        interface: which it is asked by.
        prompt: the text or messages.
        max_tokens: longest answer.
        fields: further fields of the body.
    """

    interface: Interface
    prompt: Prompt
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    def having(self, **fields: Any) -> "Request":
        """The request with further fields."""
        return Request(self.interface, self.prompt, self.max_tokens, {**self.fields, **fields})

    def body(self, model: str) -> dict[str, Any]:
        """The body: greedy, where the fields do not say otherwise."""
        asked = {self.interface.prompt_field: self.prompt, "max_tokens": self.max_tokens, "temperature": 0}
        return {"model": model, **asked, **self.fields}


def _alternatives(pairs: Any) -> tuple[tuple[str, float], ...]:
    return tuple((text, logprob) for text, logprob in pairs if isinstance(text, str) and _is_number(logprob))


def _chat_alternatives(token: Any) -> list[tuple[Any, Any]]:
    return [(member(top, "token"), member(top, "logprob")) for top in member(token, "top_logprobs") or ()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
