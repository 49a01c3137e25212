"""Tokens and probabilities of the sliced LM head against whole logits: slices, ties, families, heads left whole."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from helpers.allocations import AllocationCounter
from helpers.models import FAMILY_NAMES, VOCABULARY, build
from selfspec.runtimes.shadow_head import ShadowHead
from selfspec.runtimes.target import Target

HIDDEN = 64
CLEAR = 1e-4
"""Products of a slice and of all outputs may differ in the last bits; tokens are comparable where one is clearly first.
"""


def states(rows: int, like: Target | None = None, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return drawn if like is None else drawn.to(like.dtype)


@torch.inference_mode()
def whole(target: Target, hidden_states: torch.Tensor) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Row by row from whole logits: first of the largest, its probability, and how clearly it is first."""
    tokens, probabilities, gaps = [], [], []
    for row in hidden_states:
        logits = target.logits(row[None])[0].double()
        tokens.append(next(token for token in range(len(logits)) if logits[token] == logits.max()))
        probabilities.append(float((logits - logits.max()).exp().sum() ** -1))
        best = logits.topk(2).values
        gaps.append(float(best[0] - best[1]))
    return tokens, torch.tensor(probabilities), torch.tensor(gaps)


@torch.inference_mode()
def assert_whole(target: Target, hidden_states: torch.Tensor, memory: int, tolerance: float = 1e-5) -> None:
    tokens, probabilities = ShadowHead(target, memory).read(hidden_states)
    assert tokens.dtype == torch.long
    assert probabilities.dtype == torch.float32
    wanted, wanted_probabilities, gaps = whole(target, hidden_states)
    clear = gaps > CLEAR
    assert int(clear.sum()) > 0.8 * len(clear)
    assert torch.equal(tokens[clear], torch.tensor(wanted)[clear])
    torch.testing.assert_close(probabilities, wanted_probabilities, rtol=tolerance, atol=tolerance)
    assert len(set(tokens.tolist())) > 2


