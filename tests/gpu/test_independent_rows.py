"""With the runtime ``triton`` a row has the bits of a single step, so drafts do not change the text in bfloat16."""

from typing import Any

import pytest
import torch

from helpers.checkpoints import make_tokenizer
from helpers.low_bit_model import random_model
from selfspec import Engine, Generation
from selfspec.model.transfer import AsyncCopy
from selfspec.runtimes.chain import VerifyRequest
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.target import Target
from selfspec.sampling.rules import Coupled
from selfspec.sampling.tree import TokenTree

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec.gpu.launch import MOST_ROWS

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
HALF = random_model(torch.bfloat16, **SIZES)
SINGLE = random_model(**SIZES)
PROMPTS = [[5, 17, 3, 99, 42, 8], [7, 7, 1, 7, 7, 1, 7], [60, 2]]
PATH = "Python: Triton's kernels forward by forward"
METHODS: dict[str, dict[str, Any]] = {
    "layerskip": {"exit_layer": 1, "draft_length": 3},
    "token-recycling": {"tree_size": 10},
}


def engine_of(model: torch.nn.Module, method: str, **options: Any) -> Engine:
    return Engine(model, make_tokenizer(), method, settings=METHODS.get(method, {}), runtime="triton", **options)


def plain(prompts: list[list[int]], model: torch.nn.Module = HALF, **changes: Any) -> list[tuple[int, ...]]:
    """The texts of plain decoding, each prompt alone."""
    engine = engine_of(model, "autoregressive")
    return [engine.generate(prompt, ignore_eos=True, **changes).token_ids for prompt in prompts]


def batch_of(model: torch.nn.Module, method: str) -> list[Generation]:
    """The texts of all prompts together; ``token-recycling`` has learned from them what follows each token."""
    engine = engine_of(model, method)
    for _ in range(1 + (method == "token-recycling")):
        results = engine.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)
    return results


def assert_drafted(results: list[Generation]) -> None:
    assert sum(result.drafted for result in results) > 0
    assert sum(result.accepted for result in results) > 0
    played = [each for result in results for each in result.rounds]
    assert {str(each.verification) for each in played if each.verification is not None} == {PATH}


@pytest.mark.parametrize("method", METHODS)
def test_methods_write_the_text_of_plain_decoding_in_bfloat16_alone_and_in_a_batch(method: str) -> None:
    """``token-recycling`` verifies trees."""
    results = batch_of(HALF, method)
    assert_drafted(results)
    assert [result.token_ids for result in results] == plain(PROMPTS, max_new_tokens=6)


def test_drawn_texts_are_those_of_plain_decoding_and_the_device_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.5, "seed": 3}
    expected = plain(PROMPTS[:2], **drawing)
    assert expected != plain(PROMPTS[:2], max_new_tokens=6)
    monkeypatch.delattr(Coupled, "preferences")  # what the host would draft from
    results = engine_of(HALF, "layerskip").generate(PROMPTS[:2], ignore_eos=True, **drawing)
    assert_drafted(results)
    assert [result.token_ids for result in results] == expected


def test_keys_and_values_in_8_bits_change_no_drafted_text() -> None:
    engine = engine_of(HALF, "layerskip", cache_bits=8)
    result = engine.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True)
    assert_drafted([result])
    alone = engine_of(HALF, "autoregressive", cache_bits=8)
    assert result.token_ids == alone.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True).token_ids


@pytest.mark.parametrize("method", ["layerskip", "token-recycling"])
def test_in_float32_the_text_is_that_of_transformers(method: str) -> None:
    results = batch_of(SINGLE, method)
    assert_drafted(results)
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        whole = SINGLE.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
        assert list(result.token_ids) == whole[0, len(prompt) :].tolist()


def test_a_round_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[AsyncCopy] = []
    waited = AsyncCopy.wait
    monkeypatch.setattr(AsyncCopy, "wait", lambda own: waits.append(own) or waited(own))
    result = engine_of(HALF, "layerskip").generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True)
    assert_drafted([result])
    assert 0 < len(waits) <= len(result.rounds) + 1  # one for the prompt


@torch.inference_mode()
def verified(runner: Runner, target: Target, texts: list[list[int]], tree: TokenTree | None) -> torch.Tensor:
    """The logits of the last tokens of some texts in one verification, after the first two of each."""
    requests = []
    for text in texts:
        state = target.new_sequence(2, 64, 64)
        tokens = torch.tensor(text)
        runner.verify([VerifyRequest(state, tokens[:2])], native=False)
        state.cache.commit(range(2))
        shape = {} if tree is None else {"depths": tree.depths, "visible": tree.visibility(torch.device("cpu"))}
        requests.append(VerifyRequest(state, tokens[2:], **shape))
    return torch.cat([each.logits.values for each in runner.verify(requests, native=False)])


@torch.inference_mode()
def stepped(runner: Runner, target: Target, text: list[int]) -> torch.Tensor:
    """The logits after a text, whose tokens are single steps but the first two."""
    state = target.new_sequence(2, 64, 64)
    for part in (text[:2], *([token] for token in text[2:])):
        logits = runner.verify([VerifyRequest(state, torch.tensor(part))], native=False)[0].logits.values
        state.cache.commit(range(len(part)))
    return logits[-1]


def test_rows_of_a_chain_a_tree_and_a_batch_are_single_steps_bit_for_bit() -> None:
    target = Target(HALF, "triton")
    assert target.independent_rows == MOST_ROWS == 64
    runner, texts = target.at(None), [[5, 17, *range(20, 25)], [9, 1, *range(40, 45)]]
    chains = verified(runner, target, texts, None).view(2, 5, -1)
    for text, rows in zip(texts, chains, strict=True):
        assert torch.equal(stepped(runner, target, text), rows[4])
        assert torch.equal(stepped(runner, target, text[:4]), rows[1])
    tree = TokenTree((-1, -1, 0, 1))  # of the four rows after the first
    rows = verified(runner, target, texts[:1], tree)
    for row in (2, 3, 4):
        path = [texts[0][2 + each] for each in tree.path(row)]
        assert torch.equal(stepped(runner, target, [*texts[0][:2], *path]), rows[row])
