"""The context of a request: its tokens, their keys and values, and how its next tokens are chosen."""

from collections.abc import Callable, Sequence

import torch

from selfspec.decoding.proposal import Proposal
from selfspec.model import transfer
from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import Drawing, SequenceState
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Coupled, Rule


class Context:
    """Prompt and output of one request so far.

    The last token is *pending*: it is chosen, but its keys and values are not computed yet, so the cache holds one slot
    less than the context has tokens.

    Args:
        target: the model.
        prompt_ids: tokens of the prompt, at least one.
        max_new_tokens: longest output.
        rule: how tokens are chosen and accepted.
        processor: logits processors, applied to draft and target alike.
        sibling_rows: cache slots for rows beside the extended path of a draft.
        probe_rows: cache slots after the committed ones that a method's ``Probe`` may write to.

    Attributes:
        target: the model.
        rule: the sampling rule.
        processor: the logits processors.
        prompt_length: tokens of the prompt.
        length: tokens of prompt and output so far.
        max_length: tokens of prompt and longest output.
        sibling_limit: most draft tokens beside the longest path of a tree.
        on_host: the host reads and writes its tokens without waiting.
        pending_id: the last token.
        no_tokens: long ``[0]``, the tokens of an empty draft.
        state: the sequence's cache as the target takes it.

    Raises:
        ContextLengthError: the request crosses the model's rope switch.
    """

    def __init__(
        self,
        target: Target,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        rule: Rule,
        processor: ScoreProcessor,
        sibling_rows: int = 0,
        probe_rows: int = 0,
    ) -> None:
        self.target = target
        self.rule = rule
        self.processor = processor
        self.prompt_length = len(prompt_ids)
        self.length = len(prompt_ids)
        self.max_length = self.length + max_new_tokens
        self.sibling_limit = sibling_rows
        self._ids = torch.empty(self.max_length, dtype=torch.long, device=target.device)
        self.no_tokens = self._ids[:0]
        self._ids[: self.length] = transfer.send(prompt_ids, target.device)
        self.on_host = transfer.is_on_host(self._ids)
        self._host_ids = self._ids.numpy() if self.on_host else None  # shares its memory; written in a microsecond
        self.pending_id, self._written = prompt_ids[-1], prompt_ids
        self.state: SequenceState = target.new_sequence(
            self.prompt_length,
            capacity=self.max_length + max(sibling_rows, probe_rows),
            last_length=max(self.prompt_length, self.max_length - 1),
        )

    @property
    def chooses_best(self) -> bool:
        """Whether the next token is the one of the largest logit: greedy, without logits processors."""
        return self.rule.chooses_best and self.processor.keeps_scores

    @property
    def follows_from_logits(self) -> bool:
        """Whether a token follows from its row's logits: it is that of the largest one, or ``drawing`` draws it."""
        return self.chooses_best or self.drawing is not None

    @property
    def drawing(self) -> Drawing | None:
        """How tokens are drawn by noise from logits divided by a temperature, if that is all that chooses them."""
        rule, temperature = self.rule, self.processor.temperature
        return Drawing(rule.key, temperature) if temperature and isinstance(rule, Coupled) else None

    @property
    def device(self) -> torch.device:
        """Where its tokens are."""
        return self._ids.device

    @property
    def token_ids(self) -> torch.Tensor:
        """Prompt and output so far, long ``[length]``."""
        return self._ids[: self.length]

    @property
    def pending(self) -> torch.Tensor:
        """The last token, long ``[1]``."""
        return self._ids[self.length - 1 : self.length]

    @property
    def cache(self) -> KeyValueCache:
        """Keys and values of all tokens but the pending one."""
        return self.state.cache

    @property
    def draft_limit(self) -> int:
        """How many draft tokens can still be committed beside the target's own token."""
        return self.max_length - self.length - 1

    def write_draft(self, step: int, token_id: torch.Tensor) -> None:
        """Writes a drafted token after the context, where ``drafted_context`` reads it.

        Args:
            step: number of drafted tokens before it.
            token_id: long ``[1]``.
        """
        self._ids[self.length + step : self.length + step + 1] = token_id

    def drafted_context(self, step: int) -> torch.Tensor:
        """The context and the first ``step`` drafted tokens, long ``[1, length + step]``."""
        return self._ids[None, : self.length + step]

    def row_contexts(self, proposal: Proposal) -> Callable[[int], torch.Tensor]:
        """For each verification row the tokens up to it, long ``[1, length + depth]``, made when asked for."""
        if not proposal.tree:
            return self.drafted_context
        if proposal.tree.is_chain:
            self._ids[self.length : self.length + len(proposal.tree)] = proposal.token_ids
            return self.drafted_context

        def context(row: int) -> torch.Tensor:
            """The tokens up to a row of the tree, along its path."""
            nodes = [ancestor - 1 for ancestor in proposal.tree.path(row)[1:]]
            path = proposal.token_ids[transfer.send(nodes, proposal.token_ids.device)]
            return torch.cat([self.token_ids, path])[None]

        return context

    def write(self, token_ids: Sequence[int]) -> None:
        """Writes chosen tokens after the context; ``commit`` makes them part of it."""
        self._written = token_ids
        if self._host_ids is not None:
            self._host_ids[self.length : self.length + len(token_ids)] = token_ids
        else:
            self._ids[self.length : self.length + len(token_ids)] = transfer.send(token_ids, self.device)

    def commit(self, rows: Sequence[int], count: int) -> None:
        """Keeps the accepted rows of a verification and as many of the tokens that ``write`` wrote.

        Args:
            rows: accepted verification rows, from row 0 on; none after the prefill, whose slots are committed already.
            count: number of tokens.
        """
        self.cache.commit(rows)
        self.length += count
        if count:
            self.pending_id = self._written[count - 1]
