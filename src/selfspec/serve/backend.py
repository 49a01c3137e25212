"""What answers requests: an engine in this process, or several in processes of their own."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from selfspec.types import FinishReason, SamplingParams, TokenLogprobs, TokenOrigin


@dataclass(frozen=True)
class ModelInfo:
    """The model that a backend serves.

    Attributes:
        tokenizer: for the requests' texts; a copy that the engine does not use.
        vocab_size: number of token ids.
        context: tokens of the context.
        method: name of the method where a request names none.
        methods: names of the methods that a request may name.
        learns: whether the method learns between requests.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    context: int
    method: str
    methods: tuple[str, ...]
    learns: bool = False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What drafts have been worth in an answer so far.

    Attributes:
        drafted: tokens that were drafted.
        accepted: those of them that were accepted.
        plain_seconds: what plain decoding would have taken for the rounds, as estimated; 0 if nothing is known.
        round_seconds: what they took.
    """

    drafted: int
    accepted: int
    plain_seconds: float = 0.0
    round_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ drafted, 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def speedup(self) -> float | None:
        """Speed ÷ that of plain decoding, as estimated; ``None`` if nothing is known."""
        return self.plain_seconds / self.round_seconds if self.plain_seconds and self.round_seconds else None


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        text: text that has become certain with it; may be empty.
        token_id: the token.
        origin: who chose it first.
        drafted_by: what drafted it; ``None`` where nothing did.
        logprob: its log-probability, if it was asked for.
        progress: of the answer, with the last token of a step.
    """

    text: str
    token_id: int
    origin: TokenOrigin
    drafted_by: str | None = None
    logprob: TokenLogprobs | None = None
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Ended(Progress):
    """How an answer ended, and what drafts were worth in all of it.

    Attributes:
        finish_reason: why.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them whose keys and values were in the prefix cache.
        new_tokens: tokens of the answer.
        method: what drafted.
        rounds: number of rounds.
        drafts: those of them that had a draft.
        accepted_at: how many were accepted at each place of a draft.
        tokens_per_second: of decoding, without the prompt.
        prompt_logprobs: of the prompt's tokens, the first ``None``; if they were asked for.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    method: str
    rounds: int
    drafts: int
    accepted_at: tuple[int, ...]
    tokens_per_second: float
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Load:
    """What a backend is doing.

    Attributes:
        running: requests that hold a place.
        waiting: requests that wait for one.
        cache_bytes: memory of keys and values in use.
        cache_limit: most of it; ``None`` if there is no limit.
        prefix_queries: tokens of prompts that were looked up in the prefix cache, since the start.
        prefix_hits: those of them that were found.
    """

    running: int = 0
    waiting: int = 0
    cache_bytes: int = 0
    cache_limit: int | None = None
    prefix_queries: int = 0
    prefix_hits: int = 0

    def __add__(self, other: "Load") -> "Load":
        limits = [load.cache_limit for load in (self, other) if load.cache_limit is not None]
        return Load(
            self.running + other.running,
            self.waiting + other.waiting,
            self.cache_bytes + other.cache_bytes,
            sum(limits) if limits else None,
            self.prefix_queries + other.prefix_queries,
            self.prefix_hits + other.prefix_hits,
        )


class Answer(Protocol):
    """An answer as it grows: an asynchronous iterator of the tokens of a step at a time.

    Iterating raises ``SelfSpecError`` where the model failed.
    """

    def __aiter__(self) -> AsyncIterator[Sequence[Token]]:
        """The answer itself."""
        ...

    async def __anext__(self) -> Sequence[Token]:
        """The tokens of the next step."""
        ...

    @property
    def ended(self) -> Ended:
        """How it ended, once it has been read to its end."""
        ...

    def cancel(self) -> None:
        """Gives it up; its place is free after the current step. Nothing happens if it has ended."""
        ...


class Backend(Protocol):
    """What the routes ask for answers."""

    @property
    def model(self) -> ModelInfo:
        """The model, once started."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it can take requests now."""
        ...

    async def start(self) -> None:
        """Makes it ready.

        Raises:
            SelfSpecError: it cannot be.
        """
        ...

    async def submit(
        self, token_ids: Sequence[int], params: SamplingParams, *, method: str | None, request_id: str
    ) -> Answer:
        """Asks for an answer.

        Args:
            token_ids: the prompt.
            params: how to choose tokens.
            method: what drafts; ``None`` for the server's own.
            request_id: for the log.

        Raises:
            SelfSpecError: the request does not fit, or too many wait.
        """
        ...

    def load(self) -> Load:
        """What it is doing."""
        ...

    async def close(self) -> None:
        """Ends it: running answers are cancelled, what was learned is saved."""
        ...

    def stop_now(self) -> None:
        """Ends processes of its own without waiting for anything; this process is about to end."""
        ...
