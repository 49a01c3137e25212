"""A request at work: the one owner of its tokens, cache, sampling rule, output and drafter."""

from collections.abc import Sequence as Many
from functools import partial

import torch

from selfspec.decoding.context import Context
from selfspec.decoding.drafter import Drafter, Prefill
from selfspec.decoding.probe import Probe
from selfspec.decoding.request import Request
from selfspec.model import transfer
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance
from selfspec.sampling.logprobs import token_logprobs
from selfspec.types import TokenLogprobs, TokenOrigin


class Sequence:
    """A request from its admission to its end: first its prompt is read, then its output is written.

    Args:
        target: the model.
        request: the request.

    Attributes:
        request: the request.
        context: its tokens, cache, sampling rule and logits processors.
        output: its output so far.
        bytes: that it holds.
        version: of the target that computes it.
        cached_tokens: tokens of the prompt that were found in a prefix cache.
        last_read: the step in which a part of its prompt was read last; before, that of its admission.
        prompt_states: by sublayer the hidden states of the prompt that the method asked for, ``[k, hidden]``, until
            the drafter begins.

    Raises:
        ContextLengthError: the request crosses the model's rope switch.
    """

    def __init__(self, target: Target, request: Request) -> None:
        needs = request.method.needs
        self.request = request
        self.output = request.output
        self.bytes = request.bytes(target)
        self.cached_tokens, self.last_read = 0, -1
        self.context = Context(
            target,
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            rule=request.rule,
            processor=request.processor,
            sibling_rows=needs.sibling_rows,
            probe_rows=needs.probe_rows,
        )
        self.version = target.version
        # Allocated before the temporary tensors of the prefill, between which it would leave gaps in memory.
        rows = min(needs.prompt_rows, self.context.prompt_length)
        kept = sorted(needs.prompt_states) if needs.prompt_rows else []
        states = torch.empty((len(kept), rows, target.hidden_size), dtype=target.dtype, device=target.device)
        self.prompt_states: dict[int, torch.Tensor] = dict(zip(kept, states, strict=True))
        self._drafter: Drafter | None = None

    @property
    def unread(self) -> int:
        """Tokens of the prompt whose keys and values are not computed yet."""
        return max(0, self.context.prompt_length - self.context.cache.length)

    @property
    def reusable(self) -> int:
        """Leading tokens of the prompt that need not be read if their keys and values are known.

        The last one gives the first token of the output; a method may need states of more of them.
        """
        if self.request.needs_whole_prompt:
            return 0
        needed = max((len(states) for states in self.prompt_states.values()), default=0)
        return self.context.prompt_length - max(1, needed)

    @property
    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.output.finish_reason is not None

    @property
    def tokens_suffice(self) -> bool:
        """Whether its coming round needs no more than tokens: no logits, no states, nothing that runs beside."""
        drafter = self.drafter
        asks = drafter.watched or drafter.fused_selection is not None or self.request.logprobs is not None
        return self.output.ends_by_ids and not asks

    @property
    def drafter(self) -> Drafter:
        """Its drafter, which begins when it is first needed: an output of one token does not pay for it."""
        if self._drafter is None:
            self._drafter = self.request.method.begin(self.prefill)
            self.prompt_states = {}
        return self._drafter

    @property
    def prefill(self) -> Prefill:
        """What a drafter is given to begin with, once the prompt is read."""
        ids = tuple(self.request.prompt_ids)
        return Prefill(ids, self.output.token_ids[0], Probe(self.context), self.prompt_states)

    def commit(
        self,
        acceptance: Acceptance,
        logits: Logits | None,
        last: TokenOrigin = "target",
        others: TokenOrigin = "draft",
    ) -> tuple[int, ...]:
        """Keeps what was accepted: hands its tokens to the output until that ends, and commits their rows.

        Args:
            acceptance: of the verification, or of the prefill.
            logits: of its rows, the target's own; ``None`` where none are reported.
            last: who chose the last of its tokens.
            others: who chose the others.

        Returns:
            The tokens that the output took.
        """
        context, token_ids = self.context, acceptance.token_ids
        context.write(token_ids)
        reported, taken = self._logprobs(acceptance, logits), 0
        for token_id, logprobs in zip(token_ids, reported, strict=True):
            taken += 1
            origin = others if taken < len(token_ids) else last
            tokens_so_far = partial(context.drafted_context, taken)
            if self.output.append(token_id, origin, tokens_so_far, logprobs):
                break
        context.commit(acceptance.rows[:taken] if last == "target" else (), taken)
        return token_ids[:taken]

    def _logprobs(self, acceptance: Acceptance, logits: Logits | None) -> Many[TokenLogprobs | None]:
        """What is reported of each accepted token."""
        if self.request.logprobs is None:
            return [None] * len(acceptance.token_ids)
        assert logits is not None
        rows = logits.values[transfer.send(acceptance.rows, logits.values.device)]
        return token_logprobs(rows, acceptance.token_ids, self.request.logprobs)
