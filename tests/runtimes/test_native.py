"""The native forward: against the fused blocks, against its sublayers one by one, and sequences together and alone."""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GlmConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from helpers.kernels import needs_kernels
from selfspec import Engine
from selfspec.model.forward import Forward, SequenceState, branches
from selfspec.runtimes import kernels
from selfspec.runtimes.branches import describe_block, describe_weights
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.target import StackOutput, Target
from selfspec.sampling.acceptance import TokenTree

VOCABULARY, LAYERS = 96, 4
SUBLAYERS = 2 * LAYERS
EVERYTHING = tuple(range(SUBLAYERS))
PREFIX = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 72,
    "intermediate_size": 600,  # more than one task of an activation, and no multiple of a vector
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
PLAIN = {**SIZES, "hidden_size": 384}  # for families whose head size follows from the hidden size
CONFIGS = {
    "llama": functools.partial(LlamaConfig, **SIZES),
    "biases": functools.partial(LlamaConfig, **SIZES, attention_bias=True, mlp_bias=True),
    "window": functools.partial(MistralConfig, **SIZES, sliding_window=16),
    "two-windows": functools.partial(
        Qwen2Config,
        **PLAIN,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_sliding_window=True,
        sliding_window=16,
    ),
    "some-without-rope": functools.partial(SmolLM3Config, **PLAIN, no_rope_layer_interval=2, pad_token_id=None),
    "heads-of-96": functools.partial(LlamaConfig, **{**SIZES, "head_dim": 96}),
    "one-key-head": functools.partial(LlamaConfig, **{**SIZES, "head_dim": 192, "num_key_value_heads": 1}),
    "gemma2": functools.partial(
        Gemma2Config, **SIZES, sliding_window=16, attn_logit_softcapping=5.0, query_pre_attn_scalar=40
    ),
    "gemma3": functools.partial(
        Gemma3TextConfig, **SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "head-norms": functools.partial(Qwen3Config, **SIZES),
    "row-norms-and-norms-after": functools.partial(Olmo2Config, **PLAIN, pad_token_id=None),
    "multipliers": functools.partial(
        GraniteConfig, **PLAIN, residual_multiplier=0.37, attention_multiplier=0.09, logits_scaling=4.0
    ),
    "experts": functools.partial(
        Qwen3MoeConfig, **SIZES, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
    ),
    "shared-expert": functools.partial(
        Qwen2MoeConfig,
        **PLAIN,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=72,
    ),
    "neighbours-in-part": functools.partial(GlmConfig, **SIZES, pad_token_id=None),
    "neighbours-in-float32": functools.partial(Ernie4_5Config, **SIZES, use_bias=True),
    "norms-after-rope": functools.partial(HunYuanDenseV1Config, **SIZES),
    "layer-norms-and-no-gate": functools.partial(Starcoder2Config, **PLAIN, sliding_window=None),
    "layer-norms-plus-one": functools.partial(NemotronConfig, **SIZES),
    "biased-experts": functools.partial(
        Glm4MoeConfig,
        **SIZES,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        n_shared_experts=1,
        moe_intermediate_size=40,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
    ),
    "turned-in-part": functools.partial(
        Phi3Config, **PLAIN, partial_rotary_factor=0.5, pad_token_id=None, bos_token_id=None, eos_token_id=None
    ),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
FAMILIES = pytest.mark.parametrize("name", CONFIGS)
ROWS = (1, 2, 4, 5, 8, 13, 40, 97, 128)


pytestmark = needs_kernels


@functools.cache
@torch.inference_mode(mode=False)
def model(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            elif "embed" in parameter_name:
                parameter.mul_(20)
        for buffer_name, buffer in made.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape))
    return made


@functools.cache
def target(name: str, dtype: torch.dtype, runtime: str = "compiled") -> Target:
    return Target(model(name, dtype), runtime)


@pytest.fixture
def native_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows of every native forward of more than one sublayer, and of every native verification."""
    seen: list[int] = []
    run, verify = NativeForward.run, NativeForward.verify

    def noted(self: NativeForward, stream: torch.Tensor, sublayers: tuple[int, ...], *given: Any, **named: Any) -> Any:
        if len(sublayers) > 1:
            seen.append(len(stream))
        return run(self, stream, sublayers, *given, **named)

    def noted_verify(self: NativeForward, requests: Any, *given: Any) -> Any:
        seen.append(sum(len(each.token_ids) for each in requests))
        return verify(self, requests, *given)

    monkeypatch.setattr(NativeForward, "run", noted)
    monkeypatch.setattr(NativeForward, "verify", noted_verify)
    return seen


@dataclass(frozen=True)
class Request:
    """A sequence with a prompt in its cache, and the rows to run next."""

    prompt: int
    rows: int
    spare: int = 0
    layout: dict[str, Any] = field(default_factory=dict)

    def token_ids(self) -> torch.Tensor:
        draw = random.Random(100 * self.prompt + self.rows)
        return torch.tensor([draw.randrange(VOCABULARY) for _ in range(self.prompt + self.rows)])

    def begin(self, target: Target) -> tuple[torch.Tensor, Forward, SequenceState]:
        """The embedded rows, their forward, and the sequence."""
        token_ids = self.token_ids()
        capacity = self.layout.get("start", self.prompt) + self.rows + self.spare
        state = target.new_sequence(self.prompt, capacity=capacity, last_length=capacity)
        target.run(target.embed(token_ids[: self.prompt]), EVERYTHING, target.lay_out(state, self.prompt))
        state.cache.commit(range(self.prompt))
        return target.embed(token_ids[self.prompt :]), target.lay_out(state, self.rows, **self.layout), state


def cached(state: SequenceState) -> list[torch.Tensor]:
    return [*state.cache.keys, *state.cache.values]


def assert_equal(ours: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for index, (one, other) in enumerate(zip(ours, others, strict=True)):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other), f"tensor {index} differs by {(one.float() - other.float()).abs().max()}"


def skip_if_torch_runs(dtype: torch.dtype, rows: int) -> None:
    if rows > kernels.row_limit(dtype, attends=True):
        pytest.skip("torch is faster with this many rows on this processor")


@torch.inference_mode()
def one_by_one(
    target: Target, stream: torch.Tensor, sublayers: tuple[int, ...], forward: Forward
) -> dict[int, torch.Tensor]:
    """The stream before each sublayer and after the last, by a call for each sublayer."""
    states = {}
    for index in range(SUBLAYERS):
        states[index] = stream
        if index in sublayers:
            stream = target.run(stream, (index,), forward).hidden_states
    return {**states, SUBLAYERS: stream}


@torch.inference_mode()
def assert_same_as_one_by_one(
    name: str, dtype: torch.dtype, rows: int, sublayers: tuple[int, ...], *, copied: dict[int, int], **layout: Any
) -> None:
    """Runs sublayers in one native call; compares every state, kept whole or in part, keys and values."""
    skip_if_torch_runs(dtype, rows)
    native, request = target(name, dtype), Request(PREFIX, rows, 3, layout)
    stream, forward, state = request.begin(native)
    before = stream.clone()
    copies = {index: torch.zeros(count, stream.shape[1], dtype=dtype) for index, count in copied.items()}
    output = native.run(stream, sublayers, forward, capture=range(SUBLAYERS + 1), last_rows=copies)
    assert torch.equal(stream, before), "the states that go in are left as they are"
    _, forward, other = request.begin(native)
    wanted = one_by_one(native, stream, sublayers, forward)
    assert_equal([output.captured[index] for index in range(SUBLAYERS + 1)], list(wanted.values()))
    assert_equal(
        [copies[index] for index in copied], [wanted[index][rows - count :] for index, count in copied.items()]
    )
    assert_equal([output.hidden_states, *cached(state)], [wanted[SUBLAYERS], *cached(other)])


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
@FAMILIES
def test_it_is_the_sublayers_one_by_one(name: str, rows: int, dtype: torch.dtype, native_rows: list[int]) -> None:
    assert_same_as_one_by_one(name, dtype, rows, EVERYTHING, copied={})
    assert rows in native_rows, "the forward did not run natively"


@DTYPES
@pytest.mark.parametrize("sublayers", [(0,), (1,), (2, 3, 4), (0, 3, 5, 6), (7,), (1, 2, 4, 7), (0, 2, 5)])
def test_any_kept_set_and_any_state(sublayers: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_same_as_one_by_one("llama", dtype, 5, sublayers, copied={0: 2, 1: 5, 4: 1, SUBLAYERS: 3})


@DTYPES
@pytest.mark.parametrize("name", ["llama", "two-windows"])
def test_trees_branches_and_gaps(name: str, dtype: torch.dtype) -> None:
    for rows, layout in layouts():
        assert_same_as_one_by_one(name, dtype, rows, EVERYTHING, copied={}, **layout)


@DTYPES
@pytest.mark.parametrize("name", ["llama", "two-windows", "gemma2"])
@given(prompt=st.integers(1, 300), nodes=st.lists(st.integers(1, 4), min_size=1, max_size=15), data=st.data())
@torch.inference_mode()
def test_a_path_of_a_tree_gets_what_its_tokens_get_one_by_one(
    name: str, dtype: torch.dtype, prompt: int, nodes: list[int], data: st.DataObject
) -> None:
    """Whichever slots that they do not see stand between the tokens of the path."""
    native, tree = target(name, dtype), TokenTree(tuple(max(-1, node - back) for node, back in enumerate(nodes)))
    path = tree.path(data.draw(st.integers(1, len(tree)), label="last row"))
    request = Request(prompt, len(tree) + 1, 3, {"depths": list(tree.depths), "visible": tree.visibility()})
    stream, forward, _ = request.begin(native)
    together = native.run(stream, EVERYTHING, forward).hidden_states[path]
    _, _, state = request.begin(native)
    for row, wanted in zip(path, together, strict=True):
        step = native.lay_out(state, 1)
        assert_equal([native.run(stream[row : row + 1], EVERYTHING, step).hidden_states[0]], [wanted])
        state.cache.commit(range(1))


def layouts(prefix: int = PREFIX) -> list[tuple[int, dict[str, Any]]]:
    """Numbers of rows and how they are laid out: a tree, branches, rows after a gap."""
    draw = random.Random(8)
    tree = TokenTree(tuple(draw.randint(max(-1, node - 4), node - 1) for node in range(12)))
    return [
        (13, {"depths": list(tree.depths), "visible": tree.visibility()}),
        (6, {"depths": [0, 1, 2] * 2, "visible": branches(2, 3)}),
        (3, {"start": prefix + 9, "prefix": prefix - 5}),
    ]


@DTYPES
@FAMILIES
@torch.inference_mode()
def test_it_computes_what_the_fused_blocks_compute(name: str, dtype: torch.dtype, native_rows: list[int]) -> None:
    rows = [(1, {}), (3, {}), (7, {}), (16, {}), *layouts()]
    requests = [Request(PREFIX, count, layout=layout) for count, layout in rows]
    for request in (*requests, Request(300, 7)):
        outputs = []
        for runtime in ("compiled", "fused"):
            stream, forward, _ = request.begin(target(name, dtype, runtime))
            output = target(name, dtype, runtime).run(stream, EVERYTHING, forward, capture=range(SUBLAYERS + 1))
            outputs.append(torch.stack([output.captured[index].float() for index in range(SUBLAYERS + 1)]))
        assert native_rows[-1] == request.rows
        native, fused = outputs
        assert (native[-1] - native[0]).abs().mean() > 0.01, "the branches add something"
        # Both sum in float; in bfloat16 a sum near a rounding boundary may round the other way, 2^-8 of it.
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        assert (native - fused).norm() <= tolerance * fused.norm()


@torch.inference_mode()
def alone_and_together(target: Target, requests: list[Request]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The states, keys and values of requests that run one after the other, and in one forward."""
    alone: list[torch.Tensor] = []
    for request in requests:
        stream, forward, state = request.begin(target)
        alone += [*states(target.run(stream, EVERYTHING, forward, capture=(3,))), *cached(state)]
    begun = [request.begin(target) for request in requests]
    joined = Forward.join([forward for _, forward, _ in begun])
    output = target.run(torch.cat([stream for stream, _, _ in begun]), EVERYTHING, joined, capture=(3,))
    together: list[torch.Tensor] = []
    for own, (_, _, state) in zip(joined.slices, begun, strict=True):
        together += [*(tensor[own] for tensor in states(output)), *cached(state)]
    return alone, together


def states(output: StackOutput) -> list[torch.Tensor]:
    return [output.hidden_states, *output.captured.values()]


@DTYPES
@pytest.mark.parametrize("count", [1, 2, 5, 20])
@FAMILIES
def test_sequences_together_are_each_alone(name: str, count: int, dtype: torch.dtype, native_rows: list[int]) -> None:
    draw = random.Random(count)
    requests = [Request(draw.randint(1, 90), draw.randint(1, 8), draw.randint(0, 30)) for _ in range(count)]
    alone, together = alone_and_together(target(name, dtype), requests)
    assert_equal(together, alone)
    assert native_rows[-1] == sum(request.rows for request in requests)


@DTYPES
def test_more_rows_together_than_one_sequence_may_have(dtype: torch.dtype, native_rows: list[int]) -> None:
    requests = [Request(5 + index, 8) for index in range(20)]
    alone, together = alone_and_together(target("two-windows", dtype), requests)
    assert_equal(together, alone)
    assert native_rows[-1] == 160
    assert dtype == torch.bfloat16 or kernels.row_limit(dtype, attends=True) < 160  # in bfloat16 there may be no limit


@DTYPES
@pytest.mark.parametrize("name", ["llama", "two-windows"])
def test_trees_and_branches_together_are_each_alone(name: str, dtype: torch.dtype) -> None:
    requests = [Request(PREFIX, rows, layout=layout) for rows, layout in layouts()] + [Request(20, 5), Request(60, 1)]
    alone, together = alone_and_together(target(name, dtype), requests)
    assert_equal(together, alone)


@DTYPES
@pytest.mark.parametrize("name", ["llama", "two-windows"])
@torch.inference_mode()
def test_a_sequence_twice_in_a_forward(name: str, dtype: torch.dtype) -> None:
    """A verification and, in the slots after it, branches of the same sequence that do not see it."""
    native, rows = target(name, dtype), 4
    between = torch.zeros(6, rows, dtype=torch.bool)
    branched = {
        "start": PREFIX + rows,
        "prefix": PREFIX,
        "depths": [0, 1, 2] * 2,
        "visible": torch.cat([between, branches(2, 3)], dim=1),
    }
    outcomes = []
    for joined in (False, True):
        stream, verification, state = Request(PREFIX, rows, spare=6).begin(native)
        stream = torch.cat([stream, native.embed(torch.arange(6))])
        both = [verification, native.lay_out(state, 6, **branched)]
        if joined:
            outputs = [native.run(stream, EVERYTHING, Forward.join(both)).hidden_states]
        else:
            pieces = stream.split([rows, 6])
            outputs = [native.run(own, EVERYTHING, one).hidden_states for own, one in zip(pieces, both, strict=True)]
        outcomes.append([torch.cat(outputs), *cached(state)])
    assert_equal(*outcomes)


@DTYPES
@torch.inference_mode()
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    """With few rows, which torch multiplies nowhere: its results depend on its threads."""
    for rows in (1, 6):
        requests = [Request(13, rows), Request(9, 3)]
        single = alone_and_together(target("llama", dtype), requests)
        for threads in (3, 16):  # with the latter each attends for a query or two
            torch.set_num_threads(threads)
            try:
                threaded = alone_and_together(target("llama", dtype), requests)
            finally:
                torch.set_num_threads(1)
            for one, other in zip(single, threaded, strict=True):
                assert_equal(one, other)


def test_branches_that_do_not_turn_ask_for_no_rotation() -> None:
    """Of models whose attention has no rope, or runs elsewhere, there is none."""
    target = Target(AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).eval(), "compiled")
    blocks: list[Any] = target.sublayers
    kinds = [block.rope for block in blocks[::2]]
    weights = [describe_weights(block) for block in blocks]
    turns = [
        describe_block(block, own, [None], kinds).turn
        for block, own in zip(blocks, weights, strict=True)
        if own is not None
    ]
    assert turns == [0, -1] * (len(target.sublayers) // 2)


def test_other_runtimes_and_hooked_models_go_without_it(native_rows: list[int]) -> None:
    torch.manual_seed(0)
    hooked = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).eval()
    engine = Engine(hooked, method="uniform", settings={"skip_ratio": 0.25})
    wanted = engine.generate(list(range(20)), max_new_tokens=12).token_ids
    assert native_rows
    seen: list[int] = []
    handle = hooked.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert engine.generate(list(range(20)), max_new_tokens=12).token_ids == wanted
    assert seen, "a hooked module is called"
    handle.remove()
    native_rows.clear()
    fused = Engine(hooked, method="uniform", settings={"skip_ratio": 0.25}, runtime="fused")
    assert fused.generate(list(range(20)), max_new_tokens=12).token_ids == wanted
    assert not native_rows


@FAMILIES
def test_a_native_forward_computes_what_modules_compute(name: str) -> None:
    """Norms, activations, caps, windows and rope against transformers' modules in float32."""
    outputs, made = [], model.__wrapped__(name, torch.float32)  # not one that was made in inference mode
    for chosen in (Target(made, "eager"), Target(made, "compiled")):
        with torch.inference_mode():
            stream, forward, _ = Request(PREFIX, 8).begin(chosen)
            outputs.append(chosen.run(stream, EVERYTHING, forward).hidden_states)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_attention_heads": 5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.5}},
    ],
    ids=["heads", "rope"],
)
def test_heads_that_do_not_fit_never_run_in_the_kernels(sizes: dict[str, Any]) -> None:
    """Five query heads for two key heads, or a rope that is longer than a head: torch says that shapes do not fit."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["biased-experts"](**sizes)).eval()
    engine = Engine(model, method="autoregressive", runtime="compiled")
    with pytest.raises(RuntimeError, match=r"is invalid for input|exceeds dimension size"):
        engine.generate([*range(1, 12)], max_new_tokens=4)
