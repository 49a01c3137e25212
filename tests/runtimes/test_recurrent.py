"""Recurrent layers that run rows together: what transformers' modules compute row by row, with all states kept."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

from helpers.gguf_cases import built
from helpers.kernels import needs_kernels
from helpers.models import make, prompt
from selfspec import Engine
from selfspec.model.decoder import Decoder
from selfspec.model.forward import Forward, Rows, SequenceState
from selfspec.model.observed import take_apart
from selfspec.model.slots import find_layers_of_cache
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.recurrent import RecurrentBranch, compile_recurrent
from selfspec.runtimes.runner import RECURRENT
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MAMBAS = ("mamba", "falcon_mamba", "jamba")
FAMILIES = (*NETS, "lfm2", "lfm2_moe", "granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2", *MAMBAS)
EACH = pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "granitemoehybrid", "jamba"])
LENGTH = 9


def compiled_form(part: Sublayer) -> Sublayer:
    return compile_recurrent(part, RECURRENT)


def parts_of(model: Any) -> tuple[Decoder, LayerPart, RecurrentBranch]:
    """A model taken apart, its first recurrent branch by transformers' modules, and as ours."""
    decoder = take_apart(model)
    part = next(part for part in decoder.split() if compiled_form(part) is not part)
    compiled = compiled_form(part)
    assert isinstance(part, LayerPart)
    assert isinstance(compiled, RecurrentBranch)
    return decoder, part, compiled


def shaped(**changes: int) -> Any:
    """A Qwen3.5 model with other sizes of its delta nets."""
    config = copy.deepcopy(built("qwen3_5_text").config)
    for name, value in changes.items():
        setattr(config, f"linear_{name}", value)
    return make(config, "qwen3_5_text")


def biased() -> Any:
    """An LFM2 model whose convolutions have biases."""
    config: Any = copy.deepcopy(built("lfm2").config)
    config.conv_bias = True
    return make(config, "lfm2")


SHAPES = {
    **{family: lambda family=family: built(family) for family in FAMILIES},
    "wide heads": lambda: shaped(key_head_dim=24, value_head_dim=64),
    "heads of values for each of keys": lambda: shaped(num_key_heads=2, num_value_heads=6, value_head_dim=48),
    "a longer convolution": lambda: shaped(conv_kernel_dim=6),
    "biases": biased,
    "a norm beside attention": lambda: built("falcon_h1-norm"),
}


def run(decoder: Decoder, part: Any, states: torch.Tensor, rows: list[int], *, settled: bool = False) -> torch.Tensor:
    """What a part gives for rows of one sequence, of which each forward has ``rows``."""
    state, pieces, start = SequenceState(decoder.new_cache(len(states))), [], 0
    for count in rows:
        forward = forward_of(decoder, state, start, count, settled=settled)
        decoder.embed(torch.zeros(count, dtype=torch.long), forward)
        pieces.append(part(states[start : start + count], forward))
        start += count
        state.cache.length = start
    return torch.cat(pieces)


