"""Log-probabilities of output and prompt against a forward of transformers in float32."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.checkpoints import make_tokenizer
from helpers.models import VOCABULARY, build, prompt
from helpers.runs import METHODS_OF_ANY_MODEL as METHODS
from selfspec import Engine, SamplingParams
from selfspec.decoding.output import token_logprobs
from selfspec.errors import NonFiniteLogitsError
from selfspec.runtimes.target import RUNTIMES
from selfspec.types import Generation, TokenLogprobs

PROMPT = prompt(21)
SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {"skip_ratio": 0.3, "draft_length": 4, "confidence_threshold": 0.0},
    "layerskip": {"exit_layer": 4, "draft_length": 4},
    "swift": {"context_window": 6, "confidence_threshold": 0.3, "max_draft_length": 5},
}
CPU_RUNTIMES = [runtime for runtime in RUNTIMES if runtime not in ("graphs", "triton")]


def engine(method: str = "layerskip", name: str = "llama", **options: Any) -> Engine:
    return Engine(build(name), make_tokenizer(), method, settings=SETTINGS.get(method), **options)


def assert_right(reported: Sequence[TokenLogprobs], text: Sequence[int], first: int, name: str = "llama") -> None:
    """What is reported of ``text[first:]`` is what transformers computes of it."""
    with torch.no_grad():
        rows = build(name)(torch.tensor([list(text)])).logits[0].double().log_softmax(-1).tolist()
    assert [each.token_id for each in reported] == list(text[first:])
    for place, each in enumerate(reported, start=first):
        row = rows[place - 1]
        assert abs(each.logprob - row[text[place]]) < 1e-4
        best = sorted(range(VOCABULARY), key=lambda token_id: -row[token_id])[: len(each.top)]
        for (token_id, logprob), expected in zip(each.top, best, strict=True):
            assert abs(logprob - row[expected]) < 1e-4
            assert abs(logprob - row[token_id]) < 1e-4


def check(result: Generation, top: int, name: str = "llama") -> None:
    assert result.logprobs is not None
    assert len(result.logprobs) == result.new_token_count
    assert all(len(each.top) == top for each in result.logprobs)
    assert_right(result.logprobs, [*PROMPT, *result.token_ids], len(PROMPT), name)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_every_method_have_the_logprobs_of_the_model(method: str) -> None:
    result = engine(method).generate(PROMPT, max_new_tokens=40, logprobs=3, ignore_eos=True)
    assert result.token_ids == engine("autoregressive").generate(PROMPT, max_new_tokens=40, ignore_eos=True).token_ids
    check(result, 3)
    if method in SETTINGS:
        assert {"prefill", "draft", "target"} == set(result.origins)


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "qwen3-moe"])
def test_every_runtime_reports_the_same(name: str, runtime: str) -> None:
    result = engine(name=name, runtime=runtime).generate(
        PROMPT, max_new_tokens=12, logprobs=5, prompt_logprobs=2, ignore_eos=True
    )
    check(result, 5, name)
    assert result.prompt_logprobs is not None
    assert_right(result.prompt_logprobs[1:], PROMPT, 1, name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.7, "seed": 3, "top_k": 5},
        {"temperature": 1.2, "seed": 3, "acceptance": "speculative", "min_p": 0.05},
        {"frequency_penalty": 1.0, "logit_bias": {9: 5.0}},
    ],
)
def test_the_distribution_is_the_models_own_whatever_changes_the_scores(parameters: dict[str, Any]) -> None:
    result = engine("swift").generate(PROMPT, max_new_tokens=40, logprobs=2, ignore_eos=True, **parameters)
    assert result.accepted > 0
    check(result, 2)


def test_a_stream_has_the_logprobs_of_each_piece() -> None:
    stream = engine().stream(PROMPT, max_new_tokens=20, logprobs=0)
    pieces = list(stream)
    assert tuple(piece.logprobs for piece in pieces) == stream.result.logprobs
    assert all(piece.logprobs is not None and piece.logprobs.top == () for piece in pieces)


def test_nothing_is_reported_that_was_not_asked_for() -> None:
    result = engine().generate(PROMPT, max_new_tokens=5)
    assert result.logprobs is result.prompt_logprobs is None
    assert not {"logprobs", "prompt_logprobs"} & result.to_dict().keys()
    assert all(piece.logprobs is None for piece in engine().stream(PROMPT, max_new_tokens=5))


def test_an_output_that_ends_inside_a_draft_has_as_many_logprobs_as_tokens() -> None:
    whole = engine().generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    inside = next(place for place, origin in enumerate(whole.origins) if origin == "draft")
    result = engine().generate(PROMPT, max_new_tokens=40, logprobs=1, stop_token_ids=(whole.token_ids[inside],))
    check(result, 1)
    assert result.finish_reason == "stop_token"


@pytest.mark.parametrize("chunk", [1, 5, 1024])
@pytest.mark.parametrize("memory", [1, 3 * 4 * VOCABULARY, 2**26])
def test_a_prompt_is_scored_alike_in_chunks_and_parts(chunk: int, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.decoding.prompt.MOST_LOGITS_BYTES", memory)
    result = engine(prefill_chunk=chunk).generate(PROMPT, max_new_tokens=3, prompt_logprobs=4)
    assert result.prompt_logprobs is not None
    first, *others = result.prompt_logprobs
    assert first is None
    assert_right(others, PROMPT, 1)  # type: ignore[arg-type]


def test_a_prompt_can_be_scored_without_an_output() -> None:
    scored = engine()
    result = scored.generate(PROMPT, max_new_tokens=0, prompt_logprobs=1, logprobs=1)
    assert (result.token_ids, result.text, result.finish_reason) == ((), "", "length")
    assert (result.logprobs, result.rounds, result.tokens_per_second) == ((), (), 0.0)
    assert result.prompt_logprobs is not None
    assert_right(result.prompt_logprobs[1:], PROMPT, 1)  # type: ignore[arg-type]
    assert list(scored.stream(PROMPT, max_new_tokens=0, prompt_logprobs=1)) == []
    assert scored.generate([7], max_new_tokens=0, prompt_logprobs=0).prompt_logprobs == (None,)
    assert scored.generate([1] * 1024, max_new_tokens=0, prompt_logprobs=0).prompt_token_count == 1024


def test_prompts_of_a_batch_are_scored_as_alone() -> None:
    prompts = [prompt(length) for length in (30, 3, 1)]
    params = SamplingParams(max_new_tokens=6, prompt_logprobs=2, logprobs=2)
    together = engine(prefill_chunk=8).generate(prompts, params)
    for prompt_ids, result in zip(prompts, together, strict=True):
        assert result.prompt_logprobs is not None
        assert_right(result.prompt_logprobs[1:], prompt_ids, 1)  # type: ignore[arg-type]
        assert result.logprobs is not None
        assert_right(result.logprobs, [*prompt_ids, *result.token_ids], len(prompt_ids))


def test_the_json_object_holds_what_was_asked_for() -> None:
    result = engine().generate(PROMPT, max_new_tokens=2, logprobs=1, prompt_logprobs=0)
    printed = result.to_dict()
    assert result.logprobs is not None
    (top_id, top_logprob), *_ = result.logprobs[0].top
    assert printed["logprobs"][0] == {
        "token_id": result.token_ids[0],
        "logprob": result.logprobs[0].logprob,
        "top": [{"token_id": top_id, "logprob": top_logprob}],
    }
    assert printed["prompt_logprobs"][0] is None
    assert len(printed["prompt_logprobs"]) == len(PROMPT)


def test_a_broken_model_is_an_error_without_an_output_too() -> None:
    model = copy.deepcopy(build("llama"))
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(NonFiniteLogitsError):
        Engine(model, method="autoregressive").generate(PROMPT, max_new_tokens=0, prompt_logprobs=1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(0, 20), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_are_read_as_they_are_defined(rows: int, top: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (6 * torch.randn(rows, 17, generator=generator)).to(dtype)
    token_ids = torch.randint(17, (rows,), generator=generator).tolist()
    reported = token_logprobs(logits, token_ids, top)
    for row, token_id, each in zip(logits.tolist(), token_ids, reported, strict=True):
        normaliser = math.log(sum(math.exp(value) for value in row))
        assert each.token_id == token_id
        assert each.logprob == pytest.approx(row[token_id] - normaliser, abs=1e-5)
        assert [value for _, value in each.top] == pytest.approx(
            [value - normaliser for value in sorted(row, reverse=True)[:top]], abs=1e-5
        )
        assert all(value == pytest.approx(row[token] - normaliser, abs=1e-5) for token, value in each.top)
