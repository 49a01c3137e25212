"""A verification computes what the target computes of these tokens, whatever was drafted before it."""

from functools import cache

import pytest
import torch

from helpers.models import FAMILY_NAMES, SUBLAYERS, build, plain_text, prompt
from selfspec.decoding.draft import LayerDraft, Proposal
from selfspec.decoding.drafter import Needs
from selfspec.decoding.request import Sequence as Generated
from selfspec.decoding.round import propose
from selfspec.decoding.verification import Verified, verify
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec_lab.testing import read_text

ALL_STATES = range(SUBLAYERS + 1)
SIBLINGS = 20

KEPT_SETS = {
    "even, an early exit": (0, 1, 2, 3, 4, 5),
    "even, and more above": (0, 1, 2, 3, 6, 7, 9, 10, 11),
    "without the first": (1, 2, 5, 8, 11),
    "everything": tuple(range(SUBLAYERS)),
}
WIDTHS = {"chain": None, "tree": lambda _: 3}


@cache
def _target(name: str) -> Target:
    return Target(build(name))


def begun(name: str) -> Generated:
    """A context after its prefill."""
    return read_text(_target(name), prompt(40), Needs(sibling_rows=SIBLINGS), max_new_tokens=40)[0]


def drafted(context: Generated, kept: tuple[int, ...], shape: str) -> Proposal:
    """A draft of four tokens, or of a tree around them."""
    draft = LayerDraft(KeptSet(kept, SUBLAYERS), 4, widths=WIDTHS[shape])
    with torch.inference_mode():
        return propose(context.target, [context], [draft])[0]


def verified(context: Generated, proposal: Proposal) -> Verified:
    with torch.inference_mode():
        (output,) = verify(context.target, [context], [proposal], [ALL_STATES])
    assert output is not None
    return output


def written(context: Generated, rows: int) -> list[torch.Tensor]:
    """What a verification has written, by layer and kind ``[heads, rows, head_dim]``."""
    cache = context.cache
    return [buffer[:, :, cache.length : cache.length + rows] for buffer in (*cache.keys, *cache.values)]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shape", WIDTHS)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_draft_leaves_nothing_to_its_verification(name: str, shape: str) -> None:
    """Logits, states, keys and values are those of a verification of the same tokens that nothing came before."""
    for where, kept in KEPT_SETS.items():
        context, other = begun(name), begun(name)
        proposal = drafted(context, kept, shape)
        assert proposal.tree.is_chain == (shape == "chain")
        after, alone = verified(context, proposal), verified(other, Proposal(proposal.token_ids, proposal.tree))
        assert after.hidden_states.keys() == alone.hidden_states.keys() == set(ALL_STATES)
        for index in ALL_STATES:
            assert torch.equal(after.hidden_states[index], alone.hidden_states[index]), (where, index)
        rows = len(proposal.tree) + 1
        assert all(map(torch.equal, written(context, rows), written(other, rows))), where
        assert after.logits is not None
        assert alone.logits is not None
        assert torch.equal(after.logits.values, alone.logits.values), where


def test_a_verification_chooses_what_plain_decoding_writes() -> None:
    """Given the true continuation, every row's choice is the next token of it."""
    text = plain_text("gemma3", prompt(40), 12)
    output = verified(begun("gemma3"), Proposal(torch.tensor(text[1:9]), TokenTree.chain(8)))
    assert output.logits is not None
    assert tuple(output.logits.best.tolist()) == text[1:10]
