"""A request: a prompt to continue, how its tokens are chosen, what has come of it so far, and the events of a step."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.decoding.drafter import DraftingMethod
from selfspec.decoding.output import Output
from selfspec.decoding.suffixes import SuffixAutomaton
from selfspec.limits import is_out_of_memory, out_of_memory
from selfspec.model.low_rank import Adapter
from selfspec.model.ranks import is_lost_rank, lost_rank
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Rule
from selfspec.types import Generation, Round

STEP_TOKENS, ROUND_TOKENS = 256, 128
"""New tokens for which a request takes memory at a time, and those for which it has some before a round, at least."""


@dataclass(eq=False)
class Request:
    """A prompt to continue. Nothing is computed or allocated for it before it is admitted.

    ``logprobs`` and ``prompt_logprobs`` are the number of alternatives to report with each token, ``label`` is what
    errors call the request, ``listener`` is called after each of its events, times are those of ``time.perf_counter``,
    and ``cached_tokens`` counts the tokens of the prompt whose keys and values were in the prefix cache, where only
    requests with the same ``cache_salt`` find them. ``earlier`` has texts of earlier requests with that salt.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    rule: Rule
    processor: ScoreProcessor
    output: Output
    method: DraftingMethod
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    label: str = ""
    cache_salt: str = ""
    adapter: Adapter | None = None
    earlier: SuffixAutomaton | None = None
    method_name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    listener: Callable[[], None] | None = None
    submitted_at: float = field(default_factory=time.perf_counter, init=False)
    started_at: float | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)
    ended_at: float | None = field(default=None, init=False)
    rounds: list[Round] = field(default_factory=list, init=False)
    cached_tokens: int = field(default=0, init=False)
    peak_memory_bytes: int = field(default=0, init=False)
    error: Exception | None = field(default=None, init=False)

    @property
    def ended(self) -> bool:
        """Whether it is finished, failed or cancelled."""
        return self.ended_at is not None

    def bytes(self, target: Target, new_tokens: int | None = None) -> int:
        """Bytes of its keys and values, token ids, and states for its method, at its end or with some new tokens."""
        fixed, each = bytes_of(self.method, len(self.prompt_ids), target)
        most = self.max_new_tokens
        return fixed + each * (most if new_tokens is None else min(new_tokens, most))

    def first_bytes(self, target: Target) -> int:
        """Bytes that it holds from its admission on: at once all, or as its output grows."""
        late = target.takes_memory_late(len(self.prompt_ids) + self.max_new_tokens)
        return self.bytes(target, ROUND_TOKENS + STEP_TOKENS if late else None)

    @property
    def result(self) -> Generation:
        """The finished output; a ``RuntimeError`` where it is not complete."""
        return self.result_with(None)

    def result_with(self, text: str | None) -> Generation:
        """The finished output with its text, which is decoded where it is not known."""
        output = self.output
        if output.finish_reason is None or self.ended_at is None:
            raise RuntimeError("the stream ended before the output was complete")
        started, first_token = self.started_at or 0.0, self.first_token_at or 0.0
        return Generation(
            text=output.decode() if text is None else text,
            token_ids=tuple(output.token_ids),
            origins=tuple(output.origins),
            prompt_token_count=len(self.prompt_ids),
            method=self.method_name,
            settings=self.settings,
            finish_reason=output.finish_reason,
            seconds=self.ended_at - started,
            prefill_seconds=first_token - started,
            rounds=tuple(self.rounds),
            peak_memory_bytes=self.peak_memory_bytes,
            cached_prompt_tokens=self.cached_tokens,
            logprobs=None if self.logprobs is None else tuple(output.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else (None, *output.prompt_logprobs),
        )


def bytes_of(method: DraftingMethod, prompt_tokens: int, target: Target) -> tuple[int, int]:
    """What a request holds, beside each new token, and for each of them: see ``Request.bytes``."""
    needs = method.needs
    rows = min(needs.prompt_rows, prompt_tokens) * len(needs.prompt_states)
    states = rows * target.hidden_size * target.dtype.itemsize
    each = target.slot_bytes + 8 + needs.token_bytes
    # After prompt and output the method has slots that it writes to.
    return states + prompt_tokens * each + max(needs.sibling_rows, needs.probe_rows) * target.slot_bytes, each


@dataclass(frozen=True)
class Event:
    """What happened to a request in a step; ``at`` is when, in seconds of ``time.perf_counter``."""

    request: Request
    at: float = field(default_factory=time.perf_counter, kw_only=True)


@dataclass(frozen=True)
class Started(Event):
    """The request was admitted."""


@dataclass(frozen=True)
class Prefilled(Event):
    """Its prompt was read to its end, and the first token chosen."""


@dataclass(frozen=True)
class Advanced(Event):
    """A round ended."""

    round: Round


@dataclass(frozen=True)
class Finished(Event):
    """Its output ended."""


@dataclass(frozen=True)
class Failed(Event):
    """It cannot be admitted, or its sequence cannot go on; the others can."""

    error: Exception

    @staticmethod
    def by(request: Request, error: Exception) -> "Failed":
        """A request that an exception ended.

        One that means that memory ran out is replaced: its frames would keep the tensors alive that did not fit. So is
        one that means that another process was lost.
        """
        if is_out_of_memory(error):
            error = out_of_memory(len(request.prompt_ids), request.max_new_tokens)
        elif is_lost_rank(error):
            error = lost_rank(error)
        return Failed(request, error)
