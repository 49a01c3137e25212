"""One request: its tokens, its place in the cache, its rule of choosing."""

from collections.abc import Callable, Sequence

import torch

from selfspec.decoding.draft import Proposal
from selfspec.model import transfer
from selfspec.runtimes.target import SequenceState, Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Rule


class Request:
    """The growing sequence of one request.

    Its last token is *pending*: chosen, but its keys and values are not computed yet, so that the cache holds one slot
    less than the sequence has tokens.

    Args:
        target: the model.
        prompt_ids: tokens of the prompt, at least one.
        max_new_tokens: longest output.
        rule: how tokens are chosen and accepted.
        processor: logits processors, for draft and target alike.
        sibling_rows: cache slots for rows beside the extended path of a draft.
        probe_rows: cache slots behind the committed ones that a method's ``Probe`` may write to.

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
        self.rule = rule
        self.processor = processor
        self.prompt_length = len(prompt_ids)
        self.length = len(prompt_ids)
        self.max_length = self.length + max_new_tokens
        self.sibling_room = sibling_rows
        self._ids = torch.empty(self.max_length, dtype=torch.long, device=target.device)
        self._ids[: self.length] = transfer.send(prompt_ids, target.device)
        self.state: SequenceState = target.new_sequence(
            self.prompt_length,
            capacity=self.max_length + max(sibling_rows, probe_rows),
            last_length=self.max_length - 1,
        )

    @property
    def token_ids(self) -> torch.Tensor:
        """Prompt and output so far, long ``[length]``."""
        return self._ids[: self.length]

    @property
    def pending(self) -> torch.Tensor:
        """The last token, long ``[1]``."""
        return self._ids[self.length - 1 : self.length]

    @property
    def draft_limit(self) -> int:
        """How many draft tokens could still be committed, beside the target's own token."""
        return self.max_length - self.length - 1

    def note_draft(self, step: int, token_id: torch.Tensor) -> None:
        """Writes a token of the extended path behind the sequence, where ``path_context`` reads it.

        Args:
            step: how many drafted tokens come before it.
            token_id: long ``[1]``.
        """
        self._ids[self.length + step : self.length + step + 1] = token_id

    def path_context(self, step: int) -> torch.Tensor:
        """The sequence and the first ``step`` noted draft tokens, long ``[1, length + step]``."""
        return self._ids[None, : self.length + step]

    def row_contexts(self, proposal: Proposal) -> Callable[[int], torch.Tensor]:
        """For each verification row the tokens up to it, long ``[1, length + depth]``, made when asked for."""
        if proposal.tree.is_chain:
            self._ids[self.length : self.length + len(proposal.tree)] = proposal.token_ids
            return self.path_context

        def context(row: int) -> torch.Tensor:
            nodes = [ancestor - 1 for ancestor in proposal.tree.path(row)[1:]]
            path = proposal.token_ids[transfer.send(nodes, proposal.token_ids.device)]
            return torch.cat([self.token_ids, path])[None]

        return context

    def commit(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Keeps the accepted rows of a verification and appends the tokens that came of it.

        Args:
            rows: accepted verification rows, from row 0 on; none after the prefill, whose slots are committed already.
            token_ids: the accepted draft tokens and the target's own token behind them.
        """
        self.state.cache.commit(rows)
        self._ids[self.length : self.length + len(token_ids)] = transfer.send(token_ids, self._ids.device)
        self.length += len(token_ids)
