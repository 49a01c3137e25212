"""A choice of an answer as it grows: what of its tokens is text, what is a call of a tool."""

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.serve.backend import Ended, Token
from selfspec.serve.responses import CachedTokens, FinishReason, Report, ReportedToken, Usage
from selfspec.serve.stop_text import StopText
from selfspec.serve.tool_calls import ParsedCall, ToolCallParser


@dataclass(frozen=True)
class Rules:
    """What makes a text of tokens; the same for all choices of a request.

    Attributes:
        stop: strings that the text ends before.
        include_stop: leave the stop string in the text.
        tools: look for calls of tools.
        logprobs: number of alternatives to report with each token; ``None`` for no log-probabilities.
        report: say who drafted each token.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    tools: bool = False
    logprobs: int | None = None
    report: bool = False


@dataclass(frozen=True)
class Addition:
    """What some tokens add to a choice."""

    text: str
    calls: tuple[ParsedCall, ...]
    tokens: tuple[Token, ...]

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.tokens)


class Choice:
    """One choice.

    Args:
        index: among the choices of the request.
        rules: of the request.
        prompt: text that it begins with, where the prompt is echoed.

    Attributes:
        text: so far.
        calls: of tools, so far.
        tokens: so far.
        ended: how it ended; ``None`` while it grows.
    """

    def __init__(self, index: int, rules: Rules, prompt: str = "") -> None:
        self.index, self.rules, self.prompt = index, rules, prompt
        self.text = ""
        self.calls: list[ParsedCall] = []
        self.tokens: list[Token] = []
        self.ended: Ended | None = None
        self._stop = StopText(rules.stop, include=rules.include_stop)
        self._tools = ToolCallParser() if rules.tools else None

    def take(self, tokens: Sequence[Token]) -> Addition:
        """Takes the tokens of a step."""
        self.tokens += tokens
        return self._add(self._stop.push("".join(token.text for token in tokens)), tokens, last=False)

    def end(self, ended: Ended) -> Addition:
        """Takes its end; gives what was held back until then."""
        self.ended = ended
        return self._add(self._stop.flush(), (), last=True)

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended, in the words of the API."""
        assert self.ended is not None, "the choice has not ended"
        if self.calls:
            return "tool_calls"
        return "length" if self.ended.finish_reason == "length" else "stop"

    @property
    def report(self) -> Report:
        """What drafts were worth."""
        ended = self.ended
        assert ended is not None, "the choice has not ended"
        return Report(
            method=ended.method,
            rounds=ended.rounds,
            drafted_tokens=ended.drafted,
            accepted_tokens=ended.accepted,
            acceptance_rate=ended.acceptance_rate,
            tokens_per_second=ended.tokens_per_second,
            speedup_estimate=ended.speedup,
        )

    def _add(self, text: str, tokens: Sequence[Token], *, last: bool) -> Addition:
        calls: list[ParsedCall] = []
        if self._tools is not None:
            text, calls = self._tools.push(text)
            if last:
                rest, more = self._tools.flush()
                text, calls = text + rest, calls + more
        self.text += text
        self.calls += calls
        return Addition(text, tuple(calls), tuple(tokens))


def report_tokens(tokens: Sequence[Token]) -> Report:
    """The report of a chunk: its tokens, and what drafts have been worth so far."""
    report = Report(
        tokens=[ReportedToken(text=token.text, origin=token.origin, drafted_by=token.drafted_by) for token in tokens]
    )
    progress = tokens[-1].progress if tokens else None
    if progress is not None and progress.drafted:
        report.acceptance_rate = progress.acceptance_rate
    if progress is not None and progress.speedup is not None:
        report.speedup_estimate = progress.speedup
    return report


def usage(ends: Sequence[Ended], prompts: int) -> Usage:
    """The numbers of tokens of a request.

    Args:
        ends: how each of its choices ended, those of a prompt one after the other.
        prompts: number of prompts; the choices of a prompt count it once.
    """
    each = len(ends) // prompts
    prompt, new = sum(end.prompt_tokens for end in ends[::each]), sum(end.new_tokens for end in ends)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=new,
        total_tokens=prompt + new,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(end.cached_tokens for end in ends[::each])),
    )
