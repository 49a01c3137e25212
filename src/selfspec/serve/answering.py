"""The answer to one request: its choices side by side, as one body or as a stream of chunks."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from pydantic import BaseModel

from selfspec.errors import SelfSpecError
from selfspec.serve.backend import Answer, Ended, Token
from selfspec.serve.choices import Addition, Choice, usage
from selfspec.serve.errors import as_api_error
from selfspec.serve.metrics import Metrics
from selfspec.serve.responses import Body, ErrorBody, Usage

DONE = "data: [DONE]\n\n"


class Form(Protocol):
    """Makes the bodies of an answer; ``ChatForm`` or ``CompletionForm``."""

    def whole(self, choices: Sequence[Choice], prompts: int) -> Body:
        """The answer that is not a stream."""
        ...

    def first(self, choice: Choice) -> Body | None:
        """The chunk that a choice begins with, if it begins with one."""
        ...

    def chunk(self, choice: Choice, addition: Addition) -> Body:
        """The chunk with what some tokens add."""
        ...

    def last(self, choice: Choice) -> Body:
        """The chunk that says why a choice ended."""
        ...

    def usage(self, counted: Usage) -> Body:
        """The chunk after all choices."""
        ...


class Reply:
    """The answer to a request. It is read once, by ``whole`` or by ``stream``; giving up either cancels it.

    Args:
        choices: in the order of their indices.
        answers: what writes each of them.
        form: makes the bodies.
        prompts: lengths in tokens of the prompts that the choices belong to.
        metrics: are told.

    Attributes:
        outcome: how it ended.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        answers: Sequence[Answer],
        form: Form,
        prompts: Sequence[int],
        metrics: Metrics,
    ) -> None:
        self._choices, self._answers, self._form, self._prompts = choices, answers, form, prompts
        self._metrics = metrics
        self.outcome: Literal["open", "complete", "cancelled", "failed"] = "open"
        self._began = time.perf_counter()
        self._last = [0.0] * len(choices)

    @property
    def usage(self) -> Usage | None:
        """The numbers of tokens; ``None`` before the end."""
        ends = [choice.ended for choice in self._choices if choice.ended is not None]
        return usage(ends, len(self._prompts)) if len(ends) == len(self._choices) else None

    def cancel(self) -> None:
        """Gives up what is still being written."""
        for choice, answer in zip(self._choices, self._answers, strict=True):
            if choice.ended is None:
                answer.cancel()

    async def whole(self) -> Body:
        """The whole answer.

        Raises:
            SelfSpecError: the model failed.
        """
        with self._observed():
            async for index, step in side_by_side(self._answers):
                self._take(index, step)
        return self._form.whole(self._choices, len(self._prompts))

    async def stream(self, *, include_usage: bool = False, continuous_usage: bool = False) -> AsyncIterator[str]:
        """The answer as server-sent events. An error on the way is an event, after which there is no ``[DONE]``.

        Args:
            include_usage: end with the numbers of tokens; all other chunks have ``usage: null``.
            continuous_usage: with ``include_usage``, these chunks have the numbers so far.
        """

        def event(body: Body) -> str:
            """The event of a chunk, with the numbers of tokens where they are asked for."""
            if include_usage and "usage" not in body.model_fields_set:
                body.usage = self._usage_so_far() if continuous_usage else None  # type: ignore[attr-defined]
            return _event(body)

        try:
            with self._observed():
                for choice in self._choices:
                    if (first := self._form.first(choice)) is not None:
                        yield event(first)
                async for index, step in side_by_side(self._answers):
                    choice, addition = self._choices[index], self._take(index, step)
                    if addition:
                        yield event(self._form.chunk(choice, addition))
                    if isinstance(step, Ended):
                        yield event(self._form.last(choice))
            if include_usage and self.usage is not None:
                yield event(self._form.usage(self.usage))
            yield DONE
        except Exception as error:
            yield _event(ErrorBody.model_validate(as_api_error(error).body))
            if not isinstance(error, SelfSpecError):
                raise

    def _usage_so_far(self) -> Usage:
        """The numbers of tokens up to now. How many of the prompts' were cached is told at the end."""
        prompt, new = sum(self._prompts), sum(len(choice.tokens) for choice in self._choices)
        return Usage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new)

    def _take(self, index: int, step: Sequence[Token] | Ended) -> Addition:
        """Gives what came to its choice, and notes when it came."""
        now, choice = time.perf_counter(), self._choices[index]
        if isinstance(step, Ended):
            self._metrics.ended(step, now - self._began)
            return choice.end(step)
        if choice.tokens:
            self._metrics.between(now - self._last[index], len(step))
        else:
            self._metrics.first_token(now - self._began)
        self._last[index] = now
        return choice.take(step)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Cancels what is still being written at the end, and counts it."""
        try:
            yield
            self.outcome = "complete"
        except Exception:
            self.outcome = "failed"
            self._metrics.failed()
            raise
        except BaseException:  # the client went away
            self.outcome = "cancelled"
            self._metrics.cancelled()
            raise
        finally:
            self.cancel()


async def side_by_side(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Sequence[Token] | Ended]]:
    """Reads several answers as they grow.

    Args:
        answers: to read to their ends.

    Yields:
        The index of an answer, with its next tokens or its end.

    Raises:
        SelfSpecError: one of them failed.
    """
    if len(answers) == 1:
        async for tokens in answers[0]:
            yield 0, tokens
        yield 0, answers[0].ended
        return
    queue: asyncio.Queue[tuple[int, Sequence[Token] | Ended | BaseException]] = asyncio.Queue()

    async def read(index: int, answer: Answer) -> None:
        """Hands the steps of an answer on, and its end or its error."""
        try:
            async for tokens in answer:
                queue.put_nowait((index, tokens))
            queue.put_nowait((index, answer.ended))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(read(index, answer)) for index, answer in enumerate(answers)]
    left = len(tasks)
    try:
        while left:
            index, step = await queue.get()
            if isinstance(step, BaseException):
                raise step
            left -= isinstance(step, Ended)
            yield index, step
    finally:
        for task in tasks:
            task.cancel()


def _event(body: BaseModel) -> str:
    """A server-sent event."""
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"
