"""From choices to the answers of ``/v1/chat/completions``."""

import uuid
from collections.abc import Sequence
from typing import Any

from selfspec.serve.choices import Addition, Choice, report_tokens, usage
from selfspec.serve.logprobs import TokenNames, chat_logprobs
from selfspec.serve.responses import (
    AnswerMessage,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    Usage,
)
from selfspec.serve.tool_calls import ParsedCall


class ChatForm:
    """The bodies of one request's answer.

    Args:
        head: fields that all bodies have: ``id``, ``created``, ``model``, ``system_fingerprint``.
        names: of tokens.
    """

    def __init__(self, head: dict[str, Any], names: TokenNames) -> None:
        self._head = head
        self._names = names

    def whole(self, choices: Sequence[Choice], prompts: int) -> ChatCompletion:
        """The answer that is not a stream."""
        body = ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=[self._choice(choice) for choice in choices],
            usage=usage([choice.ended for choice in choices if choice.ended is not None], prompts),
        )
        if choices[0].rules.report:
            body.selfspec = choices[0].report
        return body

    def first(self, choice: Choice) -> ChatChunk:
        """The chunk that a choice begins with."""
        return self._chunk(choice, Delta(role="assistant", content=""))

    def chunk(self, choice: Choice, addition: Addition) -> ChatChunk:
        """The chunk with what some tokens add."""
        delta = Delta(content=addition.text) if addition.text or not addition.calls else Delta()
        if addition.calls:
            before = len(choice.calls) - len(addition.calls)
            delta.tool_calls = [
                CalledTool(index=before + index, **_called(call)) for index, call in enumerate(addition.calls)
            ]
        chunk = self._chunk(choice, delta, addition)
        if choice.rules.report:
            chunk.selfspec = report_tokens(addition.tokens)
        return chunk

    def last(self, choice: Choice) -> ChatChunk:
        """The chunk that says why a choice ended."""
        chunk = self._chunk(choice, Delta())
        chunk.choices[0].finish_reason = choice.finish_reason
        if choice.rules.report:
            chunk.selfspec = choice.report
        return chunk

    def usage(self, counted: Usage) -> ChatChunk:
        """The chunk after all choices, with the numbers of tokens."""
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[], usage=counted)

    def _choice(self, choice: Choice) -> ChatChoice:
        message = AnswerMessage(role="assistant", content=choice.text or (None if choice.calls else ""), refusal=None)
        if choice.calls:
            message.tool_calls = [CalledTool(**_called(call)) for call in choice.calls]
        asked = choice.rules.logprobs is not None
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=chat_logprobs(choice.tokens, self._names) if asked else None,
            finish_reason=choice.finish_reason,
        )

    def _chunk(self, choice: Choice, delta: Delta, addition: Addition | None = None) -> ChatChunk:
        asked = choice.rules.logprobs is not None and addition is not None and addition.tokens
        return ChatChunk(
            **self._head,
            object="chat.completion.chunk",
            choices=[
                ChunkChoice(
                    index=choice.index,
                    delta=delta,
                    logprobs=chat_logprobs(addition.tokens, self._names) if asked and addition else None,
                    finish_reason=None,
                )
            ],
        )


def _called(call: ParsedCall) -> dict[str, Any]:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
