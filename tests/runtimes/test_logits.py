"""Final norm, LM head and the choice of a token within a native forward, against the same from whole logits."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, LlamaForCausalLM, PreTrainedConfig

from helpers.low_bit_model import SIZES, SUBLAYERS, random_model
from helpers.models import build
from selfspec.model.forward import Forward
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.stack import StackOutput
from selfspec.runtimes.target import Target

EVERYTHING = range(SUBLAYERS)
DTYPES = [torch.float32, torch.bfloat16]


def forward_of(target: Target, counts: list[int], *, logits: bool, precision: int = 16) -> StackOutput:
    """A forward of several sequences from their start."""
    model = target.at(Precision.of(precision))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (sum(counts),), generator=generator)
    layouts = [target.lay_out(target.new_sequence(rows, rows, rows), rows) for rows in counts]
    with torch.inference_mode():
        forward = Forward.join(layouts)
        return model.run(target.embed(tokens), EVERYTHING, forward, logits=logits, confidence=logits)


@pytest.mark.parametrize("precision", [16, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [[1], [3], [7, 1, 2]], ids=str)
def test_logits_of_one_call_are_those_of_two(counts: list[int], dtype: torch.dtype, precision: int) -> None:
    target = Target(random_model(dtype))
    output = forward_of(target, counts, logits=True, precision=precision)
    apart = forward_of(target, counts, logits=False, precision=precision)
    assert apart.logits is None
    assert output.logits is not None
    assert torch.equal(output.hidden_states, apart.hidden_states)
    whole = target.at(Precision.of(precision)).logits(apart.hidden_states, max(counts))
    assert torch.equal(output.logits.values, whole)
    assert torch.equal(output.logits.best, whole.argmax(-1))
    torch.testing.assert_close(output.logits.confidence, torch.softmax(whole.float(), -1).amax(-1))
    assert output.logits.finite.tolist() == [True] * sum(counts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_those_of_the_models_own_modules(dtype: torch.dtype) -> None:
    model = random_model(dtype)
    states = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        logits = Target(model).logits(states)
        expected = model.lm_head(model.model.norm(states))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_logits_whatever_rows_are_beside_it(dtype: torch.dtype) -> None:
    target = Target(random_model(dtype))
    states = torch.randn(9, target.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    together, normed = target.logits(states), target.norm(states)
    for row in range(9):
        assert torch.equal(target.logits(states[row : row + 1])[0], together[row])
        assert torch.equal(target.norm(states[row : row + 1])[0], normed[row])


def test_the_first_of_equal_logits_is_chosen() -> None:
    model = wide_model()
    with torch.no_grad():
        model.lm_head.weight[:] = 0
        model.lm_head.weight[[9_000, 17_000, 20_001]] = 1.0  # in spans of their own
    target = Target(model)
    logits = forward_of(target, [4], logits=True).logits
    assert logits is not None
    assert torch.equal(logits.best, logits.values.argmax(-1))
    assert set(logits.best.tolist()) <= {0, 9_000}
    torch.testing.assert_close(logits.confidence, torch.softmax(logits.values.float(), -1).amax(-1))


@pytest.mark.parametrize("place", [0, 8_191, 8_192, 20_001])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_noticed(place: int, value: float) -> None:
    model = wide_model()
    with torch.no_grad():
        model.lm_head.weight[place] = value
    logits = forward_of(Target(model), [2], logits=True).logits
    assert logits is not None
    assert logits.finite.tolist() == [False, False]


def wide_model() -> LlamaForCausalLM:
    """A vocabulary of several spans, the last of them short."""
    model = random_model()
    model.resize_token_embeddings(20_002)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config",
    [GraniteConfig(**SIZES, logits_scaling=8.0), Gemma2Config(**SIZES, head_dim=32, final_logit_softcapping=2.0)],
    ids=["divided", "capped"],
)
def test_scaled_logits_choose_from_what_is_scaled(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    target = Target(model)
    output = forward_of(target, [3], logits=True)
    assert output.logits is not None
    values = output.logits.values
    assert torch.equal(values, target.logits(output.hidden_states))
    assert torch.equal(output.logits.best, values.argmax(-1))
    close = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(values, Target(model, "eager").logits(output.hidden_states), rtol=close, atol=close)
    assert float(values.abs().max()) > 0.1


def test_a_model_without_native_head_has_logits_too() -> None:
    target = Target(build("llama"), "eager")
    output = target.run(
        target.embed(torch.tensor([1, 2])),
        range(target.sublayer_count),
        target.lay_out(target.new_sequence(2, 2, 2), 2),
        logits=True,
    )
    assert output.logits is not None
    assert torch.equal(output.logits.values, target.logits(output.hidden_states))


def test_logits_are_split_by_sequence() -> None:
    values = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    best, confidence = values.argmax(-1), torch.softmax(values, -1).amax(-1)
    for logits in (Logits(values), Logits(values, best, confidence, torch.ones(5, dtype=torch.bool))):
        first, second = logits.split([2, 3])
        assert torch.equal(torch.cat([first.values, second.values]), values)
        assert torch.equal(torch.cat([first.best, second.best]), best)
        assert torch.equal(torch.cat([first.confidence, second.confidence]), confidence)
        assert first.finite.tolist() == [True] * 2
        assert second.finite.tolist() == [True] * 3
