"""The round: draft, verify, accept, commit. One loop for every method."""

import time
from collections.abc import Iterator

import torch

from selfspec.decoding.accept import Acceptance
from selfspec.decoding.draft import Draft, LayerDraft, Proposal
from selfspec.decoding.drafting import empty_proposal, propose
from selfspec.decoding.output import Output
from selfspec.decoding.request import Request
from selfspec.decoding.tree import TokenTree
from selfspec.decoding.verification import verify
from selfspec.errors import NonFiniteLogitsError
from selfspec.methods.base import Drafter, Feedback, Method, Prefill
from selfspec.target.stack import StackOutput, Target
from selfspec.types import PhaseSeconds, Round


def decode(
    target: Target, method: Method, request: Request, output: Output, prefill_chunk: int
) -> Iterator[Round | None]:
    """Writes a request's output.

    Args:
        target: the model.
        method: what drafts.
        request: the request, with nothing computed yet.
        output: takes the tokens, and says when to end.
        prefill_chunk: longest part of the prompt to run at once, in tokens.

    Yields:
        ``None`` once after the first token, then every round as it is finished.

    Raises:
        NonFiniteLogitsError: the target computed NaN or infinite logits.
    """
    first_token = prefill(target, request, prefill_chunk)
    request.commit((), (first_token,))
    finished = output.append(first_token, "prefill")
    drafter = method.begin(Prefill(tuple(request.token_ids[:-1].tolist()), first_token))
    yield None
    while not finished:
        yield play_round(target, method, drafter, request, output)
        finished = output.finish_reason is not None


@torch.inference_mode()
def prefill(target: Target, request: Request, chunk: int) -> int:
    """Runs the prompt through the model, in chunks, and chooses the first token."""
    cache = request.state.cache
    for start in range(0, request.length, chunk):
        token_ids = request.token_ids[start : start + chunk]
        rows = len(token_ids)
        step = target.begin(request.state, rows)
        hidden_states = target.run(target.embed(token_ids), range(target.sublayer_count), step).hidden_states
        cache.commit(range(rows))
    logits = target.logits(hidden_states[-1:])
    _check_finite(logits, request)
    scores = request.processor(logits, lambda _: request.path_context(0))
    return request.rule.accept(TokenTree(()), request.pending[:0], None, (), scores, (request.length,)).next_token


@torch.inference_mode()
def play_round(target: Target, method: Method, drafter: Drafter, request: Request, output: Output) -> Round:
    """Plays one round and commits what came of it."""
    clock = _Clock()
    draft = drafter.plan()
    clock.lap("select")
    proposal = propose(target, request, draft, method.needs.hidden_states)
    clock.lap("draft")
    verification, logits = _verified_logits(target, method, request, proposal)
    if not _all_finite(logits):
        # A drafted row that is not numbers spoils those before it too, through attention weights of 0 times NaN.
        proposal = empty_proposal(request)
        verification, logits = _verified_logits(target, method, request, proposal)
        _check_finite(logits, request)
    clock.lap("verify")

    scores = request.processor(logits, request.row_contexts(proposal))
    tree = proposal.tree
    positions = [request.length + depth for depth in tree.depths]
    parent_rows = [parent + 1 for parent in tree.parents]
    acceptance = request.rule.accept(tree, proposal.token_ids, proposal.scores, parent_rows, scores, positions)
    committed = _append(output, acceptance)
    request.commit(acceptance.rows[: len(committed)], committed)
    clock.lap("other")

    feedback = Feedback(draft, proposal, acceptance, scores, verification.captured)
    drafter.learn(feedback)
    clock.lap("select")
    return _record(draft, feedback, committed, clock.seconds)


def _verified_logits(
    target: Target, method: Method, request: Request, proposal: Proposal
) -> tuple[StackOutput, torch.Tensor]:
    verification = verify(target, request, proposal, method.needs.hidden_states)
    return verification, target.logits(verification.hidden_states)


def _append(output: Output, acceptance: Acceptance) -> tuple[int, ...]:
    """Hands tokens to the output until it ends; returns those it took."""
    accepted = len(acceptance.rows) - 1
    for index, token_id in enumerate(acceptance.token_ids):
        if output.append(token_id, "draft" if index < accepted else "target"):
            return acceptance.token_ids[: index + 1]
    return acceptance.token_ids


def _record(draft: Draft, feedback: Feedback, committed: tuple[int, ...], seconds: PhaseSeconds) -> Round:
    kept = draft.kept if isinstance(draft, LayerDraft) else None
    return Round(
        drafted=feedback.drafted,
        candidates=len(feedback.proposal.tree),
        accepted=min(feedback.accepted, len(committed)),
        token_ids=committed,
        attention_share=None if kept is None else kept.attention_share,
        mlp_share=None if kept is None else kept.mlp_share,
        seconds=seconds,
    )


def _all_finite(logits: torch.Tensor) -> bool:
    """Whether all logits are numbers: a sum is finite only if every term is."""
    return bool(torch.isfinite(logits.sum(dtype=torch.float32)))


def _check_finite(logits: torch.Tensor, request: Request) -> None:
    if not _all_finite(logits):
        raise NonFiniteLogitsError(
            f"the model computed NaN or infinite logits for new token {request.length - request.prompt_length + 1} "
            f"(position {request.length}); try another dtype (bfloat16 or float32) or check the weights"
        )


class _Clock:
    """Adds up the wall time of the phases of a round."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("select", "draft", "verify", "other"), 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    @property
    def seconds(self) -> PhaseSeconds:
        return PhaseSeconds(**self._seconds)