def forward_of(decoder: Decoder, state: SequenceState, start: int, count: int, *, settled: bool = False) -> Forward:
    return Forward((Rows(state, start, count, start, settled=settled),), decoder.new_rope(), decoder.like)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_it_computes_what_transformers_computes(shape: str) -> None:
    decoder, part, compiled = parts_of(SHAPES[shape]())
    states = torch.randn(LENGTH, decoder.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = run(decoder, part, states, [1] * LENGTH)
    for rows in ([1] * LENGTH, [LENGTH], [4, 2, 3]):
        for settled in (False, True):
            found = run(decoder, compiled, states, rows, settled=settled)
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (expected - states).abs().max() > 0.01, "the net changes the stream"


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2"])
@torch.inference_mode()
def test_a_stream_in_float32_stays_that(family: str) -> None:
    decoder, part, compiled = parts_of(copy.deepcopy(built(family)).to(torch.bfloat16))
    assert part.layer.residual_in_fp32
    states = torch.randn(LENGTH, decoder.hidden_size, generator=torch.Generator().manual_seed(4)) * (1 + 2**-12)
    expected = run(decoder, part, states, [1] * LENGTH)
    found = run(decoder, compiled, states, [4, 2, 3])
    assert found.dtype == expected.dtype == torch.float32
    assert (found - expected).abs().max() < 0.02 * (expected - states).abs().max()


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_that_run_with_it(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products aside, which are torch's here: of some shapes they depend on the number of rows."""
    product = functional.linear
    monkeypatch.setattr(
        functional, "linear", lambda rows, *own: torch.cat([product(row, *own) for row in rows.split(1)])
    )
    wide = {"num_key_heads": 2, "num_value_heads": 4, "value_head_dim": 64}
    model = shaped(**wide) if family == "qwen3_5_text" else copy.deepcopy(built(family))
    decoder, _, compiled = parts_of(model.to(dtype))
    streams = torch.randn(LENGTH, decoder.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    entered = compiled.enter(compiled.norm(streams))
    outputs, kept = [], []
    for rows in ([LENGTH], [1] * LENGTH, [2, 5, 2]):
        state, start, pieces = SequenceState(decoder.new_cache(LENGTH)), 0, []
        for count in rows:
            (own,) = forward_of(decoder, state, start, count).parts
            pieces.append(compiled.follow(own, *(each[start : start + count].contiguous() for each in entered)))
            start += count
            state.cache.length = start
        outputs.append(torch.cat(pieces))
        kept.append(state.cache.states.get(compiled.index, LENGTH - 1))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    for state in kept[1:]:
        assert all(map(torch.equal, tensors_of(state), tensors_of(kept[0])))


def tensors_of(state: Any) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else [*state]


@EACH
@torch.inference_mode()
def test_rows_that_are_dropped_leave_no_trace(family: str) -> None:
    decoder, _, compiled = parts_of(built(family))
    states = torch.randn(LENGTH, decoder.hidden_size, generator=torch.Generator().manual_seed(2))
    expected = run(decoder, compiled, states, [4, 1, 4])[-4:]
    state = SequenceState(decoder.new_cache(LENGTH))
    compiled(states[:4], forward_of(decoder, state, 0, 4))
    state.cache.length = 4
    compiled(torch.cat([states[4:5], -states[5:8]]), forward_of(decoder, state, 4, 4))
    state.cache.length = 5
    assert torch.allclose(compiled(states[5:], forward_of(decoder, state, 5, 4)), expected, atol=1e-6)


@EACH
@torch.inference_mode()
def test_of_settled_rows_the_last_state_is_kept(family: str) -> None:
    decoder, _, compiled = parts_of(built(family))
    state = SequenceState(decoder.new_cache(LENGTH))
    streams = torch.randn(LENGTH, decoder.hidden_size)
    compiled(streams, forward_of(decoder, state, 0, LENGTH, settled=True))
    assert [slot for slot in range(LENGTH) if state.cache.states.get(compiled.index, slot) is not None] == [LENGTH - 1]
    kept = tensors_of(state.cache.states.get(compiled.index, LENGTH - 1))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in kept), "a state holds nothing else"
    compiled(streams[:3], forward_of(decoder, state, 0, 3))
    assert all(state.cache.states.get(compiled.index, slot) is not None for slot in range(3))


@pytest.mark.parametrize(
    ("family", "method"), [*((family, "uniform") for family in FAMILIES), *((family, "suffix") for family in NETS)]
)
def test_every_method_writes_what_transformers_writes(family: str, method: str) -> None:
    model, texts = built(family), [prompt(12) * 2, prompt(30)]
    settings = {"skip_ratio": 0.3, "confidence_threshold": 0.0} if method == "uniform" else {}
    engine = Engine(model, method=method, settings=settings)
    ours = [each for each in engine.target.sublayers if isinstance(each, RecurrentBranch)]
    assert len(ours) == sum(kind.states > 0 for kind in find_layers_of_cache(model.config, layers_of(model))) > 0
    found = engine.generate(texts, max_new_tokens=48, ignore_eos=True)
    for text, each in zip(texts, found, strict=True):
        ids = torch.tensor([text])
        options = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert each.token_ids == tuple(expected[0, len(text) :].tolist())
        assert engine.generate(text, max_new_tokens=48, ignore_eos=True).token_ids == each.token_ids
    assert sum(each.drafted for each in found) > 0
    assert sum(each.accepted for each in found) > 0


def layers_of(model: Any) -> int:
    return int(model.config.num_hidden_layers)


@torch.inference_mode()
def test_steps_of_a_prompt_have_bounds() -> None:
    """As in transformers, which bounds them where it reads several tokens."""
    config: Any = copy.deepcopy(built("granitemoehybrid").config)
    config.time_step_limit = (0.4, 0.6)
    decoder, part, compiled = parts_of(make(config, "granitemoehybrid"))
    free = parts_of(built("granitemoehybrid"))[2]
    states = torch.randn(LENGTH, decoder.hidden_size, generator=torch.Generator().manual_seed(3))
    expected = run(decoder, part, states, [LENGTH], settled=True)
    for chunks in ([LENGTH], [LENGTH - 1, 1]):
        found = run(decoder, compiled, states, chunks, settled=True)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), "in a last chunk of one token, too"
    assert (run(decoder, free, states, [LENGTH], settled=True) - expected).abs().max() > 1e-3
    single = run(decoder, part, states, [1] * LENGTH)[1:]
    assert (run(decoder, compiled, states, [1] * LENGTH)[1:] - single).abs().max() < 1e-5 * single.abs().max()


def test_other_weights_are_noticed() -> None:
    model = shaped()
    _, _, compiled = parts_of(model)
    assert compiled.is_current()
    model.model.layers[0].linear_attn.out_proj.weight = torch.nn.Parameter(torch.zeros(64, 64))
    assert not compiled.is_current()
    model = shaped()
    compiled = parts_of(model)[2]
    assert compiled.is_current()
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log.mul_(2)
    assert not compiled.is_current(), "computed values of weights are held, which may change in place"


@pytest.mark.parametrize("change", ["hook", "activation", "sizes", "eager"])
def test_other_nets_run_by_transformers(change: str) -> None:
    model = shaped(**({"value_head_dim": 24} if change == "sizes" else {}))
    net = model.model.layers[0].linear_attn
    if change == "hook":
        net.out_proj.register_forward_hook(lambda module, given, output: output)
    if change == "activation":
        net.activation = "gelu"
    first = Target(model, "eager" if change == "eager" else "auto").sublayers[0]
    assert type(first) is LayerPart
