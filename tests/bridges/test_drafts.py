"""The drafts of an engine that shows its texts: against a slow oracle, and by simulation."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.simulated_engine import DEAR, FLAT, Q4_K_M, STEP, SimulatedEngine, common, repeating
from selfspec.bridges.bridge_options import BridgeOptions
from selfspec.bridges.drafts import Drafts
from selfspec.runtimes.costs.rows import RowCosts

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def continuations(text: Sequence[int], earlier: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """By search: what followed each earlier occurrence of the text's longest suffix that has one, ``count`` tokens."""
    for length in range(len(text), 0, -1):
        suffix, found = list(text[len(text) - length :]), []
        for place in range(length, len(text)):
            if list(text[place - length : place]) == suffix:
                copied = list(text[place:])
                found.append((copied * count)[:count])
        for other in earlier:
            for place in range(length, len(other)):
                if list(other[place - length : place]) == suffix:
                    found.append(list(other[place : place + count]))
        if found:
            return found
    return []


def free() -> Drafts:
    """Drafts for an engine whose rows cost nothing, and whose costs are known."""
    now = iter(range(10**9))
    drafts = Drafts(BridgeOptions(row_costs={1: 1.0, 32: 1.0}), clock=lambda: float(next(now)))
    warm = [7, 8]
    for _ in range(6):  # rounds of plain decoding say what a step takes
        drafts.draft([np.array(warm)], [0])
        warm.append(max(warm) + 1)
    return drafts


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=3), TOKENS, st.integers(0, 8))
def test_a_draft_is_what_followed_the_longest_repeated_suffix(
    earlier: list[list[int]], text: list[int], most: int
) -> None:
    drafts = free()
    for each in earlier:
        drafts.draft([np.array([*each, 9])], [0])  # 9 is in no other text, so the next one is new
    (drafted,) = drafts.draft([np.array(text)], [most])
    assert len(drafted) <= most
    kept = [[*each, 9][-17:] for each in earlier]  # the output, here one token, and 16 before it
    found = continuations(text, kept, most)
    if drafted:
        assert any(drafted == each[: len(drafted)] for each in found)
    else:
        assert most == 0 or not found or all(not each for each in found)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.randoms(use_true_random=False),
)
def test_texts_are_told_apart_wherever_their_rows_are(
    texts: list[tuple[list[int], list[int]]], limits: list[int], rng: "np.random.Generator"
) -> None:
    """Rows of a batch change places, as vLLM's do: all that is accepted is counted, and nothing else."""
    drafts = free()
    whole = [np.array([100 + row, *prompt, *output]) for row, (prompt, output) in enumerate(texts)]
    lengths = [2 + len(prompt) for prompt, _ in texts]
    drafted = accepted = 0
    drafts.drafted = drafts.accepted = 0
    while running := [row for row in range(len(texts)) if lengths[row] < len(whole[row])]:
        rng.shuffle(running)  # type: ignore[arg-type]
        shown, most = [whole[row][: lengths[row]] for row in running], [limits[row] for row in running]
        for row, draft, limit in zip(running, drafts.draft(shown, most), most, strict=True):
            right = common(draft, whole[row][lengths[row] :].tolist())
            assert len(draft) <= limit
            drafted += len(draft)
            lengths[row] += 1 + right
            accepted += right if lengths[row] < len(whole[row]) else 0  # what follows is shown to count it
    assert drafts.drafted == drafted
    assert drafts.accepted == accepted


@pytest.mark.parametrize(("costs", "least"), [(FLAT, 2.5), (Q4_K_M, 1.2)])
def test_copied_texts_are_written_faster(costs: RowCosts, least: float) -> None:
    engine = SimulatedEngine(costs)
    outputs = [repeating(seed, 0.97) for seed in range(6)]
    seconds = sum(engine.write(*each) for each in outputs)
    plain = sum(len(output) - 1 for _, output in outputs) * STEP
    assert plain / seconds > least
    assert engine.drafts.accepted > 0.4 * engine.drafts.drafted > 0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.97])
def test_little_is_drafted_and_lost_where_nothing_pays(share: float) -> None:
    engine = SimulatedEngine(DEAR)
    seconds = [engine.write(*repeating(seed, share)) for seed in range(6)]
    assert seconds[0] <= 1.12 * 128 * STEP  # in which costs are learned
    assert max(seconds[1:]) <= (128 + 1.6 + 0.02 * 80) * STEP  # the allowance of auto
    later = engine.drafts.drafted
    engine.write(*repeating(99, share))
    assert engine.drafts.drafted - later <= 2 + 0.02 * 128


def test_nothing_is_drafted_where_costs_say_that_nothing_pays() -> None:
    engine = SimulatedEngine(DEAR, BridgeOptions(row_costs={1: 1, 2: 2.8, 16: 20}))
    for seed in range(4):
        engine.write(*repeating(seed, 0.97))
    assert engine.drafts.drafted == 0
    assert engine.drafts.rounds > 400


def test_the_length_follows_the_acceptance() -> None:
    mean = {}
    for share in (0.6, 0.9, 0.99):
        engine = SimulatedEngine(FLAT)
        for seed in range(6):
            engine.write(*repeating(seed, share))
        drafting = [length for length in engine.lengths if length]
        mean[share] = sum(drafting) / len(drafting)
    assert mean[0.6] < mean[0.9] < mean[0.99]


