"""One answer of a request, which OpenAI's API calls a choice, as it grows."""

from collections.abc import Sequence

from selfspec.async_engine import RequestStream
from selfspec.serve.metrics import Savings
from selfspec.serve.requests import GenerationRequest
from selfspec.serve.responses import ApiFinishReason, CalledFunction, Report, ReportedToken
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.tools import StopText, ToolCallParser
from selfspec.types import Generation, TextPiece


class Answer:
    """One answer as it grows: ``text``, ``calls`` and ``pieces`` so far, and at the end its ``result``.

    ``method`` drafts where a round does not say what does. ``echoed`` are the texts and ids of the prompt's tokens,
    where the text begins with the prompt.
    """

    def __init__(
        self,
        index: int,
        stream: RequestStream,
        request: GenerationRequest,
        engine: ServedEngine,
        method: str,
        echoed: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.index, self.stream, self.echoed = index, stream, echoed
        self.prompt = "".join(text for text, _ in echoed)
        self.text = ""
        self.calls: list[CalledFunction] = []
        self.pieces: list[TextPiece] = []
        self.result: Generation | None = None
        self.savings = Savings(engine.plain)
        self._engine, self._method = engine, method
        self._stop = StopText(request.stop_strings, include=request.include_stop_str_in_output)
        self._tools = ToolCallParser() if request.offered_tools else None
        self._noted = self._drafted = self._accepted = 0
        self._round, self._left = -1, 1  # of the next token to report; the first one is the prompt's, of no round

    def add(self, pieces: Sequence[TextPiece]) -> tuple[str, list[CalledFunction]]:
        """Takes the next pieces, or without pieces the end; returns the text and the calls that they complete."""
        self.pieces += pieces
        self._note_rounds()
        calls: list[CalledFunction] = []
        if pieces:
            text = self._stop.push("".join(piece.text for piece in pieces))
        else:
            self.result = self.stream.result
            text = self._stop.flush()
        if self._tools is not None:
            text, calls = self._tools.push(text)
            if not pieces:
                rest, more = self._tools.flush()
                text, calls = text + rest, calls + more
        self.text += text
        self.calls += calls
        return text, calls

    @property
    def finished(self) -> Generation:
        """The finished output."""
        assert self.result is not None, "the answer has not ended"
        return self.result

    @property
    def finish_reason(self) -> ApiFinishReason:
        """Why it ended, in the words of the API."""
        if self.calls:
            return "tool_calls"
        return "length" if self.finished.finish_reason == "length" else "stop"

    def report(self) -> Report:
        """What drafts were worth in all of it."""
        result = self.finished
        return Report(
            method=result.method,
            rounds=result.round_count,
            drafted_tokens=result.drafted,
            accepted_tokens=result.accepted,
            acceptance_rate=result.acceptance_rate,
            tokens_per_second=result.tokens_per_second,
            speedup_estimate=self.savings.speedup,
        )

    def report_pieces(self, pieces: Sequence[TextPiece]) -> Report:
        """What drafted each of the pieces, which follow those of the last call, and the rates so far."""
        report = Report(
            tokens=[
                ReportedToken(text=piece.text, origin=piece.origin, drafted_by=self._drafted_by(piece))
                for piece in pieces
            ]
        )
        if pieces and self._drafted:
            report.acceptance_rate = self._accepted / self._drafted
        if pieces and self.savings.speedup is not None:
            report.speedup_estimate = self.savings.speedup
        return report

    def _note_rounds(self) -> None:
        rounds, running = self.stream.rounds, self._engine.running
        for record in rounds[self._noted :]:
            self.savings.note(record, running)
            self._drafted += record.drafted
            self._accepted += record.accepted
        self._noted = len(rounds)

    def _drafted_by(self, piece: TextPiece) -> str | None:
        rounds = self.stream.rounds
        while self._left == 0:
            self._round += 1
            self._left = len(rounds[self._round].token_ids)
        self._left -= 1
        return (rounds[self._round].drafted_by or self._method) if piece.origin == "draft" else None
