"""What is asked of the decoder: a prompt, how to choose tokens, when to stop, what drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.decoding.drafter import DraftingMethod
from selfspec.decoding.output import Output
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Rule


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue. Nothing is computed or allocated for it before it is admitted.

    Attributes:
        prompt_ids: tokens of the prompt, at least one.
        max_new_tokens: longest output.
        rule: how tokens are chosen and accepted.
        processor: logits processors, applied to draft and target alike.
        output: takes the tokens, and says when to end.
        method: what drafts.
        logprobs: how many alternatives to report with the log-probability of each token; ``None`` reports none.
        prompt_logprobs: the same for the tokens of the prompt.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    rule: Rule
    processor: ScoreProcessor
    output: Output
    method: DraftingMethod
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every row of the prompt has to run, although keys and values of its beginning may be known."""
        return self.prompt_logprobs is not None

    @property
    def slots(self) -> int:
        """Cache slots that it needs: for prompt and longest output, and for what its method writes after them."""
        needs = self.method.needs
        return len(self.prompt_ids) + self.max_new_tokens + max(needs.sibling_rows, needs.probe_rows)

    def bytes(self, target: Target) -> int:
        """Bytes that it holds from its admission to its end: keys and values, token ids, states that its method needs.

        Args:
            target: the model.
        """
        needs = self.method.needs
        rows = min(needs.prompt_rows, len(self.prompt_ids)) * len(needs.prompt_states)
        states = rows * target.hidden_size * target.dtype.itemsize
        token_ids = 8 * (len(self.prompt_ids) + self.max_new_tokens)
        return self.slots * target.slot_bytes + token_ids + states
