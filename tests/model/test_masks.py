"""Masks, element by element against their definition."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import Rows, SequenceState, branches, causal
from selfspec.sampling.acceptance import TokenTree


@dataclass(frozen=True)
class Case:
    """The rows of a forward, in plain lists."""

    start: int
    prefix: int
    positions: tuple[int, ...]
    visible: tuple[tuple[bool, ...], ...] | None

    @property
    def rows(self) -> Rows:
        sequence = SequenceState(KeyValueCache(1, 1, 1, 1, dtype=torch.float32, device=torch.device("cpu")))
        visible = None if self.visible is None else torch.tensor(self.visible, dtype=torch.bool)
        depths = tuple(position - self.prefix for position in self.positions)
        return Rows(sequence, self.start, len(depths), self.prefix, depths, visible)

    def sees(self, row: int, slot: int, window: int | None) -> bool:
        """The definition."""
        own = slot - self.start
        position = slot if own < 0 else self.positions[own]
        if window is not None and position <= self.positions[row] - window:
            return False
        if slot < self.prefix:
            return True
        if self.visible is not None:
            return self.visible[row][slot - self.prefix]
        return 0 <= own <= row


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chains, trees and arbitrary masks, right after the prefix or with a gap."""
    prefix, rows = draw(st.just(0) | st.integers(1, 12)), draw(st.integers(1, 6))
    if draw(st.booleans()):
        start = draw(st.sampled_from([prefix, prefix + draw(st.integers(1, 4))]))
        return Case(start, prefix, tuple(range(prefix, prefix + rows)), None)
    if draw(st.booleans()):
        tree = TokenTree(tuple(draw(st.integers(-1, node - 1)) for node in range(rows - 1)))
        visible = tuple(tuple(row) for row in tree.visibility().tolist())
        return Case(prefix, prefix, tuple(prefix + depth for depth in tree.depths), visible)
    gap = draw(st.integers(0, 3))
    flags = st.lists(st.booleans(), min_size=gap + rows, max_size=gap + rows).map(tuple)
    positions = tuple(prefix + draw(st.integers(gap, gap + rows)) for _ in range(rows))
    return Case(prefix + gap, prefix, positions, tuple(draw(flags) for _ in range(rows)))


windows = st.none() | st.integers(1, 4) | st.integers(5, 15)


def defined_mask(case: Case, first: int, window: int | None) -> torch.Tensor:
    end = case.start + len(case.positions)
    return torch.tensor(
        [[case.sees(row, slot, window) for slot in range(first, end)] for row in range(len(case.positions))],
        dtype=torch.bool,
    )


@given(cases(), windows)
def test_each_row_sees_what_the_definition_says(case: Case, window: int | None) -> None:
    rows = case.rows
    first = rows.first_slot(window)
    assert torch.equal(rows.visibility(window), defined_mask(case, first, window))
    left_out = [(row, slot) for row in range(rows.count) for slot in range(first) if case.sees(row, slot, window)]
    assert not left_out, "rows see slots that attention will not read"


@given(cases(), windows, st.booleans())
def test_the_mask_may_be_left_out_only_where_attention_does_without(
    case: Case, window: int | None, causal_kernel: bool
) -> None:
    rows = case.rows
    mask = rows.mask(window, torch.float32, additive=False, causal_kernel=causal_kernel)
    wanted = defined_mask(case, rows.first_slot(window), window)
    if mask is not None:
        assert mask.shape == (1, 1, *wanted.shape)
        assert torch.equal(mask[0, 0], wanted)
    elif rows.count > 1:
        assert causal_kernel, "only a causal kernel can do without a mask for several rows"
        assert torch.equal(wanted, torch.ones(rows.count, rows.count, dtype=torch.bool).tril())
    else:
        assert wanted.all()


@given(cases(), windows, st.sampled_from([torch.float32, torch.bfloat16]))
def test_an_additive_mask_is_zero_or_lowest(case: Case, window: int | None, dtype: torch.dtype) -> None:
    rows = case.rows
    mask = rows.mask(window, dtype, additive=True, causal_kernel=False)
    wanted = defined_mask(case, rows.first_slot(window), window)
    if mask is None:
        assert wanted.all()
        return
    assert mask.dtype == dtype
    lowest = torch.finfo(dtype).min
    assert torch.equal(mask[0, 0], torch.where(wanted, 0.0, lowest).to(dtype))


def test_a_mask_is_made_once_for_each_window() -> None:
    rows = Case(5, 5, (5, 6, 7), None).rows
    options = {"dtype": torch.float32, "additive": False, "causal_kernel": True}
    assert rows.mask(2, **options) is rows.mask(2, **options)
    assert rows.mask(2, **options).shape != rows.mask(None, **options).shape


@given(st.integers(1, 12))
def test_causal(rows: int) -> None:
    wanted = [[key <= query for key in range(rows)] for query in range(rows)]
    assert causal(rows).tolist() == wanted


@given(st.integers(1, 4), st.integers(1, 5))
def test_branches_see_themselves_only(count: int, length: int) -> None:
    rows = range(count * length)
    wanted = [[key <= query and key // length == query // length for key in rows] for query in rows]
    assert branches(count, length).tolist() == wanted


@pytest.mark.parametrize(("window", "first"), [(None, 0), (4, 17), (1, 20), (100, 0)])
def test_attention_reads_no_further_back_than_the_window(window: int | None, first: int) -> None:
    assert Case(20, 20, (20, 21, 22), None).rows.first_slot(window) == first


@pytest.mark.parametrize("window", [None, 4, 50])
@pytest.mark.parametrize("seed", range(4))
def test_a_filled_mask_is_the_rows_own_with_nothing_around_it(window: int | None, seed: int) -> None:
    draw = random.Random(seed)
    tree = TokenTree(tuple(draw.randint(max(-1, node - 4), node - 1) for node in range(6)))
    sequence = SequenceState(KeyValueCache(1, 1, 1, 1, dtype=torch.float32, device=torch.device("cpu")))
    for rows in (
        Rows(sequence, 10, 7, 10),
        Rows(sequence, 12, 7, 10),
        Rows(sequence, 10, 7, 10, tree.depths, tree.visibility()),
    ):
        mask = torch.ones(8, 3, 32, dtype=torch.bool)
        rows.fill(window, mask)
        wanted = torch.zeros(8, 32, dtype=torch.bool)
        wanted[:7, rows.first_slot(window) : rows.end] = rows.visibility(window)
        wanted[7, 0] = True
        assert all(torch.equal(mask[:, repeat], wanted) for repeat in range(3))
