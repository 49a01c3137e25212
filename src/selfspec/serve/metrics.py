"""Metrics for Prometheus, under vLLM's names, so that dashboards for vLLM show them; the estimate of the speedup."""

import collections
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from selfspec.async_engine import EngineStats
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.types import Generation, Round

disable_created_metrics()  # type: ignore[no-untyped-call]  # when each was made says nothing

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_TOGETHER = 512
"""Rounds of a request that are counted together in its speedup."""

_FADE = 0.9
"""What an answer's weight in the speedup is multiplied by with every answer after it."""


class Savings:
    """Seconds that the rounds of a request took, and those that plain decoding would have taken for the same tokens.

    ``costs`` are of the target's forward and follow the verification of all rounds; ``None`` gives no estimate. Rounds
    are counted some at a time, or when a figure is read, since that takes as long as all else that a piece of text
    costs a server.
    """

    def __init__(self, costs: LiveCosts | None) -> None:
        self._costs = costs
        self._plain = self._spent = 0.0
        self._noted: list[Round] = []
        self._sequences = 1

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of plain decoding, and of the rounds."""
        self._count()
        return self._plain, self._spent

    @property
    def speedup(self) -> float | None:
        """The speedup so far; ``None`` before there is an estimate."""
        plain, spent = self.seconds
        return plain / spent if plain and spent else None

    def note(self, records: Sequence[Round], sequences: int) -> None:
        """Takes note of rounds, whose seconds are one sequence's share, and of how many sequences ran.

        Each sequence is taken to have verified as many rows as this one.
        """
        if max(1, sequences) != self._sequences or len(self._noted) >= _TOGETHER:
            self._count()
        self._sequences = max(1, sequences)
        self._noted += records

    def _count(self) -> None:
        """Counts the rounds since the last call."""
        records, sequences, self._noted = self._noted, self._sequences, []
        if self._costs is None or not records:
            return
        rows = [sequences * (1 + record.candidates) for record in records]
        self._costs.note(rows, sequences * sum(record.seconds.verify for record in records))
        step = self._costs(sequences) / sequences
        for record in records:
            self._plain += len(record.token_ids) * (step + record.seconds.other)
            self._spent += record.seconds.total


class Metrics(Collector):
    """The metrics of one server, with its model's served name as a label."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self._model, self._stats = model, stats
        self._intervals, self._seconds = [0] * (len(_SECONDS) + 1), 0.0
        self._plain = self._spent = 0.0
        self.registry.register(self)
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts")
        self._new = self._counter("vllm:generation_tokens", "Tokens of answers")
        self._ended = self._counter("vllm:request_success", "Answers that ended, by why", "finished_reason")
        self.cancelled = self._counter("selfspec:request_cancelled", "Answers that clients gave up")
        self.failed = self._counter("selfspec:request_failed", "Answers that failed")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds with a draft")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self._accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by place in the draft", "position"
        )
        self._responses = self._counter("selfspec:http_responses", "Answers by status", "status")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Time to the first token", _SECONDS)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Time of whole answers", _SECONDS)
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._answers = self._histogram("vllm:request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._speedup = Gauge(
            "selfspec:speedup_estimate",
            "Speed of the last answers by that of plain decoding, as estimated; 0 before the first",
            ["model_name"],
            registry=self.registry,
        ).labels(model)

    def ended(self, result: Generation, savings: Savings, seconds: float) -> None:
        """Counts an answer that was written to its end."""
        self._prompt.inc(result.prompt_token_count)
        self._new.inc(result.new_token_count)
        self._ended.labels(self._model, "length" if result.finish_reason == "length" else "stop").inc()
        self._drafts.inc(sum(record.drafted > 0 for record in result.rounds))
        self._drafted.inc(result.drafted)
        self._accepted.inc(result.accepted)
        rounds = collections.Counter(record.accepted for record in result.rounds)
        reached = list(accumulate(rounds[count] for count in range(max(rounds, default=0), 0, -1)))
        for position, count in enumerate(reversed(reached)):
            self._accepted_at.labels(self._model, str(position)).inc(count)
        self._whole.observe(seconds)
        self._prompts.observe(result.prompt_token_count)
        self._answers.observe(result.new_token_count)
        plain, spent = savings.seconds
        self._plain, self._spent = _FADE * self._plain + plain, _FADE * self._spent + spent
        if self._spent:
            self._speedup.set(self._plain / self._spent)

    def response(self, status: int) -> None:
        """Counts the status of an answer."""
        self._responses.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, ["model_name", *labels], registry=self.registry)
        return counter if labels else counter.labels(self._model)  # which shows it with 0 from the start

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)

    def between(self, seconds: float, tokens: int) -> None:
        """Counts tokens that arrived together, ``seconds`` after the ones before; each gets an equal share."""
        self._intervals[bisect_left(_SECONDS, seconds / tokens)] += tokens
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """Reads the intervals between tokens, of which several count at once, and the engine's gauges and counters."""
        labels = ["model_name"]
        intervals = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Time between tokens", labels=labels)
        counts = zip((*map(str, _SECONDS), "+Inf"), accumulate(self._intervals), strict=True)
        intervals.add_metric([self._model], list(counts), self._seconds)
        yield intervals
        stats = self._stats()
        usage = stats.cache_bytes / stats.cache_limit if stats.cache_limit else 0.0
        prefixes = stats.prefix_cache
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, text, value in (
            (gauge, "num_requests_running", "Requests that are being answered", stats.running),
            (gauge, "num_requests_waiting", "Requests that wait", stats.waiting),
            (gauge, "kv_cache_usage_perc", "Share of the memory for keys and values in use, 0 to 1", usage),
            (counter, "prefix_cache_queries", "Tokens of prompts looked up in the prefix cache", prefixes.query_tokens),
            (counter, "prefix_cache_hits", "Tokens of prompts found in the prefix cache", prefixes.hit_tokens),
        ):
            metric = kind(f"vllm:{name}", text, labels=labels)
            metric.add_metric([self._model], value)
            yield metric
