"""What methods run between rounds equals the same rows run on their own, and leaves the request as it was."""

import pytest
import torch

from helpers.models import SUBLAYERS, VARIANTS, build, prompt
from selfspec.decoding.drafter import Needs, Probe
from selfspec.decoding.request import Sequence as Generated
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec_lab.testing import read_text

LENGTH = 40
COUNT, ROWS = 5, 3


def prefilled(name: str, probe_rows: int = 0, length: int = LENGTH) -> tuple[Target, Generated]:
    target = Target(build(name))
    return target, read_text(
        target, prompt(LENGTH)[:length], Needs(probe_rows=probe_rows), max_new_tokens=40, chunk=16
    )[0]


def probe_of(context: Generated) -> Probe:
    return Probe(context.target, context.rule, context.state, context.ids)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_branches_equal_each_branch_alone(name: str) -> None:
    target, context = prefilled(name, COUNT * ROWS)
    alone_target, alone = prefilled(name, length=LENGTH - ROWS)
    committed = [keys[:, :, :LENGTH].clone() for keys in context.cache.keys]
    states = torch.randn(COUNT, ROWS, target.hidden_size, generator=torch.Generator().manual_seed(0))
    together = probe_of(context).branches(ROWS)
    for sublayer in range(SUBLAYERS):
        with torch.inference_mode():
            parallel = together.run(sublayer, states)
            step = alone_target.lay_out(alone.state, ROWS)
            expected = [alone_target.run(state, (sublayer,), step).hidden_states for state in states]
        torch.testing.assert_close(parallel, torch.stack(expected), rtol=1e-4, atol=1e-4)
        states = parallel
    assert all(map(torch.equal, committed, (keys[:, :, :LENGTH] for keys in context.cache.keys)))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_points_equal_each_token_alone(name: str) -> None:
    """A row at a token equals the row at the end of a sequence that stops before it."""
    places = (11, 12, 17, 30, LENGTH - 1)
    target, context = prefilled(name, COUNT * len(places))
    committed = [keys[:, :, :LENGTH].clone() for keys in context.cache.keys]
    states = torch.randn(COUNT, len(places), target.hidden_size, generator=torch.Generator().manual_seed(0))
    whole, parts = probe_of(context).points(places), probe_of(context).points(places, most_rows=2 * len(places) + 1)
    alone = [prefilled(name, length=place) for place in places]
    for sublayer in range(SUBLAYERS):
        with torch.inference_mode():
            together = whole.run(sublayer, states)
            torch.testing.assert_close(parts.run(sublayer, states), together, rtol=1e-4, atol=1e-4)
            for column, (other, sequence) in enumerate(alone):
                for row in range(COUNT):
                    step = other.lay_out(sequence.state, 1)
                    expected = other.run(states[row, column : column + 1], (sublayer,), step).hidden_states
                    torch.testing.assert_close(together[row, column : column + 1], expected, rtol=1e-4, atol=1e-4)
        states = together
    assert all(map(torch.equal, committed, (keys[:, :, :LENGTH] for keys in context.cache.keys)))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_candidate_scores_the_recent_tokens_as_if_it_had_read_them_last(name: str) -> None:
    _, context = prefilled(name, probe_rows=8)
    alone_target, alone = prefilled(name, length=LENGTH - 8)
    kept = KeptSet((0, 1, 4, 6, 7, 11), SUBLAYERS)
    with torch.inference_mode():
        scored = probe_of(context).score(kept, 8)
        step = alone_target.lay_out(alone.state, 8)
        read = alone_target.embed(context.token_ids[LENGTH - 8 : LENGTH])
        expected = alone_target.logits(alone_target.run(read, kept.sublayers, step).hidden_states)
    torch.testing.assert_close(scored, expected, rtol=1e-4, atol=1e-4)
    assert context.cache.length == LENGTH


def test_the_full_set_predicts_what_the_target_wrote() -> None:
    _, context = prefilled("llama", probe_rows=1)
    with torch.inference_mode():
        scores = probe_of(context).score(KeptSet.full(SUBLAYERS), 1)
    assert int(scores.argmax()) == int(context.pending)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1024])
@pytest.mark.parametrize("rows", [1, 10, 64])
def test_the_prefill_hands_over_the_states_of_the_last_prompt_rows(chunk: int, rows: int) -> None:
    target, _ = prefilled("gemma3")
    states = {}
    for size in (chunk, LENGTH):
        needs = Needs(prompt_rows=rows if size == chunk else LENGTH, prompt_states=frozenset({0, 5, SUBLAYERS}))
        states[size] = read_text(target, prompt(LENGTH), needs, chunk=size)[1].hidden_states
    for index in (0, 5, SUBLAYERS):
        kept = states[chunk][index]
        assert len(kept) == min(rows, LENGTH)
        torch.testing.assert_close(kept, states[LENGTH][index][-rows:], rtol=1e-4, atol=1e-4)
