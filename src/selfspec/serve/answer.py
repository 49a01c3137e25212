"""One answer of a request as it grows: what of its tokens is text or a call of a tool, and what drafts were worth."""

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.async_engine import RequestStream
from selfspec.serve.responses import ApiFinishReason, CachedTokens, Report, ReportedToken, Usage
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.speedup import Savings
from selfspec.serve.tools import ParsedCall, StopText, ToolCallParser
from selfspec.types import Generation, TextPiece


@dataclass(frozen=True)
class AnswerOptions:
    """How a request wants its answers.

    Attributes:
        stop: strings that the text ends before.
        include_stop: leave the stop string in the text.
        tools: look for calls of tools.
        logprobs: number of alternatives to report with each token; ``None`` for no log-probabilities.
        report: say what drafted each token.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    tools: bool = False
    logprobs: int | None = None
    report: bool = False


class Answer:
    """One answer, which OpenAI's API calls a choice.

    Args:
        index: among the answers of the request.
        stream: gives its pieces.
        options: of the request.
        engine: writes it.
        method: what drafts where a round does not say it.
        prompt: text that it begins with, where the prompt is echoed.

    Attributes:
        text, calls, pieces: so far.
        result: the finished output; ``None`` while it grows.
        savings: what its rounds took, and plain decoding would have taken.
    """

    def __init__(
        self,
        index: int,
        stream: RequestStream,
        options: AnswerOptions,
        engine: ServedEngine,
        method: str,
        prompt: str = "",
    ) -> None:
        self.index, self.stream, self.options, self.prompt = index, stream, options, prompt
        self.text = ""
        self.calls: list[ParsedCall] = []
        self.pieces: list[TextPiece] = []
        self.result: Generation | None = None
        self.savings = Savings(engine.plain)
        self._engine, self._method = engine, method
        self._stop = StopText(options.stop, include=options.include_stop)
        self._tools = ToolCallParser() if options.tools else None
        self._noted = self._drafted = self._accepted = 0
        self._round, self._left = -1, 1  # of the next token to report; the first one is the prompt's, of no round

    def push(self, pieces: Sequence[TextPiece]) -> tuple[str, list[ParsedCall]]:
        """Takes the next pieces; returns the text and the calls that they add."""
        self.pieces += pieces
        self._note_rounds()
        return self._add(self._stop.push("".join(piece.text for piece in pieces)))

    def end(self) -> tuple[str, list[ParsedCall]]:
        """Takes the end of the stream; returns the text and the calls that were held back until then."""
        self._note_rounds()
        self.result = self.stream.result
        return self._add(self._stop.flush(), last=True)

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

    @property
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
            speedup_estimate=self._speedup,
        )

    def report_pieces(self, pieces: Sequence[TextPiece]) -> Report:
        """What drafted each of the pieces, which follow those of the last call, and what drafts have been worth."""
        tokens = [
            ReportedToken(text=piece.text, origin=piece.origin, drafted_by=self._drafted_by(piece)) for piece in pieces
        ]
        report = Report(tokens=tokens)
        if pieces and self._drafted:
            report.acceptance_rate = self._accepted / self._drafted
        if pieces and self._speedup is not None:
            report.speedup_estimate = self._speedup
        return report

    @property
    def _speedup(self) -> float | None:
        plain, spent = self.savings.plain_seconds, self.savings.round_seconds
        return plain / spent if plain and spent else None

    def _add(self, text: str, *, last: bool = False) -> tuple[str, list[ParsedCall]]:
        calls: list[ParsedCall] = []
        if self._tools is not None:
            text, calls = self._tools.push(text)
            if last:
                rest, more = self._tools.flush()
                text, calls = text + rest, calls + more
        self.text += text
        self.calls += calls
        return text, calls

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


def usage(answers: Sequence[Answer], prompts: int) -> Usage:
    """The numbers of tokens of a request; the answers to a prompt, which follow each other, count it once."""
    results = [answer.finished for answer in answers]
    asked = results[:: len(results) // prompts]
    prompt, new = sum(each.prompt_token_count for each in asked), sum(each.new_token_count for each in results)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=new,
        total_tokens=prompt + new,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(each.cached_prompt_tokens for each in asked)),
    )
