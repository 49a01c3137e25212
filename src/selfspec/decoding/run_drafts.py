"""Runs the drafts of several sequences side by side, so that their forwards read the weights together."""

from collections import defaultdict
from collections.abc import Hashable, Iterable

import torch

from selfspec.decoding.proposal import DraftForward, Drafting, DraftOutput, Proposal
from selfspec.model.forward import Forward
from selfspec.runtimes.target import Target


def run_drafts(target: Target, drafts: Iterable[Drafting]) -> list[Proposal]:
    """Carries drafts out.

    Args:
        target: the model.
        drafts: one of each sequence, not started yet. Forwards through the same sublayers with the same weights
            run as one.

    Returns:
        Their proposals, in the same order.
    """
    running = list(drafts)
    proposals: dict[int, Proposal] = {}
    outputs: dict[int, DraftOutput | None] = dict.fromkeys(range(len(running)))
    while outputs:
        asked: dict[Hashable, list[tuple[int, DraftForward]]] = defaultdict(list)
        for index, output in outputs.items():
            try:
                forward = next(running[index]) if output is None else running[index].send(output)
                asked[forward.sublayers, forward.logits, forward.precision].append((index, forward))
            except StopIteration as finished:
                proposals[index] = finished.value
        outputs = {}
        for group in asked.values():
            indices, forwards = zip(*group, strict=True)
            outputs.update(zip(indices, _run_together(target, forwards), strict=True))
    return [proposals[index] for index in range(len(running))]


def _run_together(target: Target, asked: tuple[DraftForward, ...]) -> list[DraftOutput]:
    """One forward for drafts that ask for the same sublayers."""
    first, scored = asked[0], asked[0].logits
    model = target.at(first.precision)
    if len(asked) == 1:
        ran = model.run(
            first.hidden_states, first.sublayers, first.forward, first.capture, logits=scored, confidence=scored
        )
        return [DraftOutput(ran.hidden_states, ran.captured, ran.logits)]
    together = Forward.join([each.forward for each in asked])
    capture = {index for each in asked for index in each.capture}
    ran = model.run(
        torch.cat([each.hidden_states for each in asked]),
        first.sublayers,
        together,
        capture,
        logits=scored,
        confidence=scored,
    )
    counts = [len(each.hidden_states) for each in asked]
    states = torch.split(ran.hidden_states, counts)
    captured = {index: torch.split(rows, counts) for index, rows in ran.captured.items()}
    logits = [None] * len(asked) if ran.logits is None else ran.logits.split(counts)
    return [
        DraftOutput(states[place], {index: captured[index][place] for index in each.capture}, logits[place])
        for place, each in enumerate(asked)
    ]
