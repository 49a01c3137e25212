"""Logits processors on several rows against transformers, one row at a time."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from helpers.kernels import found_again, needs_kernels
from selfspec.errors import InvalidParameterError
from selfspec.model.forward import Likely
from selfspec.runtimes.kernels import find, why_no_kernels
from selfspec.sampling.processors import IGNORE_CONTEXT, REFUSED, KeepLikely, ScoreProcessor, build_processors
from selfspec.types import SamplingParams

VOCAB = 40
ROWS = 5
EOS = torch.tensor([1])


class Counting(LogitsProcessor):
    """A user's own processor: favours a token by the length of the context, and writes in place."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        scores[:, input_ids.shape[1] % VOCAB] += 1
        return scores


FACTORIES: dict[str, Callable[[], LogitsProcessor]] = {
    "TemperatureLogitsWarper": lambda: logits_process.TemperatureLogitsWarper(0.7),
    "TopKLogitsWarper": lambda: logits_process.TopKLogitsWarper(9),
    "TopPLogitsWarper": lambda: logits_process.TopPLogitsWarper(0.8),
    "TopHLogitsWarper": lambda: logits_process.TopHLogitsWarper(0.6),
    "MinPLogitsWarper": lambda: logits_process.MinPLogitsWarper(0.05),
    "TypicalLogitsWarper": lambda: logits_process.TypicalLogitsWarper(0.8),
    "EpsilonLogitsWarper": lambda: logits_process.EpsilonLogitsWarper(0.02),
    "EtaLogitsWarper": lambda: logits_process.EtaLogitsWarper(0.02),
    "InfNanRemoveLogitsProcessor": lambda: logits_process.InfNanRemoveLogitsProcessor(),
    "LogitNormalization": lambda: logits_process.LogitNormalization(),
    "SuppressTokensLogitsProcessor": lambda: logits_process.SuppressTokensLogitsProcessor([3, 5]),
    "RepetitionPenaltyLogitsProcessor": lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.3),
    "NoRepeatNGramLogitsProcessor": lambda: logits_process.NoRepeatNGramLogitsProcessor(2),
    "MinLengthLogitsProcessor": lambda: logits_process.MinLengthLogitsProcessor(7, EOS),
    "SequenceBiasLogitsProcessor": lambda: logits_process.SequenceBiasLogitsProcessor([[[4, 6], 2.0], [[8], -3.0]]),
    "ForcedEOSTokenLogitsProcessor": lambda: logits_process.ForcedEOSTokenLogitsProcessor(8, 1),
    "Counting": Counting,
}
PRESENT = {name: make for name, make in FACTORIES.items() if name == "Counting" or hasattr(logits_process, name)}


def some_logits(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)


def context(row: int) -> torch.Tensor:
    """A prompt and a path that grows by a token a row, with repetitions."""
    return torch.tensor([[2, 4, 6, 4, 2, 8, 4, 6, 4][: 4 + row]])


def one_by_one(processors: LogitsProcessorList, logits: torch.Tensor) -> torch.Tensor:
    """What ``generate`` computes: a float32 copy of one row and its context."""
    rows = [logits[row : row + 1].to(torch.float32, copy=True) for row in range(len(logits))]
    return torch.cat([processors(context(row), scores) for row, scores in enumerate(rows)])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(PRESENT)), max_size=4),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_are_what_generate_computes(names: list[str], seed: int, dtype: torch.dtype) -> None:
    logits = some_logits(seed, dtype)
    before = logits.clone()
    scores = ScoreProcessor([PRESENT[name]() for name in names])(logits, context)
    assert scores.dtype == torch.float32
    assert torch.equal(logits, before), "the logits themselves must stay as they are"
    expected = one_by_one(LogitsProcessorList([PRESENT[name]() for name in names]), logits)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", sorted(set(PRESENT) & IGNORE_CONTEXT))
def test_classes_said_to_ignore_the_context_do(name: str) -> None:
    logits = some_logits(5)
    contexts = (torch.randint(VOCAB, (ROWS, 7)), torch.randint(VOCAB, (ROWS, 1)))
    assert torch.equal(*(PRESENT[name]()(input_ids, logits.clone()) for input_ids in contexts))


def test_every_class_said_to_ignore_the_context_is_tested() -> None:
    assert set(FACTORIES) >= IGNORE_CONTEXT


def test_contexts_are_made_only_if_they_are_read() -> None:
    asked: list[int] = []

    def watched(row: int) -> torch.Tensor:
        asked.append(row)
        return context(row)

    build_processors(SamplingParams(temperature=0.7, top_k=10, top_p=0.9, min_p=0.1))(some_logits(0), watched)
    assert asked == []
    build_processors(SamplingParams(temperature=0.7, top_k=10, repetition_penalty=1.2))(some_logits(0), watched)
    assert asked == list(range(ROWS))


