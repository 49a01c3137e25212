"""From the target's logits to the accepted tokens of each draft, with one wait for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from selfspec.decoding.context import Context
from selfspec.decoding.phases import phase
from selfspec.decoding.proposal import Proposal
from selfspec.errors import NonFiniteLogitsError
from selfspec.model import transfer
from selfspec.runtimes.logits import Logits
from selfspec.sampling.acceptance import Acceptance, Verdict, accept_matching
from selfspec.sampling.rules import accept_choices


@dataclass(frozen=True)
class Judgement:
    """The outcome of a verification.

    Attributes:
        acceptance: the accepted rows and the tokens they give.
        scores: gives float32 ``[n + 1, vocab]``, the target's processed scores of every row.
        logits: the target's own, of every row.
    """

    acceptance: Acceptance
    scores: Callable[[], torch.Tensor]
    logits: Logits


@phase("other")
def judge(
    contexts: Sequence[Context], proposals: Sequence[Proposal], logits: Sequence[Logits]
) -> list[Judgement | None]:
    """Which drafted tokens stand, and the token after them.

    Whether logits are numbers is read together with the outcome, which is meaningless where they are not.

    Args:
        contexts: of each sequence.
        proposals: of each sequence, the draft.
        logits: of each sequence those of the target, of ``n + 1`` rows.

    Returns:
        For each sequence the outcome; ``None`` where a logit is NaN or infinite.
    """
    scores = [_Scores(*each) for each in zip(contexts, proposals, logits, strict=True)]
    each = list(zip(contexts, proposals, logits, scores, strict=True))
    if all(rows.chosen is not None and _chooses(context, rows) for context, _, rows, _ in each):
        acceptances = [_accept_known(proposal, rows) for _, proposal, rows, _ in each]
    else:
        acceptances = _read([_verdict(*one) for one in each], [rows.finite for rows in logits])
    return [
        None if acceptance is None else Judgement(acceptance, processed, rows)
        for acceptance, processed, rows in zip(acceptances, scores, logits, strict=True)
    ]


class _Scores:
    """The processed scores of a sequence's rows, computed at the first call."""

    def __init__(self, context: Context, proposal: Proposal, logits: Logits) -> None:
        self._context, self._logits = context, logits
        # Rows are counted from the end of the context, which a later call would find further on.
        self._row_contexts = _unread if context.processor.keeps_scores else context.row_contexts(proposal)
        self._computed: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """Float32 ``[n + 1, vocab]``."""
        if self._computed is None:
            try:
                self._computed = self._context.processor(self._logits.values, self._row_contexts)
            except Exception:
                if all(transfer.read(self._logits.finite)[0]):
                    raise
                return self._logits.values.float()  # a processor need not accept NaN; these scores are not used
        return self._computed


def _chooses(context: Context, logits: Logits) -> bool:
    """Whether the tokens chosen with the logits are those of the request."""
    return context.chooses_best or (logits.drawn and context.drawing is not None)


def _accept_known(proposal: Proposal, logits: Logits) -> Acceptance | None:
    """The acceptance of choices that the host knows; ``None`` where a logit is not a number."""
    chosen = logits.chosen
    assert chosen is not None
    return accept_matching(proposal.tree, proposal.host_ids, chosen.token_ids) if all(chosen.finite) else None


def _verdict(context: Context, proposal: Proposal, logits: Logits, scores: Callable[[], torch.Tensor]) -> Verdict:
    tree = proposal.tree
    if _chooses(context, logits):
        return accept_choices(tree, proposal.token_ids, logits.best)
    positions = [context.length + depth for depth in tree.depths]
    parent_rows = [parent + 1 for parent in tree.parents]
    return context.rule.accept(tree, proposal.token_ids, proposal.scores, parent_rows, scores(), positions)


def _unread(row: int) -> torch.Tensor:
    raise AssertionError("no processor reads the tokens before a row")


@phase("verify")  # the wait is for the device, which has been verifying
def _read(verdicts: Sequence[Verdict], finite: Sequence[torch.Tensor]) -> list[Acceptance | None]:
    counts = [len(verdict.numbers) for verdict in verdicts]
    values = transfer.read(*finite, *(number for verdict in verdicts for number in verdict.numbers))
    holds, numbers = values[: len(finite)], iter(values[len(finite) :])
    own = [[next(numbers) for _ in range(count)] for count in counts]
    return [
        verdict.interpret(*values) if all(is_finite) else None
        for verdict, values, is_finite in zip(verdicts, own, holds, strict=True)
    ]


def not_finite(context: Context) -> NonFiniteLogitsError:
    """The error of a target whose own logits are not all numbers."""
    return NonFiniteLogitsError(
        f"the model computed NaN or infinite logits for new token {context.length - context.prompt_length + 1} "
        f"(position {context.length}); try another dtype (bfloat16 or float32) or check the weights"
    )