# Against whole logits


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("runtime", ["eager", "fused", "auto"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_family_and_runtime(name: str, runtime: str) -> None:
    target = Target(build(name), runtime)
    head = ShadowHead(target, 1)
    assert head.one_pass
    assert_whole(target, states(23), memory=1)


@pytest.mark.parametrize("runtime", ["eager", "auto"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_bfloat16(name: str, runtime: str) -> None:
    with torch.inference_mode(False):
        target = Target(copy.deepcopy(build(name)).bfloat16(), runtime)
    assert_whole(target, states(12, target), memory=1, tolerance=2e-2)


@given(rows=st.integers(1, 70), memory=st.integers(0, 1 << 17), seed=st.integers(0, 99))
def test_any_number_of_rows_and_any_slice(rows: int, memory: int, seed: int) -> None:
    target = Target(build("llama"))
    head = ShadowHead(target, memory)
    with torch.inference_mode():
        tokens, probabilities = head.read(states(rows, seed=seed))
        logits = target.logits(states(rows, seed=seed))
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    assert torch.equal(tokens[clear], logits.argmax(-1)[clear])
    torch.testing.assert_close(probabilities, logits.softmax(-1).amax(-1))


def with_head(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreTrainedModel:
    with torch.inference_mode(False), torch.no_grad():
        model = copy.deepcopy(build("llama"))
        model.lm_head = nn.Linear(HIDDEN, len(weight), bias=bias is not None)
        model.lm_head.weight.copy_(weight)
        if bias is not None:
            model.lm_head.bias.copy_(bias)
        return model.eval()


@pytest.mark.parametrize("runtime", ["eager", "fused", "auto"])
@torch.inference_mode()
def test_of_equals_the_lowest_token(runtime: str) -> None:
    """Every logit is one of eight entries of the normed state, exactly: each is there sixteen times."""
    weight = torch.zeros(VOCABULARY, HIDDEN)
    weight[range(VOCABULARY), [7 - token % 8 for token in range(VOCABULARY)]] = 1.0
    target = Target(with_head(weight), runtime)
    tokens, probabilities = ShadowHead(target, 1).read(states(40))
    logits = target.logits(states(40))
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).tolist() == [16] * 40
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert set(tokens.tolist()) <= set(range(8))
    torch.testing.assert_close(probabilities, logits.softmax(-1).amax(-1))


@torch.inference_mode()
def test_a_whole_slice_may_be_impossible() -> None:
    bias = torch.linspace(-1, 1, VOCABULARY)
    bias[:70] = -torch.inf
    bias[100:] = -torch.inf
    target = Target(with_head(build("llama").lm_head.weight, bias), "fused")
    tokens, probabilities = ShadowHead(target, 1).read(states(9))
    logits = target.logits(states(9))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(probabilities, logits.softmax(-1).amax(-1))


@torch.inference_mode()
def test_a_vocabulary_that_is_no_multiple_of_a_slice() -> None:
    weight = torch.randn(101, HIDDEN, generator=torch.Generator().manual_seed(1))
    target = Target(with_head(weight), "auto")
    tokens, probabilities = ShadowHead(target, 1).read(states(9))
    logits = target.logits(states(9))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(probabilities, logits.softmax(-1).amax(-1))


@torch.inference_mode()
def test_weights_that_were_changed_or_moved_are_seen() -> None:
    model = with_head(build("llama").lm_head.weight)
    head = ShadowHead(Target(model, "fused"), 1)
    before, _ = head.read(states(20))
    model.lm_head.weight.data.neg_()
    changed, _ = head.read(states(20))
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()
    moved, _ = head.read(states(20))
    assert before.tolist() != changed.tolist()
    assert changed.tolist() == Target(with_head(-build("llama").lm_head.weight)).logits(states(20)).argmax(-1).tolist()
    assert moved.tolist() == before.tolist()


# What it reads and what it holds


class Products(TorchDispatchMode):
    """Notes rows and outputs of every product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*arguments, **(keywords or {}))
        if function.__name__.split(".")[0] in ("mm", "addmm", "linear"):
            self.shapes.append(tuple(output.shape))
        return output


def large() -> PreTrainedModel:
    """A model that is mostly vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5000, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    with torch.inference_mode(False):
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(("memory", "largest"), [(1, 64), (1 << 19, 512), (1 << 30, 5000)])
@torch.inference_mode()
def test_every_weight_is_read_once_for_all_rows(memory: int, largest: int) -> None:
    target = Target(large(), "fused")
    with Products() as products:
        tokens, _ = ShadowHead(target, memory).read(states(80))
    assert {rows for rows, _ in products.shapes} == {80}
    assert sum(outputs for _, outputs in products.shapes) == 5000
    assert max(outputs for _, outputs in products.shapes) == largest
    logits = target.logits(states(80))
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    assert torch.equal(tokens[clear], logits.argmax(-1)[clear])
    assert int(tokens[clear].max()) > 4096


@pytest.mark.parametrize("memory", [1 << 18, 1 << 20])
@torch.inference_mode()
def test_memory_is_bounded(memory: int) -> None:
    rows = states(80)
    head = ShadowHead(Target(large(), "fused"), memory)
    with AllocationCounter() as counter:
        head.read(rows)
    assert counter.peak <= memory + 2 * rows.nbytes
    assert counter.largest >= memory / 8, "smaller slices than there is room for"


# Heads that cannot be sliced


class Wrapped(nn.Linear):
    """Stands for a quantised layer or an adapter: what its weights are is its own business."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return -super().forward(hidden_states)


def wrap(model: PreTrainedModel) -> None:
    wrapped = Wrapped(HIDDEN, VOCABULARY, bias=False)
    wrapped.weight = model.lm_head.weight
    model.lm_head = wrapped


def hook(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: -logits)


@pytest.mark.parametrize("change", [wrap, hook])
@torch.inference_mode()
def test_other_heads_take_rows_in_parts(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_head(build("llama").lm_head.weight)
    sliced, _ = ShadowHead(Target(model), 1).read(states(11))
    change(model)
    target = Target(model)
    head = ShadowHead(target, 4 * VOCABULARY * (4 + 4))
    assert not head.one_pass
    assert_whole(target, states(11), memory=1)
    calls, logits = [], target.logits
    monkeypatch.setattr(target, "logits", lambda rows: calls.append(len(rows)) or logits(rows))
    tokens, _ = head.read(states(11))
    assert calls == [4, 4, 3]
    assert tokens.tolist() != sliced.tolist()
