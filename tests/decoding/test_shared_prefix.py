"""A verification that takes over what the draft has in common with the target equals one that starts from nothing."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from helpers.models import FAMILY_NAMES, SUBLAYERS, build, plain_text, prompt
from selfspec.decoding.draft import LayerDraft, Proposal
from selfspec.decoding.drafter import Needs
from selfspec.decoding.drafting import propose
from selfspec.decoding.sequence import Sequence as Generated
from selfspec.decoding.verification import verify
from selfspec.model.kept import KeptSet
from selfspec.model.sublayers import BranchSublayer
from selfspec.runtimes.target import Target
from selfspec.sampling.tree import TokenTree
from selfspec_lab.testing import read_text

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
ALL_STATES = range(SUBLAYERS + 1)
SIBLINGS = 20

KEPT_SETS = {
    "no shared prefix": (1, 2, 5, 8, 11),
    "odd, in a layer's middle": (0, 1, 2, 5, 7, 10),
    "attention of the first layer": (0,),
    "even, an early exit": (0, 1, 2, 3, 4, 5),
    "even, and more above": (0, 1, 2, 3, 6, 7, 9, 10, 11),
    "all but the last": tuple(range(SUBLAYERS - 1)),
    "everything": tuple(range(SUBLAYERS)),
}
WIDTHS = {"chain": None, "tree": lambda _: 3}


@cache
def _target(name: str, runtime: str) -> Target:
    return Target(build(name), runtime)


def drafted(name: str, kept: tuple[int, ...], shape: str, runtime: str = "auto") -> tuple[Target, Generated, Proposal]:
    """A context after its prefill, and a draft of four tokens or of a tree around them."""
    target = _target(name, runtime)
    context, _ = read_text(target, prompt(40), Needs(sibling_rows=SIBLINGS), max_new_tokens=40)
    draft = LayerDraft(KeptSet(kept, SUBLAYERS), 4, widths=WIDTHS[shape])
    with torch.inference_mode():
        return target, context, propose(target, [context], [draft], [ALL_STATES])[0]


def verified(target: Target, context: Generated, proposal: Proposal) -> Any:
    with torch.inference_mode():
        return verify(target, [context], [proposal], [ALL_STATES])[0]


def cache_rows(context: Generated, rows: int) -> torch.Tensor:
    """What a verification has written, ``[layers and kinds, heads, rows, head_dim]``."""
    cache = context.cache
    return torch.cat([buffer[:, :, cache.length : cache.length + rows] for buffer in (*cache.keys, *cache.values)])


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shape", WIDTHS)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_sharing_changes_nothing(name: str, shape: str) -> None:
    for where, kept in KEPT_SETS.items():
        target, context, proposal = drafted(name, kept, shape)
        rows = len(proposal.tree) + 1
        assert proposal.tree.is_chain == (shape == "chain")
        shared = verified(target, context, proposal)
        shared_cache = cache_rows(context, rows).clone()

        other_target, other_context, other_proposal = drafted(name, kept, shape)
        assert torch.equal(proposal.token_ids, other_proposal.token_ids)
        alone = verified(other_target, other_context, replace(other_proposal, shared_prefix=0, shared_states={}))

        for index in ALL_STATES:
            torch.testing.assert_close(
                shared.hidden_states[index],
                alone.hidden_states[index],
                **CLOSE,
                msg=lambda text, i=index, w=where: f"{w}: h[{i}]: {text}",
            )
        torch.testing.assert_close(shared_cache, cache_rows(other_context, rows), **CLOSE)
        assert torch.equal(shared.logits.best, alone.logits.best), where


@pytest.mark.parametrize("shape", WIDTHS)
@pytest.mark.parametrize(("where", "kept"), KEPT_SETS.items(), ids=KEPT_SETS)
def test_shared_sublayers_run_only_for_rows_not_yet_drafted(
    where: str, kept: tuple[int, ...], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, context, proposal = drafted("gemma3", kept, shape, "fused")
    rows_run: dict[int, list[int]] = defaultdict(list)
    run = BranchSublayer.__call__

    def counted(sublayer: BranchSublayer, hidden_states: torch.Tensor, step: Any) -> torch.Tensor:
        rows_run[target.sublayers.index(sublayer)].append(hidden_states.shape[0])
        return run(sublayer, hidden_states, step)

    monkeypatch.setattr(BranchSublayer, "__call__", counted)
    verified(target, context, proposal)

    rows, known, shared_prefix = len(proposal.tree) + 1, 4, KeptSet(kept, SUBLAYERS).shared_prefix
    for index in range(SUBLAYERS):
        wanted = rows - known if index < shared_prefix else rows
        assert rows_run[index] == [wanted], f"sublayer {index}, {shared_prefix} shared"


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_drafted_state_below_the_shared_prefix_is_the_targets(name: str) -> None:
    target, context, proposal = drafted(name, KEPT_SETS["even, and more above"], "chain")
    assert proposal.shared_states is not None
    assert set(proposal.shared_states) == {0, 1, 2, 3, 4}
    alone = verified(target, context, replace(proposal, shared_prefix=0, shared_states={}))
    for index, states in proposal.shared_states.items():
        assert len(states) == 4
        torch.testing.assert_close(states, alone.hidden_states[index][:4], **CLOSE)


def test_a_verification_chooses_what_plain_decoding_writes() -> None:
    """Given the true continuation, every row's choice is the next token of it."""
    target, context, _ = drafted("gemma3", (), "chain")
    text = plain_text("gemma3", prompt(40), 12)
    truth = Proposal(torch.tensor(text[1:9]), TokenTree.chain(8))
    output = verified(target, context, truth)
    assert tuple(output.logits.best.tolist()) == text[1:10]
