"""One answer of a request, which OpenAI's API calls a choice, as it grows."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from selfspec.async_engine import RequestStream
from selfspec.serve.answer_bodies import ApiFinishReason, Report, ReportedToken
from selfspec.serve.formats.scanner import ScannedPart, Scanner
from selfspec.serve.metrics import Savings
from selfspec.serve.requests import GenerationRequest
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.stop_text import StopText
from selfspec.types import Generation, TextPiece


@dataclass(slots=True)
class Block:
    """A part of an answer: text, reasoning, or a call with its name, its id and the JSON of its arguments as text.

    It grows by ``pieces``: a text that is joined anew with each of them would be copied as often.
    """

    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Growth:
    """What some tokens add to an answer: text to one of its blocks, which may begin with it."""

    index: int
    block: Block
    text: str
    began: bool


class Answer:
    """One answer as it grows: its ``blocks`` and ``pieces`` so far, and at the end its ``result``.

    ``method`` drafts where a round does not say what does. ``echoed`` are the texts and ids of the prompt's tokens,
    where the text begins with the prompt. ``reader`` tells calls and reasoning from text; without one all is text.
    """

    def __init__(
        self,
        index: int,
        stream: RequestStream,
        request: GenerationRequest,
        engine: ServedEngine,
        method: str,
        echoed: Sequence[tuple[str, int]] = (),
        reader: Scanner | None = None,
    ) -> None:
        self.index, self.stream, self.echoed = index, stream, echoed
        self.prompt = "".join(text for text, _ in echoed)
        self.blocks: list[Block] = []
        self.reasoning_tokens = 0
        self.pieces: list[TextPiece] = []
        self.result: Generation | None = None
        self.savings = Savings(engine.plain)
        self._engine, self._method = engine, method
        self._stop = StopText(request.stop_strings, include=request.include_stop_str_in_output)
        self._reader, self._reports = reader, request.speculative.report
        self._noted = self._drafted = self._accepted = 0
        self._round, self._left = -1, 1  # of the next token to report; the first one is the prompt's, of no round

    def add(self, pieces: Sequence[TextPiece]) -> list[Growth]:
        """Takes the next pieces, or without pieces the end; returns what they add."""
        self.pieces += pieces
        self._note_rounds()
        parts: list[ScannedPart] = []
        if self._reader is None:
            text = self._stop.push("".join(piece.text for piece in pieces))
            parts = [ScannedPart("text", text)]
        else:
            for piece in pieces:
                parts += self._reader.push(self._stop.push(self._reader.marked(piece.token_id, piece.text)))
                self.reasoning_tokens += self._reader.thinking
        if not pieces:
            self.result = self.stream.result_with("".join(piece.text for piece in self.pieces))
            rest = self._stop.flush()
            parts += (
                [ScannedPart("text", rest)] if self._reader is None else self._reader.push(rest) + self._reader.flush()
            )
        grown: list[Growth] = []
        for part in parts:
            if part.text:
                self._grow(part, grown)
        return grown

    def _grow(self, part: ScannedPart, grown: list[Growth]) -> None:
        """Adds a part to the last block, or as a new one."""
        block = self.blocks[-1] if self.blocks else None
        if part.kind == "arguments":
            assert block is not None, "arguments follow the name of a call"
        elif part.kind == "call" or block is None or block.kind != part.kind:
            block = Block(part.kind, name=part.text if part.kind == "call" else "")
            self.blocks.append(block)
            grown.append(Growth(len(self.blocks) - 1, block, "", True))
            if part.kind == "call":
                return
        block.pieces.append(part.text)
        began = False
        if grown and grown[-1].block is block:
            last = grown.pop()
            part, began = ScannedPart(part.kind, last.text + part.text), last.began
        grown.append(Growth(len(self.blocks) - 1, block, part.text, began))

    @property
    def text(self) -> str:
        """The text, without calls and reasoning."""
        return self._joined("text")

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return self._joined("reasoning")

    @property
    def calls(self) -> list[Block]:
        """The calls of tools."""
        return [block for block in self.blocks if block.kind == "call"]

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._stop.found

    def _joined(self, kind: str) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def finished(self) -> Generation:
        """The finished output."""
        assert self.result is not None, "the answer has not ended"
        return self.result

    @property
    def finish_reason(self) -> ApiFinishReason:
        """Why it ended, in the words of the API."""
        is_cut = self.finished.finish_reason == "length"
        if self.calls and not (is_cut and not _is_json(self.calls[-1].text)):
            return "tool_calls"
        return "length" if is_cut else "stop"

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
            report["acceptance_rate"] = self._accepted / self._drafted
        if pieces and self.savings.speedup is not None:
            report["speedup_estimate"] = self.savings.speedup
        return report

    def _note_rounds(self) -> None:
        records = self.stream.rounds[self._noted :]
        self.savings.note(records, self._engine.queue.running)
        self._noted += len(records)
        if self._reports:
            self._drafted += sum(record.drafted for record in records)
            self._accepted += sum(record.accepted for record in records)

    def _drafted_by(self, piece: TextPiece) -> str | None:
        rounds = self.stream.rounds
        while self._left == 0:
            self._round += 1
            self._left = len(rounds[self._round].token_ids)
        self._left -= 1
        return (rounds[self._round].drafted_by or self._method) if piece.origin == "draft" else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
