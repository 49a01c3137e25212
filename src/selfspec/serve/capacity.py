"""How much a server takes on: the options of ``selfspec serve`` that limit its requests. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from selfspec.choices import Choice, option


@dataclass(frozen=True)
class Limits(Choice):
    """How much a server takes on; ``None`` is no limit but the model's context, or that which the help says."""

    panel = "Limits"
    schema_chars: ClassVar[int] = 2**16
    """Characters of a schema, a regular expression or a grammar."""

    max_batch: int = option(16, "Maximum number of running requests.", min=1)
    max_waiting: int = option(256, "Maximum number of waiting requests; more get status 429.", min=1)
    memory_limit: float | None = option(
        None,
        "Maximum memory for keys and values, and for low-bit weights of --methods, in GiB; requests wait for it. "
        "Default: half of what is free.",
        min=0.001,
    )
    prefix_cache: float | None = option(
        None, "Size of the prefix cache in GiB (part of --memory-limit); 0 disables it. Default: half.", min=0
    )
    max_prompt_chars: int | None = option(
        None,
        "Maximum number of characters of a prompt, or of a chat with its tools. Default: 16 for each token of the "
        "context.",
        min=1,
    )
    max_prompt_tokens: int | None = option(None, "Maximum number of tokens of a prompt.", min=1)
    max_new_tokens: int | None = option(None, "Maximum number of tokens of a completion.", min=1)
    default_new_tokens: int | None = option(
        None,
        "max_tokens of a chat, a response or a message that sets none. Default: what is left of the context, and of a "
        "quarter of the memory for keys and values where that is more than 1024 tokens.",
        min=1,
    )
    max_choices: int = option(128, "Maximum number of completions per request (prompts × n).", min=1)
    max_logprobs: int = option(2**17, "Maximum number of log-probabilities per request, alternatives included.", min=1)
    max_body: float = option(4.0, "Maximum size of a request's body, in MiB.", min=0.001)
    idle_seconds: float = option(20.0, "Seconds for a client to send headers or a body, or to read on.", min=0.1)
    readers: int = option(2, "Number of processes that parse and encode requests.", min=1)
    read_seconds: float = option(20.0, "Seconds to parse and encode a request, and to wait for that.", min=0.1)
    request_seconds: float = option(3600.0, "Seconds until an answer has to be complete.", min=0.1)
    drain_seconds: float = option(60.0, "Seconds to let running requests finish after SIGTERM.", min=0)

    @property
    def body_bytes(self) -> int:
        """The size of the largest body."""
        return int(self.max_body * 2**20)

    def prompt_chars(self, context: int) -> int:
        """Characters of the texts of a prompt, or of a chat with its tools, for a model with this context."""
        return self.max_prompt_chars or 16 * context
