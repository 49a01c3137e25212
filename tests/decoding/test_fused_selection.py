"""A selection that rides on a verification changes nothing of it, and comes to what it would have come to alone."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.models import LAYERS, SUBLAYERS, VARIANTS, build, plain_text, prompt
from selfspec.decoding.context import Context
from selfspec.decoding.drafter import Needs
from selfspec.decoding.fused_selection import FusedSelection, SelectionSteps, run_selection
from selfspec.decoding.layer_draft import LayerDraft
from selfspec.decoding.probe import Branches, Probe
from selfspec.decoding.reading import read_text
from selfspec.decoding.run_drafts import run_drafts
from selfspec.decoding.verification import verify
from selfspec.engine import Engine
from selfspec.loading import load_model
from selfspec.methods import clasp, knapspec, make_method
from selfspec.model.kept import KeptSet
from selfspec.runtimes.kernels import most_attending
from selfspec.runtimes.target import Target
from selfspec_lab.prompts import PROMPTS

LENGTH, COUNT, ROWS = 40, 5, 3
MOST_ROWS = 120
"""No verification and selection together have more rows in one forward."""

WIDTHS: dict[str, Callable[[float], int] | None] = {"chain": None, "tree": lambda _: 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "clasp": {"schedule": "paper", "skipped_layers": 2, "draft_exit_threshold": 0.2, "update_interval": 3},
    "knapspec": {
        "schedule": "paper",
        "interval": 3,
        "recent_rounds": 1,
        "max_draft_length": 3,
        "confidence_threshold": 0.2,
    },
}


def steps(states: torch.Tensor) -> SelectionSteps[torch.Tensor]:
    """Passes the odd layers, and keeps some of the branches only."""
    for layer in range(1, LAYERS, 2):
        behind = yield 2 * layer, states
        states = (yield 2 * layer + 1, behind)[: len(states) - 1]
    return states


def drafted(name: str, kept: KeptSet, shape: str) -> tuple[Target, Context, Any]:
    target = Target(build(name))
    needs = Needs(sibling_rows=20, probe_rows=COUNT * ROWS)
    context, _ = read_text(target, prompt(LENGTH), needs, max_new_tokens=40, chunk=16)
    with torch.inference_mode():
        draft = LayerDraft(kept, 4, widths=WIDTHS[shape])
        return target, context, run_drafts(target, [draft.propose(context)])[0]


KEPT = ((1, 2, 5, 8, 11), (0, 1, 2, 5, 7, 10), (0, 1, 2, 3, 4, 5))
SHAPES = itertools.cycle(WIDTHS)
CASES = [(name, next(SHAPES), kept) for name in VARIANTS for kept in KEPT]
"""Each variant with all kept sets, as chains and as trees in turns."""


@pytest.mark.parametrize(("name", "shape", "kept"), CASES, ids=str)
@torch.inference_mode()
def test_a_selection_and_a_verification_do_not_notice_each_other(name: str, shape: str, kept: tuple[int, ...]) -> None:
    target, context, proposal = drafted(name, KeptSet(kept, SUBLAYERS), shape)
    states = torch.randn(COUNT, ROWS, target.hidden_size, generator=torch.Generator().manual_seed(0))
    alone = verify(target, [context], [proposal], [()])[0].logits.values
    outcome = run_selection(steps(states), Probe(context).branches(ROWS).run)

    target, context, proposal = drafted(name, KeptSet(kept, SUBLAYERS), shape)
    assert (proposal.shared_prefix > 0) == (0 in kept)
    for most_rows in (None, 2 * ROWS):
        selection = FusedSelection(steps(states), Probe(context).branches(ROWS, most_rows))
        beside = verify(target, [context], [proposal], [()], [selection])[0].logits.values
        torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(selection.outcome, outcome, rtol=1e-4, atol=1e-4)


def test_an_outcome_needs_a_verification() -> None:
    target, context, _ = drafted("llama", KeptSet.early_exit(2, SUBLAYERS), "chain")
    selection = FusedSelection(steps(torch.zeros(COUNT, ROWS, target.hidden_size)), Probe(context).branches(ROWS))
    with pytest.raises(AssertionError, match="sublayer 2"):
        _ = selection.outcome


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-window", "mixtral-window"])
def test_text_is_the_models_own(name: str, method: str) -> None:
    settings = {**SETTINGS[method], "fused_selection": True}
    result = Engine(build(name), method=method, settings=settings).generate(prompt(17), max_new_tokens=40)
    assert result.token_ids == plain_text(name, prompt(17), 40)
    assert result.accepted > 0
    assert result.rounds[0].kept in (None, KeptSet.full(SUBLAYERS)), "the first selection runs before any set"
    assert len({record.kept for record in result.rounds}) > 1


@pytest.mark.parametrize("method", SETTINGS)
def test_a_fused_selection_chooses_what_it_would_choose_at_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fused selection is run again alone, in the same place."""
    compared = []

    recorded: list[Any] = []
    module = {"clasp": clasp, "knapspec": knapspec}[method]
    name = "choose_skipped" if method == "clasp" else "find_candidates"
    original = getattr(module, name)

    class Twice(FusedSelection[Any]):
        def __init__(self, steps: SelectionSteps[Any], branches: Branches) -> None:
            arguments, options = recorded[-1]
            at_once = run_selection(original(*arguments, **options), branches.run)
            super().__init__(steps, branches)
            compared.append((self, at_once))

    def noted(*arguments: Any, **options: Any) -> SelectionSteps[Any]:
        recorded.append((arguments, options))
        return original(*arguments, **options)

    monkeypatch.setattr(module, "FusedSelection", Twice)
    monkeypatch.setattr(module, name, noted)
    result = Engine(build("llama"), method=method, settings={**SETTINGS[method], "fused_selection": True}).generate(
        prompt(17), max_new_tokens=40
    )
    assert result.accepted > 0
    assert len(compared) > 2
    for selection, at_once in compared[:-1]:
        chosen = selection.outcome if method == "clasp" else selection.outcome.kept
        assert chosen == (at_once if method == "clasp" else at_once.kept)


@pytest.mark.parametrize("method", SETTINGS)
def test_no_forward_of_its_own(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a forward of the selection's own")

    monkeypatch.setattr(Branches, "run", refuse)
    settings = {**SETTINGS[method], "fused_selection": True}
    assert Engine(build("llama"), method=method, settings=settings).generate(prompt(17), max_new_tokens=24).accepted
    with pytest.raises(AssertionError, match="of the selection's own"):
        Engine(build("llama"), method=method, settings=SETTINGS[method]).generate(prompt(17), max_new_tokens=24)


@pytest.mark.trained
@pytest.mark.parametrize("method", SETTINGS)
def test_bfloat16_stays_exact(method: str) -> None:
    """In the kernels no row depends on the others; a selection's rows are others like any."""
    model, tokenizer = load_model("tiny", dtype="bfloat16", device="cpu")
    target = Target(model)
    if target.independent_rows == 0 or most_attending(torch.bfloat16) < MOST_ROWS:
        pytest.skip("there are no kernels for this many rows on this machine")
    plain = Engine(model, tokenizer, method="autoregressive").generate(PROMPTS["math"][0], max_new_tokens=48)
    made = make_method(method, target, {"fused_selection": True})
    fused = Engine(model, tokenizer, made).generate(PROMPTS["math"][0], max_new_tokens=48)
    assert fused.token_ids == plain.token_ids
    assert fused.accepted > 0