def test_costs_are_learned_from_the_time_between_rounds() -> None:
    engine = SimulatedEngine(Q4_K_M)
    for seed in range(6):
        engine.write(*repeating(seed, 0.95))
    learned = engine.drafts.costs.now()
    for rows in (1, 4, 8):
        assert learned[rows] == pytest.approx(Q4_K_M(rows), rel=0.2)


def test_an_ended_text_is_copied_from() -> None:
    rng = np.random.default_rng(0)
    output = rng.integers(0, 1000, 100).tolist()
    with_memory, without = SimulatedEngine(FLAT), SimulatedEngine(FLAT, BridgeOptions(memory_tokens=0))
    seconds = {}
    for engine in (with_memory, without):
        engine.write([1, 2, 3], output)
        engine.write([900, 901], [5, 6, 7, 8])
        seconds[engine] = engine.write([4, 1, 2, 3], output)
    assert seconds[with_memory] < 0.5 * seconds[without]
    assert with_memory.drafts.accepted > 0


def test_what_was_forgotten_is_not_copied() -> None:
    engine = SimulatedEngine(FLAT)
    engine.write(*repeating(0, 0.97))
    learned = engine.drafts.costs.now()
    engine.drafts.forget()
    before = engine.drafts.drafted
    engine.write([1, 2, 3], repeating(0, 0.97)[1][:20])  # would be copied from the first text; has no repeats itself
    assert engine.drafts.drafted == before
    assert engine.drafts.costs.now()[1] == pytest.approx(learned[1], rel=0.05)


def test_an_unrelated_text_has_a_drafter_of_its_own() -> None:
    """A draft after a short new text continues that text, though the one before ended with a long match."""
    drafts = free()
    drafts.draft([np.array([1, 2, 3, 4, 5, 6, 1, 2, 3, 4])], [8])
    (drafted,) = drafts.draft([np.array([3, 9, 3])], [8])
    assert drafted[:1] == [9]
    assert drafts.accepted == 0


@pytest.mark.parametrize("texts", [1, 4])
def test_texts_together_are_each_written_once(texts: int) -> None:
    engine = SimulatedEngine(RowCosts((1, 256), (STEP, 2 * STEP)))
    for seed in range(3):
        engine.write_together([repeating(10 * seed + row, 0.97) for row in range(texts)])
    plain = 3 * 127 * STEP
    assert engine.now - 3 * 10 * STEP < plain / 1.5


def test_many_texts_that_begin_together_are_drafted_for() -> None:
    """What one row costs is never seen there, and need not be."""
    engine = SimulatedEngine(FLAT)
    plain = 3 * 127 * FLAT(8)
    for seed in range(3):
        engine.write_together([repeating(10 * seed + row, 0.97) for row in range(8)])
    assert engine.drafts.accepted > 0.4 * engine.drafts.drafted > 0
    assert engine.now - 3 * 10 * STEP < plain / 1.5


def test_a_text_that_repeats_has_the_rows_that_others_do_not_need() -> None:
    """Beside three that copy nothing it takes fewer rounds than they do, and costs them next to nothing."""
    costs = RowCosts((1, 2, 4, 8, 16), tuple(STEP * each for each in (1.0, 1.15, 1.3, 1.6, 2.4)))
    engine = SimulatedEngine(costs)
    seconds = 0.0
    for seed in range(4):
        copied, *others = [repeating(10 * seed + row, share) for row, share in enumerate((1.0, 0.0, 0.0, 0.0))]
        seconds += engine.write_together([copied, *others])
    assert engine.drafts.accepted > 100
    assert seconds < 1.03 * 4 * 127 * costs(4)


def test_time_with_a_prompt_in_it_says_nothing_of_costs() -> None:
    now = [0.0]
    drafts = Drafts(BridgeOptions(), clock=lambda: now[0])
    text = list(range(10))
    for _ in range(20):
        drafts.draft([np.array(text)], [0])
        text.append(len(text))
        now[0] += STEP
    step = drafts.costs(1)
    now[0] += 100.0
    other = [50, 51]
    for _ in range(20):
        drafts.draft([np.array(text), np.array(other)], [0, 0])
        text.append(len(text))
        other.append(len(other) + 50)
        now[0] += STEP
    assert step == pytest.approx(STEP, rel=0.02)
    assert drafts.costs(2) == pytest.approx(STEP, rel=0.1)


def test_more_credit_lets_long_drafts_be_tried_where_rows_are_dear() -> None:
    """As llama.cpp with a Q4_1 file: two rows take 2.8 steps, and 16 rows no more than 11.8."""
    shape = {1: 1.0, 2: 2.8, 4: 4.0, 8: 6.7, 16: 11.8}
    costs = RowCosts(tuple(shape), tuple(STEP * each for each in shape.values()))
    usual = SimulatedEngine(costs, BridgeOptions(row_costs=shape))
    more = SimulatedEngine(costs, BridgeOptions(row_costs=shape, credit=4.0))
    seconds = [sum(engine.write(*repeating(seed, 1.0)) for seed in range(4)) for engine in (usual, more)]
    assert usual.drafts.drafted < 0.3 * more.drafts.drafted
    assert seconds[0] / seconds[1] > 1.1
