"""Biases, penalties and least lengths, against decoding as it is defined."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.checkpoints import make_tokenizer
from helpers.models import VOCABULARY, build, prompt
from helpers.slow_decoding import p_value_of_samples, slow_greedy, slow_scores
from selfspec import Engine, SamplingParams
from selfspec.errors import InvalidParameterError
from selfspec.sampling.processors import build_processors

MODEL = build("llama")
PROMPT = prompt(12)
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "layerskip": {"exit_layer": 4, "draft_length": 4},
    "swift": {"context_window": 6, "confidence_threshold": 0.3, "max_draft_length": 5},
    "token-recycling": {"candidates": 8, "tree_size": 24, "prompt_rows": 0},
}
BIAS = {7: 3.0, 11: -100.0, 90: 1.5}
CASES = {
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.6},
    "rewards": {"presence_penalty": -0.4, "frequency_penalty": -0.1},
    "bias": {"logit_bias": BIAS},
    "all": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": BIAS},
}


def engine(method: str) -> Engine:
    return Engine(MODEL, make_tokenizer(), method, settings=METHODS[method])


tokens = st.integers(0, 9)
penalties = st.floats(-2, 2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(tokens, min_size=1, max_size=5),
    st.lists(tokens, max_size=12),
    st.integers(0, 4),
    st.fixed_dictionaries(
        {
            "presence_penalty": penalties,
            "frequency_penalty": penalties,
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "logit_bias": st.dictionaries(tokens, st.floats(-100, 100)),
            "min_tokens": st.integers(0, 12),
            "temperature": st.sampled_from([0.0, 0.7]),
        }
    ),
)
def test_scores_of_drafted_rows_are_those_of_the_definition(
    prompt_ids: list[int], output: list[int], drafted: int, parameters: dict[str, Any]
) -> None:
    params, ends = SamplingParams(**parameters), {3, 8, 1000}
    first = max(0, len(output) - drafted)
    logits = 3 * torch.randn(len(output) - first + 1, 10, generator=torch.Generator().manual_seed(len(output)))
    processor = build_processors(params, len(prompt_ids), ends)
    scores = processor(logits, lambda row: torch.tensor([prompt_ids + output[: first + row]]))
    expected = [
        slow_scores(row, params, prompt_ids, output[: first + index], ends) for index, row in enumerate(logits.tolist())
    ]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_slow_decoding(case: str) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, **CASES[case])
    expected = slow_greedy(MODEL, PROMPT, params)
    assert expected != slow_greedy(MODEL, PROMPT, SamplingParams(max_new_tokens=40)), "the parameters change nothing"
    for method in METHODS:
        result = engine(method).generate(PROMPT, params)
        assert result.token_ids == expected, method
        assert method == "autoregressive" or result.drafted > 0
        assert method not in ("layerskip", "swift") or result.accepted > 0


@pytest.mark.parametrize("case", CASES)
def test_a_seed_gives_the_text_of_plain_decoding(case: str) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0.8, seed=5, ignore_eos=True, **CASES[case])
    plain = engine("autoregressive").generate(PROMPT, params)
    for method in METHODS:
        assert engine(method).generate(PROMPT, params).token_ids == plain.token_ids, method


@pytest.mark.parametrize("method", METHODS)
def test_speculative_sampling_has_the_distribution_of_the_definition(method: str) -> None:
    params = SamplingParams(
        max_new_tokens=250, temperature=1.3, seed=3, acceptance="speculative", ignore_eos=True, **CASES["all"]
    )
    result = engine(method).generate(PROMPT, params)
    assert result.accepted > 0 or method not in ("layerskip", "swift")
    assert p_value_of_samples(MODEL, PROMPT, result.token_ids, params) > 1e-3


def test_the_test_of_distributions_notices_a_missing_penalty() -> None:
    params = SamplingParams(max_new_tokens=250, temperature=1.3, seed=3, ignore_eos=True)
    result = engine("autoregressive").generate(PROMPT, params)
    wrong = replace(params, presence_penalty=0.5, frequency_penalty=0.5)
    assert p_value_of_samples(MODEL, PROMPT, result.token_ids, wrong) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_an_output_does_not_end_before_min_tokens(method: str) -> None:
    free = engine("autoregressive").generate(PROMPT, max_new_tokens=40, ignore_eos=True).token_ids
    ends = (free[3], free[20])
    ended = engine(method).generate(PROMPT, max_new_tokens=40, stop_token_ids=ends)
    assert (ended.new_token_count, ended.finish_reason) == (free.index(free[3]) + 1, "stop_token")
    params = SamplingParams(max_new_tokens=40, min_tokens=15, stop_token_ids=ends)
    result = engine(method).generate(PROMPT, params)
    assert not set(result.token_ids[:15]) & set(ends)
    assert result.token_ids == slow_greedy(MODEL, PROMPT, params, {0, *ends})


def test_an_ignored_end_of_sequence_is_not_forbidden() -> None:
    bias = {0: 100.0}
    assert engine("layerskip").generate(PROMPT, max_new_tokens=6, logit_bias=bias).token_ids == (0,)
    forced = engine("layerskip").generate(PROMPT, max_new_tokens=6, logit_bias=bias, min_tokens=4)
    assert (forced.new_token_count, forced.token_ids[4], forced.finish_reason) == (5, 0, "eos")
    ignored = engine("layerskip").generate(PROMPT, max_new_tokens=6, logit_bias=bias, min_tokens=4, ignore_eos=True)
    assert ignored.token_ids == (0,) * 6


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=f"logit_bias names token {VOCABULARY}"):
        engine("layerskip").stream(PROMPT, logit_bias={VOCABULARY: 1.0})


def test_the_bias_of_a_request_cannot_be_changed_from_outside() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 7.0
    assert params.logit_bias == {3: 1.0}
    assert hash(params) == hash(SamplingParams())
