"""Attention with fixed splits: the readable attention's numbers, and for each row the bits of the row alone."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.device import DEVICE
from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import Rows, SequenceState
from selfspec.sampling.acceptance import TokenTree

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec.gpu.attention import SPLIT, attend, tree_of

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    """Rows after a prefix, of a chain or of a tree, and the sizes of attention."""

    prefix: int
    parents: tuple[int, ...]
    key_heads: int
    group: int
    dim: int
    window: int | None
    softcap: float | None
    sinks: bool
    dtype: torch.dtype
    seed: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys, values and sinks; slots after the last row's hold numbers, too."""
        made, slots = torch.Generator().manual_seed(self.seed), self.prefix + self.count + 5
        shapes = (self.count, self.heads, self.dim), *2 * ((self.key_heads, slots, self.dim),)
        queries, keys, values = (2 * torch.randn(shape, generator=made).to(DEVICE, self.dtype) for shape in shapes)
        sinks = torch.randn(self.heads, generator=made).to(DEVICE, self.dtype) if self.sinks else None
        return queries, keys, values, sinks

    @property
    def count(self) -> int:
        return len(self.parents) + 1

    @property
    def heads(self) -> int:
        return self.key_heads * self.group

    def rows(self) -> Rows:
        """The rows of the tree, or of a chain."""
        tree, device = TokenTree(self.parents), DEVICE
        cache = KeyValueCache(1, 1, self.prefix + self.count, 8, dtype=torch.float32, device=device)
        state = SequenceState(cache)
        if tree.is_chain:
            return Rows(state, self.prefix, self.count, self.prefix)
        return Rows(state, self.prefix, self.count, self.prefix, tree.depths, tree.visibility(device))


def attended(case: Case, rows: Rows, *tensors: torch.Tensor | None, end: int | None = None) -> torch.Tensor:
    queries, keys, values, sinks = tensors
    assert queries is not None
    assert keys is not None
    assert values is not None
    return attend(
        *(queries, keys, values, rows.positions, end or rows.end),
        scale=0.3,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
        tree=tree_of(rows),
    )


def readable(case: Case, rows: Rows, *tensors: torch.Tensor | None) -> torch.Tensor:
    """Scores, softmax and values one after the other, in float64."""
    queries, keys, values = (tensor.double() for tensor in tensors[:3] if tensor is not None)
    first = rows.first_slot(case.window)
    seen = rows.visibility(case.window)
    keys, values = (each[:, first : rows.end].repeat_interleave(case.group, 0) for each in (keys, values))
    scores = torch.einsum("rhd,hsd->hrs", queries, keys) * 0.3
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if tensors[3] is not None:
        sinks = tensors[3].double()[:, None, None].expand(-1, case.count, 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    return torch.einsum("hrs,hsd->rhd", shares, values).flatten(1)


def parents(draw: st.DrawFn, most: int) -> tuple[int, ...]:
    count = draw(st.integers(0, most - 1))
    if draw(st.booleans()):
        return tuple(range(-1, count - 1))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(count))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    key_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 3), (2, 2)]))
    return Case(
        prefix=draw(st.integers(0, 3 * SPLIT) | st.sampled_from([SPLIT - 2, 2 * SPLIT - 5])),
        parents=parents(draw, 16),
        key_heads=key_heads,
        group=group,
        dim=draw(st.sampled_from([8, 16, 20, 40])),
        window=draw(st.none() | st.integers(1, 2 * SPLIT)),
        softcap=draw(st.none() | st.just(3.0)),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=15)
@given(cases())
@example(Case(150, (-1, -1), 1, 17, 8, None, None, False, torch.bfloat16, 0))
def test_attention_is_that_of_the_readable_form(case: Case) -> None:
    rows, tensors = case.rows(), case.tensors()
    got = attended(case, rows, *tensors)
    assert got.dtype == case.dtype
    torch.testing.assert_close(got.double(), readable(case, rows, *tensors), atol=TOLERANCES[case.dtype], rtol=0.02)


@settings(max_examples=8)
@given(cases(), st.data())
def test_a_row_has_the_bits_of_the_row_alone(case: Case, data: st.DataObject) -> None:
    """Alone its ancestors are in consecutive slots, as after a commit."""
    rows, (queries, keys, values, sinks) = case.rows(), case.tensors()
    together = attended(case, rows, queries, keys, values, sinks, end=rows.end + data.draw(st.integers(0, 2 * SPLIT)))
    for row in {0, case.count - 1, data.draw(st.integers(0, case.count - 1))}:
        path = torch.nonzero(rows.visibility(None)[row]).flatten()
        alone = Rows(rows.sequence, len(path) - 1, 1, len(path) - 1)
        moved = (each[:, path].contiguous() for each in (keys, values))
        single = attended(case, alone, queries[row : row + 1], *moved, sinks)
        assert torch.equal(single[0], together[row])


def test_queries_of_a_joint_projection_and_heads_of_a_larger_cache_are_read_in_place() -> None:
    case = Case(40, (-1, 0), 2, 2, 16, None, None, False, torch.float32, 0)
    queries, keys, values, _ = case.tensors()
    joint = torch.cat([queries, torch.full((3, 4, 16), torch.nan, device=DEVICE)], 1)[:, :4]
    larger = [torch.cat([each, torch.full((2, 9, 16), torch.nan, device=DEVICE)], 1)[:, :48] for each in (keys, values)]
    expected = attended(case, case.rows(), queries, keys, values, None)
    assert torch.equal(attended(case, case.rows(), joint, *larger, None), expected)
    with pytest.raises(AssertionError, match="side by side"):
        attended(case, case.rows(), queries.transpose(0, 1), keys, values, None)


def test_the_path_of_a_row_is_computed_once_and_a_chain_has_none() -> None:
    tree = Case(7, (-1, -1, 0, 1), 1, 1, 8, None, None, False, torch.float32, 0).rows()
    found = tree_of(tree)
    assert found is not None
    assert found.prefix.tolist() == [7]
    assert [found.slots[row, : depth + 1].tolist() for row, depth in enumerate(tree.depths or ())] == [
        *([0], [0, 1], [0, 2]),
        *([0, 1, 3], [0, 2, 4]),
    ]
    assert tree_of(tree) is found
    assert tree_of(Case(7, (-1, 0), 1, 1, 8, None, None, False, torch.float32, 0).rows()) is None
    visible = torch.ones(2, 2, dtype=torch.bool)  # on the host, where nothing waits for it
    with pytest.raises(AssertionError, match="one slot of each position"):
        tree_of(replace(tree, count=2, depths=(0, 1), visible=visible, memo={}))
