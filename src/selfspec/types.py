"""Results: plain frozen dataclasses; and the clock of a round."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from selfspec.model.kept import KeptSet
from selfspec.params import SamplingParams as SamplingParams
from selfspec.runtimes.chain import Path
from selfspec.runtimes.precision import Precision

Phase = Literal["select", "draft", "verify", "other"]
FinishReason = Literal["length", "eos", "stop_token", "stop_string", "stopping_criteria"]
TokenOrigin = Literal["prefill", "draft", "target"]
"""Who chose a token first: the target after the prompt, a draft that was accepted, or the target in a verification."""


@dataclass(frozen=True)
class PhaseSeconds:
    """The time of a round by phase, in seconds (on an accelerator: until the work was queued).

    Attributes:
        select: the method's planning, and learning from the round.
        draft: drafting.
        verify: the target's forward over the draft tokens.
        other: acceptance, cache bookkeeping, output.
    """

    select: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return self.select + self.draft + self.verify + self.other


class PhaseClock:
    """Adds up the wall time of the phases of a round."""

    def __init__(self, phase: Phase = "other") -> None:
        self._seconds: dict[Phase, float] = {"select": 0.0, "draft": 0.0, "verify": 0.0, "other": 0.0}
        self._phase = phase
        self._last = time.perf_counter()

    def switch(self, phase: Phase) -> None:
        """Counts the time since the last call towards the phase so far; another phase begins."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._last
        self._last, self._phase = now, phase

    def move(self, seconds: float, source: Phase, to: Phase) -> None:
        """Counts some of the seconds of one phase, the last included, towards another one."""
        self.switch(self._phase)
        self._seconds[source] -= seconds
        self._seconds[to] += seconds

    @property
    def seconds(self) -> PhaseSeconds:
        """The time of each phase so far."""
        self.switch(self._phase)
        return PhaseSeconds(**self._seconds)


@dataclass(frozen=True)
class Forecast:
    """What a method expected of a round when it planned it.

    Attributes:
        tokens_per_second: of the round.
        plain_tokens_per_second: of autoregressive decoding at that time.
        held_back: drafts nothing because the request has not saved the time that a draft may lose.
    """

    tokens_per_second: float
    plain_tokens_per_second: float
    held_back: bool = False

    @property
    def speedup(self) -> float:
        """Tokens per second of the round divided by those of autoregressive decoding."""
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class Round:
    """One round: draft, verify, accept, commit.

    Attributes:
        drafted: draft tokens that could have been accepted in this round: the length of the deepest drafted path.
        candidates: all draft tokens that were verified; more than ``drafted`` where the draft was a tree.
        accepted: draft tokens that were accepted and committed.
        token_ids: tokens committed by this round: the accepted ones, then the correction or the bonus.
        kept: the sublayers that drafted; ``None`` where no layers did.
        threshold: the confidence below which the draft stops; ``None`` without such a rule.
        seconds: where the time went.
        guessed: draft tokens that were guessed before layers drafted them, and so took no draft forward.
        drafted_by: name of the strategy or stage that drafted; ``None`` if the method has only one.
        precision: of the weights that drafted; ``None`` for the target's own, or where no layers drafted.
        forecast: what the method expected of it; ``None`` where it makes no forecasts.
        probes: rows of the verification in which the token was not known, for the next round.
        drafting: whether layers drafted natively, and why not; ``None`` where no layers did. Not compared, not in JSON.
        verification: whether the target verified natively, and why not. Not compared, not in JSON.
    """

    drafted: int
    candidates: int
    accepted: int
    token_ids: tuple[int, ...]
    kept: KeptSet | None
    threshold: float | None
    seconds: PhaseSeconds
    guessed: int = 0
    drafted_by: str | None = None
    precision: Precision | None = None
    forecast: Forecast | None = None
    probes: int = 0
    drafting: Path | None = field(default=None, compare=False)
    verification: Path | None = field(default=None, compare=False)

    @property
    def attention_share(self) -> float | None:
        """Kept share of attention sublayers in the draft, 0 to 1; ``None`` where no layers drafted."""
        return None if self.kept is None else self.kept.attention_share

    @property
    def mlp_share(self) -> float | None:
        """Kept share of MLP sublayers in the draft, 0 to 1; ``None`` where no layers drafted."""
        return None if self.kept is None else self.kept.mlp_share

    def to_dict(self) -> dict[str, Any]:
        """The round as a JSON object: attributes but paths, ``kept`` as a list of sublayers, ``seconds`` by phase."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        for name in ("seconds", "precision", "forecast"):
            values[name] = None if values[name] is None else asdict(values[name])
        kept = None if self.kept is None else list(self.kept.sublayers)
        return {**values, "kept": kept, "token_ids": list(self.token_ids)}


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and the most probable tokens at its position.

    Natural logarithms of probabilities under the model's own distribution: the softmax of its logits in float32, before
    penalties, temperature, filters and other logits processors.

    Attributes:
        token_id: the token.
        logprob: its log-probability.
        top: as many of the most probable tokens as were requested, with their log-probabilities, most probable first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as a JSON object."""
        top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in self.top]
        return {"token_id": self.token_id, "logprob": self.logprob, "top": top}


