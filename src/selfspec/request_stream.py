"""The pieces of a request of an ``AsyncEngine``, as they become certain."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

from selfspec.decoding.request import Request
from selfspec.errors import RequestCancelledError, SelfSpecError
from selfspec.types import Generation, Round, TextPiece

Status = Literal["waiting", "reading", "writing", "finished", "cancelled", "failed"]


class RequestStream(AsyncIterator[TextPiece]):
    """The pieces of one output. Made by ``AsyncEngine.submit``; to be used in the event loop that called it.

    The request goes on whether the stream is read or not, until it ends or is cancelled. A task that stops reading
    before the end has to call ``cancel``, or the rest of the output is generated all the same.

    Attributes:
        request_id: as given to ``submit``.
        loop: the event loop it belongs to.
        request: what is decoded.
        ended_at: when the end arrived here, in seconds of ``time.perf_counter``; ``None`` before.
    """

    def __init__(
        self,
        request: Request,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        on_cancel: "Callable[[RequestStream], None]",
    ) -> None:
        self.request_id = request_id
        self.loop = loop
        self.request = request
        self.ended_at: float | None = None
        self._on_cancel = on_cancel
        self._pieces: deque[TextPiece] = deque()
        self._error: SelfSpecError | None = None
        self._arrived = asyncio.Event()

    async def __anext__(self) -> TextPiece:
        """The next piece.

        Raises:
            StopAsyncIteration: the output is complete.
            SelfSpecError: the request failed, was cancelled, or the engine was closed.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.ended_at is not None:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._pieces.popleft()

    async def next_pieces(self) -> list[TextPiece]:
        """The pieces that can be read without waiting; waits for one where there is none.

        Raises:
            StopAsyncIteration, SelfSpecError: as from ``__anext__``.
        """
        pieces = [await self.__anext__(), *self._pieces]
        self._pieces.clear()
        return pieces

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds so far, also of a request that was cancelled or failed; not a copy, so it grows."""
        return self.request.rounds

    @property
    def started_at(self) -> float | None:
        """When it was admitted, in seconds of ``time.perf_counter``; ``None`` before."""
        return self.request.started_at

    @property
    def first_token_at(self) -> float | None:
        """When it had its first token; ``None`` before."""
        return self.request.first_token_at

    @property
    def status(self) -> Status:
        """The state of the request."""
        if self.ended_at is not None:
            cancelled = isinstance(self._error, RequestCancelledError)
            return "finished" if self._error is None else "cancelled" if cancelled else "failed"
        if self.first_token_at is not None:
            return "writing"
        return "waiting" if self.started_at is None else "reading"

    @property
    def error(self) -> SelfSpecError | None:
        """Why the request ended before its output was complete; ``None`` if it did not."""
        return self._error

    @property
    def result(self) -> Generation:
        """The finished output; pieces need not have been read.

        Raises:
            SelfSpecError: the request failed or was cancelled.
            RuntimeError: it has not ended yet.
        """
        return self.result_with(None)

    def result_with(self, text: str | None) -> Generation:
        """``result`` with its text, the pieces joined, which is decoded again if it is not given."""
        if self._error is not None:
            raise self._error
        if self.ended_at is None:
            raise RuntimeError("the request has not ended yet; read its stream first")
        return self.request.result_with(text)

    def cancel(self, error: SelfSpecError | None = None) -> None:
        """Ends the request now: its memory is free before the next step. A request that has ended stays as it is.

        Args:
            error: what reading raises then; ``RequestCancelledError`` if not given.
        """
        if self.ended_at is None:
            self.deliver([], True, error or RequestCancelledError(f"request {self.request_id} was cancelled"))
            self._on_cancel(self)

    def deliver(self, pieces: list[TextPiece], ended: bool, error: SelfSpecError | None) -> None:
        """Adds pieces, and the end if it ended; called in the event loop."""
        if self.ended_at is not None:  # cancelled meanwhile
            return
        self._pieces.extend(pieces)
        if ended:
            self._error, self.ended_at = error, time.perf_counter()
        self._arrived.set()
