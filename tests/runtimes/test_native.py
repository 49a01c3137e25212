"""A native forward against the same sublayers one by one: bit for bit the same states, keys, values and logits."""

import functools
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, SmolLM3Config

from selfspec import Engine
from selfspec.model.masks import branches
from selfspec.runtimes import kernels
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.target import Target
from selfspec.sampling.tree import TokenTree

VOCABULARY, LAYERS = 96, 4
SUBLAYERS = 2 * LAYERS
PREFIX = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 72,
    "intermediate_size": 600,  # more than one part of an activation, and no multiple of a vector
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "llama": functools.partial(LlamaConfig, **SIZES),
    "biases": functools.partial(LlamaConfig, **SIZES, attention_bias=True, mlp_bias=True),
    "window": functools.partial(MistralConfig, **SIZES, sliding_window=16),
    "two-windows": functools.partial(
        Qwen2Config,
        **{**SIZES, "hidden_size": 384},
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_sliding_window=True,
        sliding_window=16,
    ),
    "some-without-rope": functools.partial(
        SmolLM3Config, **{**SIZES, "hidden_size": 384}, no_rope_layer_interval=2, pad_token_id=None
    ),
}
ROWS = (1, 2, 4, 5, 8, 13, 40, 97, 128)


def has_compiler() -> bool:
    try:
        kernels.load()
    except kernels.KernelBuildError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


@functools.cache
def targets(name: str, dtype: torch.dtype) -> tuple[Target, Target]:
    """The same model with a native forward, and with its compiled sublayers one by one."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            elif "embed" in parameter_name:
                parameter.mul_(20)
    native, single = Target(model, "compiled"), Target(model, "compiled")
    assert isinstance(native._native, NativeForward)
    assert native._native.most_rows > 0
    single._native = None
    return native, single


@torch.inference_mode()
def outcome(
    target: Target,
    rows: int,
    sublayers: list[int],
    *,
    capture: tuple[int, ...] = (),
    copied: dict[int, int] | None = None,
    **layout: Any,
) -> list[torch.Tensor]:
    """All that a forward changes or gives: logits, states, keys and values."""
    draw = random.Random(rows)
    ids = torch.tensor([draw.randrange(VOCABULARY) for _ in range(PREFIX + rows)])
    state = target.new_sequence(PREFIX, capacity=PREFIX + 140, last_length=PREFIX + 140)
    step = target.begin(state, PREFIX)
    target.run(target.embed(ids[:PREFIX]), range(SUBLAYERS), step)
    state.cache.commit(range(PREFIX))
    step = target.begin(state, rows, **layout)
    embedded = target.embed(ids[PREFIX:])
    before = embedded.clone()
    copies = {
        index: torch.zeros(count, embedded.shape[1], dtype=target.dtype) for index, count in (copied or {}).items()
    }
    output = target.run(embedded, sublayers, step, capture=capture, copies=copies)
    assert torch.equal(embedded, before), "the states that go in are left as they are"
    captured = [output.captured[index] for index in capture]
    return [
        target.logits(output.hidden_states),
        *captured,
        *copies.values(),
        *state.cache.keys,
        *state.cache.values,
    ]


def assert_same(name: str, dtype: torch.dtype, rows: int, sublayers: list[int], **options: Any) -> None:
    native, single = targets(name, dtype)
    if native._native is None or rows > native._native.most_rows:
        pytest.skip("on this processor torch is faster with so many rows")
    calls: list[int] = []
    run = native._native.run
    native._native.run = lambda *given, **more: calls.append(1) or run(*given, **more)  # type: ignore[method-assign, func-returns-value]
    try:
        ours = outcome(native, rows, sublayers, **options)
    finally:
        native._native.run = run  # type: ignore[method-assign]
    assert calls, "the forward did not run natively"
    for index, (one, other) in enumerate(zip(ours, outcome(single, rows, sublayers, **options), strict=True)):
        assert torch.equal(one, other), f"tensor {index} differs by {(one.float() - other.float()).abs().max()}"
    assert all(torch.isfinite(tensor).all() for tensor in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_sublayers_one_by_one(name: str, rows: int, dtype: torch.dtype) -> None:
    assert_same(name, dtype, rows, list(range(SUBLAYERS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sublayers", [[0], [1], [2, 3, 4], [0, 3, 5, 6], [7], [1, 2, 4, 7]])
def test_any_kept_set(sublayers: list[int], dtype: torch.dtype) -> None:
    assert_same("llama", dtype, 3, sublayers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sublayers", [list(range(SUBLAYERS)), [0, 2, 5], [3]])
def test_states_on_the_way(sublayers: list[int], dtype: torch.dtype) -> None:
    """Of sublayers that run, of skipped ones, of the end; whole, the last rows only, or both."""
    copied = {0: 2, 1: 5, 4: 1, SUBLAYERS: 3}
    assert_same("llama", dtype, 5, sublayers, capture=(0, 1, 3, 4, 6, SUBLAYERS), copied=copied)
    assert_same("llama", dtype, 5, sublayers, copied=copied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "two-windows"])
def test_trees_branches_and_gaps(name: str, dtype: torch.dtype) -> None:
    draw = random.Random(8)
    tree = TokenTree(tuple(draw.randint(max(-1, node - 4), node - 1) for node in range(12)))
    everything = list(range(SUBLAYERS))
    assert_same(name, dtype, 13, everything, depths=list(tree.depths), visible=tree.visibility())
    assert_same(name, dtype, 6, everything, depths=[0, 1, 2] * 2, visible=branches(2, 3))
    assert_same(name, dtype, 3, everything, start=PREFIX + 9, prefix=PREFIX - 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    native, _ = targets("llama", dtype)
    for rows in (1, 6):
        alone = outcome(native, rows, list(range(SUBLAYERS)))
        torch.set_num_threads(3)
        try:
            together = outcome(native, rows, list(range(SUBLAYERS)))
        finally:
            torch.set_num_threads(1)
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_other_dtypes_and_hooked_models_go_without_it() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).eval()
    assert Target(model, "fused")._native is None
    engine = Engine(model, method="uniform", settings={"skip_ratio": 0.25})
    wanted = engine.generate(list(range(20)), max_new_tokens=12).token_ids
    seen: list[int] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert engine.generate(list(range(20)), max_new_tokens=12).token_ids == wanted
    assert seen, "a hooked module is called"
    handle.remove()
