"""The reply to a request: its answers side by side, as one body or as a stream of chunks."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal

from anyio import CapacityLimiter, to_thread

from selfspec.errors import RequestTimeoutError, SelfSpecError
from selfspec.serve.answer import Answer, Growth
from selfspec.serve.answer_bodies import CachedTokens, CompletionDetails, Report, Usage
from selfspec.serve.api_errors import as_api_error
from selfspec.serve.bodies import Bodies, SentEvent
from selfspec.serve.metrics import Metrics
from selfspec.serve.requests import GenerationRequest, StreamOptions
from selfspec.types import TextPiece

_ONE = CapacityLimiter(1)

_SMALL = 2**15
"""Tokens of answers, and characters of prompts that they repeat, whose body is made at once."""


class Reply:
    """The reply to a request. It is read once, by ``whole`` or by ``stream``, and closed after that or without it.

    ``prompts`` are the lengths of the prompts in tokens; each has equally many answers, which follow each other. An
    answer that is not complete after ``seconds`` fails.
    """

    def __init__(
        self,
        request: GenerationRequest,
        answers: Sequence[Answer],
        bodies: Bodies,
        prompts: Sequence[int],
        metrics: Metrics,
        seconds: float,
    ) -> None:
        self.request = request
        self.outcome: Literal["open", "complete", "cancelled", "failed"] = "open"
        self._answers, self._bodies, self._prompts, self._metrics = answers, bodies, prompts, metrics
        self._options = request.stream_options or StreamOptions()
        self._began = time.perf_counter()
        self._last = [0.0] * len(answers)
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._give_up, seconds)

    @property
    def has_ended(self) -> bool:
        """Whether all answers have been read to their ends."""
        return all(answer.result is not None for answer in self._answers)

    def close(self) -> None:
        """Cancels what is still being written; a reply that was not read to its end counts as cancelled."""
        self._deadline.cancel()
        if self.outcome == "open":
            self.outcome = "cancelled"
            self._metrics.cancelled.inc()
        for answer in self._answers:
            if answer.result is None:
                answer.stream.cancel()

    @property
    def usage(self) -> Usage:
        """The numbers of tokens at the end."""
        asked = self._answers[:: len(self._answers) // len(self._prompts)]
        usage = self._usage_so_far()
        cached = sum(answer.finished.cached_prompt_tokens for answer in asked)
        usage["prompt_tokens_details"] = CachedTokens(cached_tokens=cached)
        return usage

    async def whole(self) -> str:
        """The whole reply, as JSON; raises ``SelfSpecError`` if the model failed."""
        with self._observed():
            async for answer, pieces in side_by_side(self._answers):
                self._take(answer, pieces)
        size = sum(len(answer.pieces) + len(answer.prompt) for answer in self._answers)
        if self.request.alternatives is None and size <= _SMALL:
            return self._whole_body()
        # Of some size, such as one object for each alternative of each token. The event loop takes turns with threads.
        return await to_thread.run_sync(self._whole_body, limiter=_ONE)

    async def stream(self) -> AsyncGenerator[str, None]:
        """The reply as server-sent events, those of a step in one text, since each text wakes server and client.

        An error on the way ends it, without ``[DONE]``.
        """
        bodies, answers = self._bodies, self._answers
        try:
            with self._observed():
                begin = chain(bodies.start(self._usage_so_far()), *map(bodies.first, answers))
                if events := "".join(map(self._event, begin)):
                    yield events
                async for answer, pieces in side_by_side(answers):
                    events = self._events(answer, pieces)
                    if events and not self.has_ended:
                        yield events
            yield "".join((events, *map(self._event, bodies.end(answers, self.usage)), bodies.done))
        except Exception as error:
            yield "".join(map(bodies.event, bodies.failed(as_api_error(error))))
            if not isinstance(error, SelfSpecError):
                raise

    def ping(self) -> str:
        """What says in the stream that it is alive, where no event came for a while."""
        return self._bodies.ping()

    def _events(self, answer: Answer, pieces: Sequence[TextPiece]) -> str:
        """The events of an answer's next pieces, or of its end."""
        reports = self.request.speculative.report
        added = self._bodies.chunk(answer, pieces, self._take(answer, pieces))
        events = [self._event(body, partial(answer.report_pieces, pieces) if reports else None) for body in added]
        if not pieces:
            events += [self._event(body, answer.report if reports else None) for body in self._bodies.last(answer)]
        return "".join(events)

    def _event(self, body: SentEvent, report: Callable[[], Report] | None = None) -> str:
        """An event; chunks of OpenAI's interfaces with the report and the numbers of tokens that were asked for."""
        if self._bodies.takes_reports:
            options = self._options
            more: dict[str, Any] = {} if report is None else {"selfspec": report()}
            if options.include_usage and "usage" not in body.fields:
                more["usage"] = self._usage_so_far() if options.continuous_usage_stats else None
            body = SentEvent({**body.fields, **more}) if more else body
        return self._bodies.event(body)

    def _whole_body(self) -> str:
        body = self._bodies.whole(self._answers, self.usage)
        if self.request.speculative.report and self._bodies.takes_reports:
            body = SentEvent({**body.fields, "selfspec": self._answers[0].report()})
        return body.to_json()

    def _give_up(self, seconds: float) -> None:
        late = RequestTimeoutError(f"the answer was not complete after {seconds:g} seconds; ask for less")
        for answer in self._answers:
            answer.stream.cancel(late)

    def _usage_so_far(self) -> Usage:
        prompt, new = sum(self._prompts), sum(len(answer.pieces) for answer in self._answers)
        usage = Usage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new)
        if reasoning := sum(answer.reasoning_tokens for answer in self._answers):
            usage["completion_tokens_details"] = CompletionDetails(reasoning_tokens=reasoning)
        return usage

    def _take(self, answer: Answer, pieces: Sequence[TextPiece]) -> list[Growth]:
        """Adds the next pieces of an answer, or its end, and measures when they came."""
        now = time.perf_counter()
        if not pieces:
            added = answer.add(pieces)
            self._metrics.ended(answer.finished, answer.savings, now - self._began)
            return added
        if answer.pieces:
            self._metrics.between(now - self._last[answer.index], len(pieces))
        else:
            self._metrics.first_token.observe(now - self._began)
        self._last[answer.index] = now
        return answer.add(pieces)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Closes the reply at the end, and counts how it ended."""
        try:
            yield
            self.outcome = "complete"
        except Exception:
            self.outcome = "failed"
            self._metrics.failed.inc()
            raise
        finally:
            self.close()


async def side_by_side(answers: Sequence[Answer]) -> AsyncIterator[tuple[Answer, list[TextPiece]]]:
    """Reads the streams of several answers as they grow: an answer with its next pieces; without pieces at its end.

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
        """Queues the pieces of an answer, then none, or the error that ended it."""
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
