"""The reply to a request: its answers side by side, as one body or as a stream of chunks."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel

from selfspec.errors import SelfSpecError
from selfspec.serve.answer import Answer, usage
from selfspec.serve.api_errors import as_api_error
from selfspec.serve.forms import Form
from selfspec.serve.metrics import Metrics
from selfspec.serve.responses import Body, ErrorBody, Usage
from selfspec.serve.tools import ParsedCall
from selfspec.types import TextPiece

DONE = "data: [DONE]\n\n"


class Reply:
    """The reply to a request. It is read once, by ``whole`` or by ``stream``; giving up either cancels it.

    Args:
        answers: in the order of their indices.
        form: makes the bodies.
        prompts: lengths in tokens of the prompts that the answers belong to.
        metrics: count what happens.

    Attributes:
        outcome: how it ended.
    """

    def __init__(self, answers: Sequence[Answer], form: Form, prompts: Sequence[int], metrics: Metrics) -> None:
        self._answers, self._form, self._prompts, self._metrics = answers, form, prompts, metrics
        self.outcome: Literal["open", "complete", "cancelled", "failed"] = "open"
        self._began = time.perf_counter()
        self._last = [0.0] * len(answers)

    @property
    def usage(self) -> Usage | None:
        """The numbers of tokens; ``None`` before the end."""
        ended = all(answer.result is not None for answer in self._answers)
        return usage(self._answers, len(self._prompts)) if ended else None

    def cancel(self) -> None:
        """Gives up what is still being written."""
        for answer in self._answers:
            if answer.result is None:
                answer.stream.cancel()

    async def whole(self) -> Body:
        """The whole reply.

        Raises:
            SelfSpecError: the model failed.
        """
        with self._observed():
            async for answer, pieces in side_by_side(self._answers):
                self._take(answer, pieces)
        return self._form.whole(self._answers, len(self._prompts))

    async def stream(self, *, include_usage: bool = False, continuous_usage: bool = False) -> AsyncIterator[str]:
        """The reply as server-sent events. An error on the way is an event, after which there is no ``[DONE]``.

        Args:
            include_usage: end with the numbers of tokens; all other chunks have ``usage: null``.
            continuous_usage: with ``include_usage``, these chunks have the numbers so far.
        """

        def event(body: Body) -> str:
            if include_usage and "usage" not in body.model_fields_set:
                body.usage = self._usage_so_far() if continuous_usage else None  # type: ignore[attr-defined]
            return _event(body)

        form = self._form
        try:
            with self._observed():
                for answer in self._answers:
                    if (first := form.first(answer)) is not None:
                        yield event(first)
                async for answer, pieces in side_by_side(self._answers):
                    text, calls = self._take(answer, pieces)
                    if text or calls or pieces:
                        yield event(form.chunk(answer, pieces, text, calls))
                    if not pieces:
                        yield event(form.last(answer))
            if include_usage and self.usage is not None:
                yield event(form.usage(self.usage))
            yield DONE
        except Exception as error:
            yield _event(ErrorBody.model_validate(as_api_error(error).body))
            if not isinstance(error, SelfSpecError):
                raise

    def _usage_so_far(self) -> Usage:
        """The numbers of tokens up to now; how many of the prompts' were cached is known at the end."""
        prompt, new = sum(self._prompts), sum(len(answer.pieces) for answer in self._answers)
        return Usage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new)

    def _take(self, answer: Answer, pieces: Sequence[TextPiece]) -> tuple[str, list[ParsedCall]]:
        """Hands an answer its next pieces, or its end, and measures when they came."""
        now = time.perf_counter()
        if not pieces:
            added = answer.end()
            self._metrics.ended(answer.finished, answer.savings, now - self._began)
            return added
        if answer.pieces:
            self._metrics.between(now - self._last[answer.index], len(pieces))
        else:
            self._metrics.first_token(now - self._began)
        self._last[answer.index] = now
        return answer.push(pieces)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Cancels what is still being written at the end, and counts how it ended."""
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


async def side_by_side(answers: Sequence[Answer]) -> AsyncIterator[tuple[Answer, list[TextPiece]]]:
    """Reads the streams of several answers as they grow.

    Yields:
        An answer with its next pieces; without pieces at its end.

    Raises:
        SelfSpecError: one of them failed.
    """
    if len(answers) == 1:
        while pieces := await _next_pieces(answers[0]):
            yield answers[0], pieces
        yield answers[0], []
        return
    queue: asyncio.Queue[tuple[Answer, list[TextPiece] | Exception]] = asyncio.Queue()

    async def read(answer: Answer) -> None:
        try:
            while pieces := await _next_pieces(answer):
                queue.put_nowait((answer, pieces))
            queue.put_nowait((answer, []))
        except Exception as error:
            queue.put_nowait((answer, error))

    tasks = [asyncio.create_task(read(answer)) for answer in answers]
    left = len(tasks)
    try:
        while left:
            answer, step = await queue.get()
            if isinstance(step, Exception):
                raise step
            left -= not step
            yield answer, step
    finally:
        for task in tasks:
            task.cancel()


async def _next_pieces(answer: Answer) -> list[TextPiece]:
    """The next pieces of an answer; none at its end."""
    try:
        return await answer.stream.next_pieces()
    except StopAsyncIteration:
        return []


def _event(body: BaseModel) -> str:
    """A server-sent event."""
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"
