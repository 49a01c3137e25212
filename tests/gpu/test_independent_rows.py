"""With the runtime ``triton`` a row has the bits of a single step, so drafts do not change the text in bfloat16."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from helpers.checkpoints import make_tokenizer
from helpers.device import DEVICE, IS_INTERPRETED
from helpers.low_bit_model import random_model
from selfspec import Engine, Generation
from selfspec.methods.token_recycling import TokenRecyclingSettings, best_template
from selfspec.model.transfer import AsyncCopy
from selfspec.runtimes import graphs
from selfspec.runtimes.chain import VerifyRequest
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec.sampling.rules import Coupled

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec.gpu import runtime
from selfspec.gpu.launch import MOST_ROWS

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 64}
HALF = random_model(torch.bfloat16, **SIZES).to(DEVICE)
MODELS = {
    "half": HALF,
    "single": random_model(**SIZES).to(DEVICE),
    "heads of 32": random_model(torch.bfloat16, **SIZES, head_dim=32).to(DEVICE),
}
PROMPTS = [[5, 17, 3, 42, 8], [7, 7, 1, 7, 7]]
PATH = "Python: Triton's kernels forward by forward"
LENGTH: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
METHODS: dict[str, dict[str, Any]] = {
    "layerskip": {"exit_layer": 1, "draft_length": 3},
    "token-recycling": {"tree_size": 6},
}


@cache
def engine_of(model: str, method: str, cache_bits: int | None = None) -> Engine:
    settings, tokenizer = METHODS.get(method, {}), make_tokenizer(SIZES["vocab_size"])
    return Engine(MODELS[model], tokenizer, method, settings=settings, runtime="triton", cache_bits=cache_bits)


@cache
def plain(count: int, model: str = "half", cache_bits: int | None = None, **drawing: Any) -> list[tuple[int, ...]]:
    """The texts of plain decoding of the first prompts, each alone."""
    engine, options = engine_of(model, "autoregressive", cache_bits), {**LENGTH, **drawing}
    return [engine.generate(prompt, **options).token_ids for prompt in PROMPTS[:count]]


def drafted(model: str, method: str, count: int) -> list[Generation]:
    """The texts of the first prompts together; ``token-recycling`` has learned from them what follows each token."""
    engine = engine_of(model, method)
    if method == "token-recycling":
        engine.generate(PROMPTS[:count], **LENGTH)
    return engine.generate(PROMPTS[:count], **LENGTH)


def assert_drafted(results: list[Generation], *, trees: bool = False) -> None:
    assert sum(result.drafted for result in results) > 0
    assert sum(result.accepted for result in results) > 0
    played = [each for result in results for each in result.rounds]
    assert any(each.candidates > each.drafted for each in played) == trees
    assert {str(each.verification) for each in played if each.verification is not None} == {PATH}


@pytest.mark.parametrize("method", METHODS)
def test_methods_write_the_text_of_plain_decoding_in_bfloat16_in_a_batch(method: str) -> None:
    """``token-recycling`` verifies trees."""
    results = drafted("half", method, 2)
    assert_drafted(results, trees=method == "token-recycling")
    assert [result.token_ids for result in results] == plain(2)


def test_drawn_texts_are_those_of_plain_decoding_and_the_device_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing: dict[str, Any] = {"temperature": 0.5, "seed": 3}
    expected = plain(2, **drawing)
    assert expected != plain(2)
    monkeypatch.delattr(Coupled, "preferences")  # what the host would draft from
    results = engine_of("half", "layerskip").generate(PROMPTS, **LENGTH, **drawing)
    assert_drafted(results)
    assert [result.token_ids for result in results] == expected


def test_keys_and_values_in_8_bits_change_no_drafted_text() -> None:
    """Their heads have a multiple of 32 numbers."""
    result = engine_of("heads of 32", "layerskip", 8).generate(PROMPTS[0], **LENGTH)
    assert_drafted([result])
    assert [result.token_ids] == plain(1, "heads of 32", 8)


@pytest.mark.parametrize("method", METHODS)
def test_in_float32_the_text_is_that_of_transformers(method: str) -> None:
    (result,) = drafted("single", method, 1)
    assert_drafted([result], trees=method == "token-recycling")
    ids, count = torch.tensor(PROMPTS[:1], device=DEVICE), LENGTH["max_new_tokens"]
    whole = MODELS["single"].generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    assert list(result.token_ids) == whole[0, ids.shape[1] :].tolist()


def test_a_round_waits_for_the_device_once_in_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(2)[:1]
    waits: list[AsyncCopy] = []
    waited = AsyncCopy.wait
    monkeypatch.setattr(AsyncCopy, "wait", lambda own: waits.append(own) or waited(own))
    result = engine_of("half", "layerskip").generate(PROMPTS[0], **LENGTH)
    assert_drafted([result])
    assert [result.token_ids] == expected
    assert 0 < len(waits) <= len(result.rounds) + 1  # one for the prompt


@torch.inference_mode()
def verified(runner: Runner, target: Target, texts: list[list[int]], tree: TokenTree | None) -> torch.Tensor:
    """The logits of the last tokens of some texts in one verification, after the first two of each."""
    requests = []
    for text in texts:
        state = target.new_sequence(2, 128, 128)
        tokens = torch.tensor(text, device=DEVICE)
        runner.verify([VerifyRequest(state, tokens[:2])], native=False)
        state.cache.commit(range(2))
        shape = {} if tree is None else {"depths": tree.depths, "visible": tree.visibility(DEVICE)}
        requests.append(VerifyRequest(state, tokens[2:], **shape))
    return torch.cat([each.logits.values for each in runner.verify(requests, native=False)])


@torch.inference_mode()
def stepped(runner: Runner, target: Target, text: list[int]) -> list[torch.Tensor]:
    """The logits after each token of a text but the first; these are single steps but the first two."""
    state, rows = target.new_sequence(2, 128, 128), []
    for part in (text[:2], *([token] for token in text[2:])):
        rows.append(
            runner.verify([VerifyRequest(state, torch.tensor(part, device=DEVICE))], native=False)[0].logits.values[-1]
        )
        state.cache.commit(range(len(part)))
    return rows


def test_rows_of_a_chain_a_tree_and_a_batch_are_single_steps_bit_for_bit() -> None:
    target = Target(HALF, "triton")
    assert target.independent_rows == MOST_ROWS
    runner, texts = target.at(None), [[5, 17, *range(20, 25)], [9, 1, *range(40, 45)]]
    chains = verified(runner, target, texts, None).view(2, 5, -1)
    for text, rows in zip(texts, chains, strict=True):
        assert torch.equal(torch.stack(stepped(runner, target, text)[1:]), rows)
    tree = TokenTree((-1, -1, 0, 1))  # of the four rows after the first
    rows = verified(runner, target, texts[:1], tree)
    for leaf in (3, 4):
        places = tree.path(leaf)
        alone = stepped(runner, target, [*texts[0][:2], *(texts[0][2 + each] for each in places)])
        assert torch.equal(torch.stack(alone[1:]), rows[places])


def test_so_are_those_of_the_largest_default_tree() -> None:
    """The tree of ``token-recycling``."""
    defaults = TokenRecyclingSettings()
    tree = best_template(defaults.tree_size, defaults.candidates, defaults.tree_depth).tree
    target = Target(random_model(torch.bfloat16, **SIZES | {"num_hidden_layers": 1}).to(DEVICE), "triton")
    runner, text = target.at(None), [5, 17, *(7 * row % 64 for row in range(len(tree) + 1))]
    rows = verified(runner, target, [text], tree)
    places = tree.path(len(tree))  # of the last row, on the lowest level
    alone = stepped(runner, target, [*text[:2], *(text[2 + each] for each in places)])
    assert 64 < len(rows) <= MOST_ROWS
    assert torch.equal(torch.stack(alone[1:]), rows[places])


class AgainRecorder:
    """What is replayed runs again: the numbers of the host that it was recorded with, and what is in memory now."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function