_REPORTED = (
    *("text", "token_ids", "prompt_token_count", "new_token_count", "method", "settings", "seconds"),
    *("tokens_per_second", "round_count", "drafted", "accepted", "acceptance_rate", "mean_generated_length"),
    *("finish_reason", "peak_memory_bytes", "cached_prompt_tokens"),
)
"""What a generation reports in JSON, in this order."""


@dataclass(frozen=True)
class Generation:
    """A finished output.

    Attributes:
        text: the output, decoded without special tokens.
        token_ids: the output's tokens, a final end-of-sequence token included.
        origins: for each token who chose it first.
        prompt_token_count: tokens of the prompt.
        method: name of the method that drafted.
        settings: the method's settings.
        finish_reason: why the output ended.
        seconds: wall time of the whole request.
        prefill_seconds: wall time up to the first token.
        rounds: what happened, round by round.
        peak_memory_bytes: peak of the device's allocated memory on an accelerator, of the process elsewhere.
        cached_prompt_tokens: tokens of the prompt whose keys and values came from the prefix cache.
        logprobs: log-probabilities of the output's tokens, if requested.
        prompt_logprobs: those of the prompt's tokens, if requested; ``None`` for the first of them, which
            nothing predicts.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    prompt_token_count: int
    method: str
    settings: Mapping[str, Any]
    finish_reason: FinishReason
    seconds: float
    prefill_seconds: float
    rounds: tuple[Round, ...] = field(repr=False)
    peak_memory_bytes: int
    cached_prompt_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = field(default=None, repr=False)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = field(default=None, repr=False)

    @property
    def new_token_count(self) -> int:
        """Tokens of the output."""
        return len(self.token_ids)

    @property
    def round_count(self) -> int:
        """Number of rounds, that is of target forwards after the prefill."""
        return len(self.rounds)

    @property
    def drafted(self) -> int:
        """Draft tokens, all rounds together."""
        return sum(record.drafted for record in self.rounds)

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(record.accepted for record in self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ drafted, 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_generated_length(self) -> float:
        """Tokens committed by rounds ÷ rounds (one target forward each), prefill aside; 0 without a round."""
        return sum(len(record.token_ids) for record in self.rounds) / len(self.rounds) if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first ÷ seconds after the first token: decoding without the prefill."""
        elapsed = self.seconds - self.prefill_seconds
        return max(0, self.new_token_count - 1) / elapsed if elapsed > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The object that ``selfspec generate --json`` prints."""
        scores = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        reported = {
            name: [None if each is None else each.to_dict() for each in tokens]
            for name, tokens in scores.items()
            if tokens is not None
        }
        values = {name: getattr(self, name) for name in _REPORTED}
        return {**values, "token_ids": list(self.token_ids), "settings": dict(self.settings), **reported}


@dataclass(frozen=True)
class TextPiece:
    """A piece of a stream.

    Attributes:
        text: text that is now certain; may be empty while a character is incomplete.
        token_id: the token that completed it.
        origin: who chose the token first.
        logprobs: the token's log-probability, if requested.
    """

    text: str
    token_id: int
    origin: TokenOrigin
    logprobs: TokenLogprobs | None = None
