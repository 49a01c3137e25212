"""What an ``AsyncEngine`` did so far, and does now."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from selfspec.decoding.prefix_cache import PrefixCacheStats
from selfspec.decoding.request import Advanced, Event, Failed, Finished, Prefilled, Request


@dataclass(frozen=True)
class MethodCounts:
    """What the requests of one method did.

    Attributes:
        requests: how many have ended, in whichever way.
        tokens: tokens of their outputs.
        rounds: number of rounds.
        drafted: draft tokens.
        accepted: draft tokens that were accepted.
    """

    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and what it holds now.

    Attributes:
        alive: its thread runs; without it, no requests are taken.
        running: requests that are being read or written.
        waiting: requests that wait to be admitted.
        finished, cancelled, failed: requests that ended, by how.
        prompt_tokens: tokens of the prompts that were read, those found in the prefix cache included.
        output_tokens: tokens of outputs.
        steps: steps of the scheduler.
        longest_step_seconds: the longest of them.
        methods: by name of the method.
        cache_bytes: what the requests that run hold for keys and values.
        cache_limit: most bytes of these and of the prefix cache.
        prefix_cache: keys and values of earlier texts.
    """

    alive: bool = False
    running: int = 0
    waiting: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    longest_step_seconds: float = 0.0
    methods: Mapping[str, MethodCounts] = field(default_factory=dict)
    cache_bytes: int = 0
    cache_limit: int = 0
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)


class Tally:
    """Counts what the thread of an engine does, for other threads to read.

    Counting is part of every step, so it adds to plain numbers, from which ``stats`` is made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._longest_step = 0.0
        self._methods: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def step(self, events: Iterable[Event], seconds: float) -> None:
        """Counts a step."""
        with self._lock:
            self._counts["steps"] += 1
            self._longest_step = max(seconds, self._longest_step)
            for event in events:
                self._count(event, self._methods[event.request.method_name])

    def ended(self, request: Request, how: Literal["cancelled", "failed"]) -> None:
        """Counts a request that no event ended."""
        with self._lock:
            self._end(how, self._methods[request.method_name])

    @property
    def stats(self) -> EngineStats:
        """The counts so far; what the engine holds now is not among them."""
        with self._lock:
            methods = {name: MethodCounts(**counts) for name, counts in self._methods.items()}
            return EngineStats(**self._counts, longest_step_seconds=self._longest_step, methods=methods)  # type: ignore[arg-type]

    def _count(self, event: Event, method: Counter[str]) -> None:
        match event:
            case Prefilled():
                self._counts["prompt_tokens"] += len(event.request.prompt_ids)
                self._count_tokens(min(1, event.request.max_new_tokens), method)
            case Advanced():
                self._count_tokens(len(event.round.token_ids), method)
                method["rounds"] += 1
                method["drafted"] += event.round.drafted
                method["accepted"] += event.round.accepted
            case Finished() if event.request.error is None:
                self._end("finished", method)
            case Failed() if event.request.error is event.error:
                self._end("failed", method)

    def _count_tokens(self, tokens: int, method: Counter[str]) -> None:
        self._counts["output_tokens"] += tokens
        method["tokens"] += tokens

    def _end(self, how: Literal["finished", "cancelled", "failed"], method: Counter[str]) -> None:
        self._counts[how] += 1
        method["requests"] += 1