def test_a_subclass_of_a_class_that_ignores_the_context_may_read_it() -> None:
    class Annealed(logits_process.TemperatureLogitsWarper):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return scores / input_ids.shape[1]

    scores = ScoreProcessor([Annealed(0.5)])(some_logits(0), context)
    assert torch.equal(scores[2], some_logits(0)[2] / 6)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_processors_that_cannot_score_drafted_rows_are_refused(name: str) -> None:
    kind = getattr(logits_process, name, None)
    if kind is None:
        pytest.skip("not in this transformers")
    for refused in (kind, type("Own", (kind,), {})):
        with pytest.raises(InvalidParameterError, match=refused.__name__):
            ScoreProcessor([refused.__new__(refused)])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.6, "top_k": 12, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        {"temperature": 1.3, "top_k": 5, "top_p": 1.0, "min_p": 0.1, "repetition_penalty": 0.8},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5},
    ],
)
def test_built_processors_are_those_of_generate(model: LlamaForCausalLM, parameters: dict) -> None:
    greedy = parameters["temperature"] == 0
    given = {name: value for name, value in parameters.items() if value or name != "min_p"}
    config = GenerationConfig(**(given | {"temperature": 1.0} if greedy else given), do_sample=not greedy)
    config._eos_token_tensor = None
    theirs = model._get_logits_processor(config, input_ids_seq_length=4, device="cpu", model_kwargs={})
    ours = LogitsProcessorList(build_processors(SamplingParams(**parameters)).processors)
    assert torch.equal(one_by_one(ours, some_logits(3)), one_by_one(theirs, some_logits(3)))


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": True},
        {"top_p": 1.1},
        {"top_p": -0.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"temperature": 0, "top_p": 7},
    ],
)
def test_bad_parameters_are_named(parameters: dict) -> None:
    with pytest.raises(InvalidParameterError, match=list(parameters)[-1]):
        SamplingParams(**parameters)


def likely_slowly(scores: list[float], likely: Likely) -> tuple[set[int], float]:
    """The tokens that are kept, in exact numbers as far as that is possible, and how close another one came to it."""
    order = sorted((token for token, score in enumerate(scores) if score > -math.inf), key=lambda t: (-scores[t], -t))
    if likely.top_k:
        last = scores[order[: likely.top_k][-1]]
        order = [token for token in order if scores[token] >= last]
    weights = [math.exp(scores[token] - scores[order[0]]) for token in order]
    before = [math.fsum(weights[:place]) / math.fsum(weights) for place in range(len(order))]
    kept = {token for token, share in zip(order, before, strict=True) if share < likely.top_p}
    possible = {token for token, weight in zip(order, weights, strict=True) if weight >= likely.min_p}
    edges = [abs(share - likely.top_p) for share in before] + [abs(weight - likely.min_p) for weight in weights]
    return kept & possible, min(edges)


@given(
    size=st.integers(1, 700),
    spread=st.sampled_from([0.01, 0.3, 2.0, 8.0, 60.0]),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),  # of which many are equal
    forbidden=st.floats(0, 0.9),
    likely=st.builds(Likely, st.integers(0, 800), st.floats(0.001, 1), st.floats(0, 1)),
)
def test_the_most_likely_tokens_are_kept(
    size: int, spread: float, seed: int, dtype: torch.dtype, forbidden: float, likely: Likely
) -> None:
    """By kernels where there are some. Transformers' processors keep the same, but any of several that are equal."""
    why_no_kernels()  # or they are loaded
    generator = torch.Generator().manual_seed(seed)
    scores = (spread * torch.randn(3, size, generator=generator)).to(dtype).float()
    scores[:, 1:] = scores[:, 1:].masked_fill(torch.rand(3, size - 1, generator=generator) < forbidden, -torch.inf)
    before, keep = scores.clone(), KeepLikely(likely)
    kept, slowly = keep(torch.empty(3, 0), scores), keep._slowly(torch.empty(3, 0), scores)
    assert torch.equal(scores, before)
    for row in range(3):
        expected, edge = likely_slowly(scores[row].tolist(), likely)
        if edge > 1e-5:
            allowed = torch.full([size], -torch.inf).index_fill(0, torch.tensor(sorted(expected)), 0.0)
            assert torch.equal(kept[row], scores[row] + allowed)
            assert torch.equal(slowly[row].sort().values, kept[row].sort().values)


@needs_kernels
def test_rows_whose_largest_score_is_infinite_stay_as_they_are() -> None:
    find()
    scores = torch.tensor([[torch.inf, 1.0, 0.0], [-torch.inf] * 3])
    for likely in (Likely(1), Likely(0, 0.5), Likely(0, 1, 0.5)):
        assert torch.equal(KeepLikely(likely)(torch.empty(2, 0), scores), scores)


def test_kernels_are_not_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs without them would wait for that in the middle of an output."""
    monkeypatch.setattr("selfspec.runtimes.kernels._build_once", lambda *_: pytest.fail("built"))
    monkeypatch.setattr("selfspec.runtimes.kernels._find_library", lambda _: (Path("/not/there"), ""))
    with found_again():
        kept = KeepLikely(Likely(2))(torch.empty(1, 0), torch.tensor([[1.0, 3.0, 2.0]]))
    assert kept.tolist() == [[-torch.inf, 3.0, 2.0]]
