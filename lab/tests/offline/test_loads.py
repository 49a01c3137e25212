"""The bytes of the roofline are those that the kernels load."""

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec.gpu import attention
from selfspec.gpu.head import SPAN, choose
from selfspec.gpu.launch import multiply_dense
from selfspec_lab.offline.block_forms import block_forms
from selfspec_lab.offline.fraction import program_of
from selfspec_lab.offline.loads import counted_accesses
from selfspec_lab.roofline import ModelShape, forward_work


def test_one_row_of_attention_loads_the_keys_and_values_that_it_sees_once() -> None:
    shape, context = ModelShape(48, 1, 4, 2, 16, 8, 8), 2 * attention.SPLIT
    queries = torch.randn(1, 4, 16, dtype=torch.bfloat16)
    keys, values = (torch.randn(2, context + 9, 16).bfloat16() for _ in range(2))
    positions = torch.tensor([context - 1])
    with counted_accesses() as accesses:
        attention.attend(queries, keys, values, positions, context, scale=1.0)
    work = next(work for work in forward_work(shape, context=context) if work.name == "attention")
    assert accesses.distinct(keys) + accesses.distinct(values) == work.bytes
    form = next(each for each in block_forms() if each.constexprs.get("GROUP") == 4)
    program, sizes = program_of(form), form.constexprs
    assert program is not None
    assert program.bytes * 2 * 2 * 16 / sizes["DIM"] == work.bytes  # two splits, two key heads
    partial = 2 * 4 * (16 + 2) * 4  # splits, heads, sums and two weights of float32
    assert accesses.stored == partial + queries.nbytes


def test_more_rows_of_a_tile_load_keys_and_values_no_more_often() -> None:
    keys, values = (torch.randn(1, 70, 16) for _ in range(2))
    loaded = []
    for rows in (1, 16):
        with counted_accesses() as accesses:
            positions = torch.arange(70 - rows, 70)
            attention.attend(torch.randn(rows, 1, 16), keys, values, positions, 70, scale=1.0)
        loaded.append(accesses.distinct(keys) + accesses.distinct(values))
    assert loaded[0] == loaded[1] == keys.nbytes + values.nbytes


def test_a_dense_product_loads_its_weights_once() -> None:
    rows, weight = torch.randn(3, 100), torch.randn(70, 100)
    with counted_accesses() as accesses:
        multiply_dense(rows, weight)
    assert accesses.distinct(weight) == weight.nbytes
    assert accesses.loaded >= weight.nbytes + rows.nbytes


def test_a_choice_loads_the_logits_once() -> None:
    logits = torch.randn(2, SPAN + 11).bfloat16()
    with counted_accesses() as accesses:
        choose(logits)
    assert accesses.distinct(logits) == logits.nbytes
    assert accesses.loaded < logits.nbytes + 200