@pytest.mark.parametrize("model", ["half", "single"])
def test_replays_give_the_bits_of_the_kernels(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains and trees, at other places than those that were recorded, and drafts through some of the sublayers."""
    launched = without_graphs(MODELS[model])
    if IS_INTERPRETED:
        for module in (graphs, runtime):
            monkeypatch.setattr(module, "find_recorder", lambda device: AgainRecorder())
    replayed = Target(MODELS[model], "triton")
    texts = [[5, 17, *range(20, 25)], [9, 1, *range(40, 45)]]
    for tree in (None, TokenTree((-1, -1, 0, 1))):
        for text in texts:
            own, other = (verified(each.at(None), each, [text], tree) for each in (replayed, launched))
            assert torch.equal(own, other)
    recorded = replayed.at(None).graphs
    assert recorded is not None
    assert {run.is_tree for run in recorded._replays} == {True, False}
    assert recorded.problem is None
    for kept in ([0, 3], [1, 2, 3]):
        assert torch.equal(*(drafted_through(kept, each) for each in (replayed, launched)))


def without_graphs(model: torch.nn.Module) -> Target:
    target = Target(model, "triton")
    target.at(None).graphs = None
    return target


@torch.inference_mode()
def drafted_through(kept: list[int], target: Target) -> torch.Tensor:
    """The logits of a few steps through some sublayers."""
    runner, state, found = target.at(None), target.new_sequence(3, 128, 128), []
    runner.verify([VerifyRequest(state, torch.tensor(PROMPTS[0][:3], device=DEVICE))], native=False)
    state.cache.commit(range(3))
    for step in range(6):
        forward = runner.lay_out(state, 1, start=3 + step, prefix=3 + step)
        tokens = torch.tensor([7 * step + 1], device=DEVICE)
        output = runner.run(runner.embed(tokens), kept, forward, logits=True)
        assert output.logits is not None
        found.append(output.logits.values)
    return torch.cat(found)
