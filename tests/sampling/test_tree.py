"""TokenTree against naive walks over random trees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.sampling.acceptance import ROOT, TokenTree


@st.composite
def trees(draw: st.DrawFn, largest: int = 10) -> TokenTree:
    size = draw(st.integers(0, largest))
    return TokenTree(tuple(draw(st.integers(ROOT, node - 1)) for node in range(size)))


def ancestors(tree: TokenTree, row: int) -> list[int]:
    """Rows above ``row``, nearest first, by the definition: node i is row i + 1."""
    found = []
    while row != 0:
        row = tree.parents[row - 1] + 1
        found.append(row)
    return found


@given(trees())
def test_path_is_the_row_below_its_ancestors(tree: TokenTree) -> None:
    for row in range(len(tree) + 1):
        assert tree.path(row) == [*reversed(ancestors(tree, row)), row]


@given(trees())
def test_depth_counts_the_ancestors(tree: TokenTree) -> None:
    assert tree.depths == tuple(len(ancestors(tree, row)) for row in range(len(tree) + 1))


@given(trees())
def test_a_row_sees_itself_and_its_ancestors(tree: TokenTree) -> None:
    visible = tree.visibility()
    for query in range(len(tree) + 1):
        assert set(visible[query].nonzero().flatten().tolist()) == {query, *ancestors(tree, query)}


@given(trees())
def test_children_are_the_nodes_of_a_parent_in_order(tree: TokenTree) -> None:
    assert len(tree.children) == len(tree) + 1
    for row, children in enumerate(tree.children):
        assert list(children) == [node for node in range(len(tree)) if tree.parents[node] + 1 == row]


@given(trees())
def test_a_chain_is_a_tree_without_siblings(tree: TokenTree) -> None:
    assert tree.is_chain == all(len(children) <= 1 for children in tree.children)
    assert tree.is_chain == (tree == TokenTree.chain(len(tree)))


def test_a_chain_is_causal() -> None:
    assert torch.equal(TokenTree.chain(3).visibility(), torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("parents", [(0,), (ROOT, 1), (-2,), (ROOT, 0, 3)])
def test_a_parent_must_come_before_its_children(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must come before"):
        TokenTree(parents)
