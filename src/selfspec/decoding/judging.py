"""From the target's logits to the accepted tokens of each draft, with one wait for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from selfspec.decoding.context import Context
from selfspec.decoding.phases import phase
from selfspec.decoding.proposal import Proposal
from selfspec.errors import NonFiniteLogitsError
from selfspec.model import transfer
from selfspec.sampling.acceptance import Acceptance, Verdict


@dataclass(frozen=True)
class Judgement:
    """The outcome of a verification.

    Attributes:
        acceptance: the accepted rows and the tokens they give.
        scores: float32 ``[n + 1, vocab]``, the target's processed scores of every row.
    """

    acceptance: Acceptance
    scores: torch.Tensor


@phase("other")
def judge(
    contexts: Sequence[Context], proposals: Sequence[Proposal], logits: Sequence[torch.Tensor]
) -> list[Judgement | None]:
    """Which drafted tokens stand, and the token after them.

    Whether logits are numbers is read together with the outcome, which is meaningless where they are not.

    Args:
        contexts: of each sequence.
        proposals: of each sequence, the draft.
        logits: of each sequence ``[n + 1, vocab]``, the target's.

    Returns:
        For each sequence the outcome; ``None`` where a logit is NaN or infinite.
    """
    finite = [all_finite(rows) for rows in logits]
    scores = [
        _process(context, rows, numbers, context.row_contexts(proposal))
        for context, proposal, rows, numbers in zip(contexts, proposals, logits, finite, strict=True)
    ]
    verdicts = [_verdict(*each) for each in zip(contexts, proposals, scores, strict=True)]
    return [
        None if acceptance is None else Judgement(acceptance, rows)
        for acceptance, rows in zip(_read(verdicts, finite), scores, strict=True)
    ]


def all_finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether all logits are numbers, bool ``[]``: a sum is finite only if every term is."""
    return torch.isfinite(logits.sum(dtype=torch.float32))


def _process(
    context: Context, logits: torch.Tensor, finite: torch.Tensor, row_context: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    try:
        return context.processor(logits, row_context)
    except Exception:
        if transfer.read(finite)[0]:
            raise
        return logits.float()  # a processor need not accept NaN; these scores are not used


def _verdict(context: Context, proposal: Proposal, scores: torch.Tensor) -> Verdict:
    tree = proposal.tree
    positions = [context.length + depth for depth in tree.depths]
    parent_rows = [parent + 1 for parent in tree.parents]
    return context.rule.accept(tree, proposal.token_ids, proposal.scores, parent_rows, scores, positions)


@phase("verify")  # the wait is for the device, which has been verifying
def _read(verdicts: Sequence[Verdict], finite: Sequence[torch.Tensor]) -> list[Acceptance | None]:
    counts = [len(verdict.numbers) for verdict in verdicts]
    values = transfer.read(*finite, *(number for verdict in verdicts for number in verdict.numbers))
    holds, numbers = values[: len(finite)], iter(values[len(finite) :])
    own = [[next(numbers) for _ in range(count)] for count in counts]
    return [
        verdict.interpret(*values) if is_finite else None
        for verdict, values, is_finite in zip(verdicts, own, holds, strict=True)
    ]


def not_finite(context: Context) -> NonFiniteLogitsError:
    """The error of a target whose own logits are not all numbers."""
    return NonFiniteLogitsError(
        f"the model computed NaN or infinite logits for new token {context.length - context.prompt_length + 1} "
        f"(position {context.length}); try another dtype (bfloat16 or float32) or check the weights"
    )
