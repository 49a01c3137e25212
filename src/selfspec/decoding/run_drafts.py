"""Runs the drafts of several sequences side by side, so that their forwards read the weights together."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import torch

from selfspec.decoding.proposal import DraftChain, DraftForward, Drafting, DraftOutput, Proposal
from selfspec.model.forward import Forward
from selfspec.runtimes.chain import ChainOutput
from selfspec.runtimes.runner import Runner
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
    outputs: dict[int, DraftOutput | ChainOutput | None] = dict.fromkeys(range(len(running)))
    while outputs:
        asked: dict[Hashable, list[tuple[int, DraftForward | DraftChain]]] = defaultdict(list)
        for index, output in outputs.items():
            try:
                forward = next(running[index]) if output is None else running[index].send(output)
                asked[_key(forward)].append((index, forward))
            except StopIteration as finished:
                proposals[index] = finished.value
        outputs = {}
        for group in asked.values():
            indices, forwards = zip(*group, strict=True)
            outputs.update(zip(indices, _run_together(target, forwards), strict=True))
    return [proposals[index] for index in range(len(running))]


def _key(asked: DraftForward | DraftChain) -> Hashable:
    """What forwards have in common that run as one."""
    scored = asked.logits if isinstance(asked, DraftForward) else None
    return type(asked), asked.sublayers, scored, asked.precision


def _run_together(
    target: Target, asked: tuple[DraftForward | DraftChain, ...]
) -> Sequence[DraftOutput] | Sequence[ChainOutput]:
    """One forward, or one chain of them, for drafts that ask for the same sublayers."""
    model = target.at(asked[0].precision)
    if chains := [each for each in asked if isinstance(each, DraftChain)]:
        assert model.native is not None
        return model.native.chain([each.request for each in chains], chains[0].sublayers)
    return _run_forwards(model, [each for each in asked if isinstance(each, DraftForward)])


def _run_forwards(model: Runner, asked: Sequence[DraftForward]) -> list[DraftOutput]:
    first, scored = asked[0], asked[0].logits
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
