"""The round: draft, verify, accept, commit. One loop for every method."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.decoding.draft import LayerDraft, Proposal
from selfspec.decoding.drafting import empty_proposal, propose
from selfspec.decoding.fused_selection import Rider
from selfspec.decoding.output import Output
from selfspec.decoding.probe import Probe
from selfspec.decoding.request import Request
from selfspec.decoding.verification import verify
from selfspec.errors import NonFiniteLogitsError
from selfspec.methods.base import Drafter, Feedback, Method, Needs, Prefill
from selfspec.model import transfer
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance
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
    prefilled = prefill(target, request, prefill_chunk, method.needs)
    finished = output.append(prefilled.first_token, "prefill")
    yield None
    if finished:
        return
    clock = Clock()
    drafter = _begin(method, prefilled)
    del prefilled  # with the prompt's states
    clock.lap("select")
    while output.finish_reason is None:
        yield play_round(target, drafter, request, output, clock)
        clock = Clock()


@torch.inference_mode()
def prefill(target: Target, request: Request, chunk: int, needs: Needs | None = None) -> Prefill:
    """Runs the prompt through the model, in chunks, then chooses and commits the first token."""
    prompt_ids, needs = tuple(*transfer.read(request.token_ids)), needs or Needs()
    first_kept = max(0, request.length - needs.prompt_rows)
    kept = sorted(needs.prompt_states) if needs.prompt_rows else []
    # Made before all that comes and goes: between that, it would leave holes which nothing fits into.
    room = torch.empty(
        (len(kept), request.length - first_kept, target.hidden_size), dtype=target.dtype, device=target.device
    )
    hidden_states = dict(zip(kept, room, strict=True))
    everything = range(target.sublayer_count)
    for start in range(0, request.length, chunk):  # whatever is kept, so that all methods compute the same
        end = min(start + chunk, request.length)
        step = target.begin(request.state, end - start)
        rows = slice(max(0, start - first_kept), max(0, end - first_kept))
        copies = {index: states[rows] for index, states in hidden_states.items()}
        result = target.run(target.embed(request.token_ids[start:end]), everything, step, copies=copies)
        request.state.cache.commit(range(end - start))
    logits = target.logits(result.hidden_states[-1:])
    judged = _judge(request, empty_proposal(request), logits, _all_finite(logits), Clock())
    if judged is None:
        raise _not_finite(request)
    first_token = judged[0].next_token
    request.commit((), (first_token,))
    return Prefill(prompt_ids, first_token, Probe(target, request), hidden_states)


@torch.inference_mode()
def _begin(method: Method, prefilled: Prefill) -> Drafter:
    return method.begin(prefilled)


@torch.inference_mode()
def play_round(target: Target, drafter: Drafter, request: Request, output: Output, clock: "Clock") -> Round:
    """Plays one round and commits what came of it."""
    draft = drafter.plan()
    watched = drafter.watched
    rider = drafter.rider
    threshold = draft.stop.threshold if isinstance(draft, LayerDraft) and draft.stop is not None else None
    clock.lap("select")
    proposal = propose(target, request, draft, watched)
    clock.lap("draft")
    verified = _verify(target, request, proposal, watched, rider, clock)
    if verified is None:
        # A drafted row that is not numbers spoils those before it too, through attention weights of 0 times NaN.
        proposal = empty_proposal(request)
        verified = _verify(target, request, proposal, watched, None, clock)
        if verified is None:
            raise _not_finite(request)
    acceptance = verified.acceptance
    committed = _append(output, acceptance)
    request.commit(acceptance.rows[: len(committed)], committed)
    clock.lap("other")

    feedback = Feedback(draft, proposal, acceptance, verified.scores, verified.captured)
    drafter.learn(feedback)
    clock.lap("select")
    return Round(
        drafted=feedback.drafted,
        candidates=len(proposal.tree),
        accepted=min(feedback.accepted, len(committed)),
        token_ids=committed,
        kept=draft.kept if isinstance(draft, LayerDraft) else None,
        threshold=threshold,
        seconds=clock.seconds,
    )


@dataclass(frozen=True)
class _Verified:
    """A draft that was verified: the outcome, the target's processed scores, the states that the method watches."""

    acceptance: Acceptance
    scores: torch.Tensor
    captured: Mapping[int, torch.Tensor]


def _verify(
    target: Target,
    request: Request,
    proposal: Proposal,
    watched: Collection[int],
    rider: Rider[Any] | None,
    clock: "Clock",
) -> _Verified | None:
    """Verifies a draft and waits for the outcome, once; ``None`` where the target's logits are not all numbers."""
    verification = verify(target, request, proposal, watched, rider)
    logits = target.logits(verification.hidden_states)
    finite = _all_finite(logits)
    clock.lap("verify")
    judged = _judge(request, proposal, logits, finite, clock)
    return None if judged is None else _Verified(*judged, verification.captured)


def _judge(
    request: Request, proposal: Proposal, logits: torch.Tensor, finite: torch.Tensor, clock: "Clock"
) -> tuple[Acceptance, torch.Tensor] | None:
    """What stands of a draft, and the processed scores; ``None`` where the logits are not all numbers.

    Whether they are is read together with the outcome, which is nothing but noise where they are not.
    """
    tree = proposal.tree
    scores = _process(request, logits, finite, request.row_contexts(proposal))
    positions = [request.length + depth for depth in tree.depths]
    parent_rows = [parent + 1 for parent in tree.parents]
    verdict = request.rule.accept(tree, proposal.token_ids, proposal.scores, parent_rows, scores, positions)
    clock.lap("other")
    acceptance = verdict.read_if(finite)
    clock.lap("verify")  # the wait is for the device, which has been verifying
    return None if acceptance is None else (acceptance, scores)


def _process(
    request: Request, logits: torch.Tensor, finite: torch.Tensor, context: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    try:
        return request.processor(logits, context)
    except Exception:
        if transfer.read(finite)[0]:
            raise
        return logits.float()  # a processor need not know what to do with NaN; these scores are not used


def _append(output: Output, acceptance: Acceptance) -> tuple[int, ...]:
    """Hands tokens to the output until it ends; returns those it took."""
    accepted = len(acceptance.rows) - 1
    for index, token_id in enumerate(acceptance.token_ids):
        if output.append(token_id, "draft" if index < accepted else "target"):
            return acceptance.token_ids[: index + 1]
    return acceptance.token_ids


def _all_finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether all logits are numbers, bool ``[]``: a sum is finite only if every term is."""
    return torch.isfinite(logits.sum(dtype=torch.float32))


def _not_finite(request: Request) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"the model computed NaN or infinite logits for new token {request.length - request.prompt_length + 1} "
        f"(position {request.length}); try another dtype (bfloat16 or float32) or check the weights"
    )


class Clock:
    """Adds up the wall time of the phases of a round."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("select", "draft", "verify", "other"), 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Counts the time since the last lap towards a phase."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    @property
    def seconds(self) -> PhaseSeconds:
        """The time of each phase so far."""
        return PhaseSeconds(**self._seconds)
