"""A forward over rows of several sequences gives each of them what it gets alone: states, keys, values and logits."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
)

from helpers.models import FAMILY_NAMES, ROPE_SWITCH, SUBLAYERS, WINDOW, build, prompt
from selfspec.model.forward import Forward, SequenceState, branches
from selfspec.runtimes.kernels import KernelBuildError
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec_lab.testing import verifies_exactly

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
EVERY_STATE = (0, 3, 4, SUBLAYERS)
VARIANT_NAMES = (*FAMILY_NAMES, "llama-eager", "llama-dynamic-rope", "phi3-longrope", "smollm3")


@dataclass(frozen=True)
class Part:
    """The rows of one sequence: after a committed prefix, laid out in some way."""

    length: int
    rows: int
    layout: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def tree(length: int, size: int) -> "Part":
        draw = random.Random(size)
        tree = TokenTree(tuple(draw.randint(max(-1, node - 4), node - 1) for node in range(size)))
        return Part(length, size + 1, {"depths": list(tree.depths), "visible": tree.visibility()})

    @staticmethod
    def branches(length: int, count: int, rows: int) -> "Part":
        return Part(length, count * rows, {"depths": [*range(rows)] * count, "visible": branches(count, rows)})

    @staticmethod
    def after_gap(length: int, rows: int, gap: int, back: int) -> "Part":
        """Rows of an earlier position, in scratch slots, as a method scores a kept set on the last tokens."""
        return Part(length, rows, {"start": length + gap, "prefix": length - back})

    @property
    def capacity(self) -> int:
        return self.length + self.rows + 8


MIXES = {
    "single rows": [Part(length, 1) for length in (3, 17, 40, 9, 64)],
    "every layout": [
        Part(20, 4),
        Part.tree(33, 8),
        Part.branches(12, 2, 3),
        Part.after_gap(50, 3, gap=2, back=5),
        Part(1, 40),
        Part(0, 6),
    ],
    "long and short": [Part(WINDOW + 3, 1), Part(50, 40), Part(5, 2)],
}


@torch.inference_mode()
def prefilled(target: Target, part: Part) -> SequenceState:
    state = target.new_sequence(max(1, part.length), part.capacity, last_length=part.length + part.rows)
    if part.length:
        token_ids = torch.tensor(prompt(part.length, seed=part.length))
        target.run(target.embed(token_ids), range(target.sublayer_count), target.lay_out(state, part.length))
        state.cache.commit(range(part.length))
    return state


@dataclass
class Outcome:
    """What a forward leaves of one part."""

    hidden_states: torch.Tensor
    captured: dict[int, torch.Tensor]
    logits: torch.Tensor
    keys_and_values: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.hidden_states, *self.captured.values(), self.logits, *self.keys_and_values]


def run_rows(target: Target, states: list[SequenceState], parts: list[Part], sublayers: Sequence[int]) -> list[Outcome]:
    """One forward over all parts."""
    forwards = [target.lay_out(state, part.rows, **part.layout) for state, part in zip(states, parts, strict=True)]
    token_ids = [token for index, part in enumerate(parts) for token in prompt(part.rows, seed=part.length + 1)]
    forward = Forward.join(forwards)
    assert forward.rows == len(token_ids)
    with torch.inference_mode():
        output = target.run(target.embed(torch.tensor(token_ids)), sublayers, forward, EVERY_STATE)
        logits = target.logits(output.hidden_states, max(part.rows for part in parts))
    return [
        Outcome(
            output.hidden_states[own],
            {index: output.captured[index][own] for index in EVERY_STATE},
            logits[own],
            [tensor.clone() for tensor in (*state.cache.keys, *state.cache.values)],
        )
        for state, own in zip(states, forward.slices, strict=True)
    ]


def outcomes(
    target: Target, parts: list[Part], sublayers: Sequence[int] = range(SUBLAYERS)
) -> list[tuple[Outcome, Outcome]]:
    """For each part what it gets together with the others, and alone."""
    together = run_rows(target, [prefilled(target, part) for part in parts], parts, sublayers)
    alone = [run_rows(target, [prefilled(target, part)], [part], sublayers)[0] for part in parts]
    return list(zip(together, alone, strict=True))


def assert_close(target: Target, parts: list[Part], sublayers: Sequence[int] = range(SUBLAYERS)) -> None:
    for part, (ours, wanted) in zip(parts, outcomes(target, parts, sublayers), strict=True):
        for one, other in zip(ours.tensors, wanted.tensors, strict=True):
            torch.testing.assert_close(one, other, **CLOSE, msg=lambda text, part=part: f"{part}: {text}")
        assert torch.equal(ours.logits.argmax(-1), wanted.logits.argmax(-1))
        assert torch.isfinite(ours.logits).all()


def assert_equal(target: Target, parts: list[Part], sublayers: Sequence[int] = range(SUBLAYERS)) -> None:
    for part, (ours, wanted) in zip(parts, outcomes(target, parts, sublayers), strict=True):
        for index, (one, other) in enumerate(zip(ours.tensors, wanted.tensors, strict=True)):
            assert torch.equal(one, other), f"tensor {index} of {part} differs"
        assert torch.isfinite(ours.logits).all()


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("runtime", ["eager", "fused", "compiled"])
@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_every_sequence_gets_what_it_gets_alone(name: str, runtime: str) -> None:
    target = Target(build(name), runtime)
    for parts in MIXES.values():
        assert_close(target, parts)


@pytest.mark.parametrize("runtime", ["eager", "fused", "compiled"])
@pytest.mark.parametrize("sublayers", [[0], [5], [0, 1, 4, 5, 9], [2, 3]])
def test_with_any_kept_set(sublayers: list[int], runtime: str) -> None:
    assert_close(Target(build("gemma3"), runtime), MIXES["every layout"], sublayers)


@pytest.mark.parametrize("runtime", ["eager", "fused", "compiled"])
def test_sequences_may_differ_in_their_rope(runtime: str) -> None:
    target = Target(build("phi3-longrope"), runtime)
    parts = [Part(ROPE_SWITCH + 5, 3), Part(20, 3), Part(ROPE_SWITCH + 20, 1), Part.tree(30, 6)]
    assert [prefilled(target, part).long_rope for part in parts] == [True, False, True, False]
    assert_close(target, parts)


@torch.inference_mode()
def twice(target: Target, joined: bool) -> list[torch.Tensor]:
    """A verification of a sequence, and branches at its last tokens, in one forward or in two."""
    length, count, rows, back = 30, 2, 3, 5
    state = prefilled(target, Part(length, 20))
    verification = target.lay_out(state, 4)
    visible = torch.nn.functional.pad(branches(count, rows), (back + 4, 0))
    selection = target.lay_out(
        state,
        count * rows,
        start=length + 4,
        prefix=length - back,
        depths=[*range(rows)] * count,
        visible=visible,
    )
    states = target.embed(torch.tensor(prompt(4 + count * rows, seed=9)))
    if joined:
        ran = target.run(states, range(SUBLAYERS), Forward.join([verification, selection])).hidden_states
    else:
        parts = (states[:4], verification), (states[4:], selection)
        ran = torch.cat([target.run(part, range(SUBLAYERS), each).hidden_states for part, each in parts])
    return [ran, *(tensor[:, :, : length + 10] for tensor in (*state.cache.keys, *state.cache.values))]


@pytest.mark.parametrize("runtime", ["eager", "fused", "compiled"])
@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_one_sequence_may_have_several_parts(name: str, runtime: str) -> None:
    """They do not see each other's rows."""
    target = Target(build(name), runtime)
    for ours, wanted in zip(twice(target, joined=True), twice(target, joined=False), strict=True):
        torch.testing.assert_close(ours, wanted, **CLOSE)


_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": SUBLAYERS // 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0 + 0.05 * index for index in range(16)],
    "long_factor": [2.0 + 0.5 * index for index in range(16)],
    "original_max_position_embeddings": ROPE_SWITCH,
}
KERNEL_CONFIGS = {
    "llama": functools.partial(LlamaConfig, **_SIZES),
    "window": functools.partial(MistralConfig, **_SIZES, sliding_window=WINDOW),
    "two windows": functools.partial(
        Qwen2Config,
        **_SIZES,
        layer_types=["sliding_attention", "full_attention"] * (SUBLAYERS // 4),
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "multipliers": functools.partial(GraniteConfig, **_SIZES, residual_multiplier=0.7, attention_multiplier=0.2),
    "gemma2": functools.partial(Gemma2Config, **_SIZES, sliding_window=8, attn_logit_softcapping=5.0),
    "gemma3": functools.partial(Gemma3TextConfig, **_SIZES, sliding_window=8),
    "longrope": functools.partial(
        Phi3Config, **_SIZES, original_max_position_embeddings=ROPE_SWITCH, rope_parameters=_LONGROPE
    ),
}
"""Models whose every sublayer runs in kernels, unlike those of ``helpers.models``, whose heads are too small."""


@functools.cache
def kernel_model(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(KERNEL_CONFIGS[name](), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "embed" in parameter_name:
                parameter.mul_(20)
    return model


def exact() -> bool:
    try:
        return verifies_exactly(torch.bfloat16)
    except KernelBuildError:
        return False


needs_exact_kernels = pytest.mark.skipif(not exact(), reason="on this processor kernels do not run every verification")


@needs_exact_kernels
@pytest.mark.parametrize("name", KERNEL_CONFIGS)
@pytest.mark.parametrize("mix", MIXES)
def test_in_kernels_it_is_the_same_bit_for_bit(name: str, mix: str) -> None:
    assert_equal(Target(kernel_model(name), "compiled"), MIXES[mix])


@needs_exact_kernels
@pytest.mark.parametrize("name", KERNEL_CONFIGS)
def test_in_kernels_one_sequence_may_have_several_parts(name: str) -> None:
    target = Target(kernel_model(name), "compiled")
    for ours, wanted in zip(twice(target, joined=True), twice(target, joined=False), strict=True):
        assert torch.equal(ours, wanted)


@needs_exact_kernels
@pytest.mark.parametrize("name", ["llama", "two windows"])
@pytest.mark.parametrize("sublayers", [range(SUBLAYERS), [0, 3, 4, 8]])
def test_a_part_too_large_for_the_kernels_runs_as_it_does_alone(name: str, sublayers: Sequence[int]) -> None:
    """A prompt among sequences that decode."""
    parts = [Part(9, 1), Part(0, 200), Part(30, 4), Part(50, 150), Part.tree(40, 7)]
    assert_equal(Target(kernel_model(name), "compiled"), parts, sublayers)


@pytest.mark.parametrize("runtime", ["fused", "compiled"])
@pytest.mark.parametrize("count", [1, 3, 30, 300])
def test_last_rows_are_those_of_all_parts(count: int, runtime: str) -> None:
    """Where the parts run together, and where large ones run by themselves."""
    target = Target(kernel_model("llama"), runtime)
    parts = [Part(9, 1), Part(0, 200), Part(30, 4), Part(50, 150), Part(3, 2)]
    states = [prefilled(target, part) for part in parts]
    forward = Forward.join([target.lay_out(state, part.rows) for state, part in zip(states, parts, strict=True)])
    with torch.inference_mode():
        hidden_states = target.embed(torch.tensor(prompt(forward.rows)))
        captured = target.run(hidden_states, range(SUBLAYERS), forward, EVERY_STATE).captured
        copies = {index: torch.zeros(count, target.hidden_size, dtype=target.dtype) for index in EVERY_STATE}
        target.run(hidden_states, range(SUBLAYERS), forward, last_rows=copies)
    for index in EVERY_STATE:
        assert torch.equal(copies[index], captured[index][-count:])


@st.composite
def parts_of_a_forward(draw: st.DrawFn) -> list[Part]:
    """One to six sequences of any length and layout."""
    kinds = {
        "chain": st.builds(Part, st.integers(0, 60), st.integers(1, 9)),
        "tree": st.builds(Part.tree, st.integers(0, 60), st.integers(1, 12)),
        "branches": st.builds(Part.branches, st.integers(1, 60), st.integers(1, 3), st.integers(1, 4)),
        "gap": st.builds(Part.after_gap, st.integers(6, 60), st.integers(1, 5), st.integers(0, 3), st.integers(0, 5)),
    }
    return draw(st.lists(st.one_of(*kinds.values()), min_size=1, max_size=6))


@settings(max_examples=25)
@given(parts_of_a_forward(), st.sampled_from(["llama", "gemma2", "qwen2-window"]), st.sampled_from(["eager", "fused"]))
def test_any_sequences_together(parts: list[Part], name: str, runtime: str) -> None:
    assert_close(_target(name, runtime), parts)


@needs_exact_kernels
@settings(max_examples=25)
@given(parts_of_a_forward(), st.sampled_from([*KERNEL_CONFIGS]))
def test_any_sequences_together_in_kernels(parts: list[Part], name: str) -> None:
    assert_equal(_kernel_target(name), parts)


@functools.cache
def _target(name: str, runtime: str) -> Target:
    return Target(build(name), runtime)


@functools.cache
def _kernel_target(name: str) -> Target:
    return Target(kernel_model(name), "compiled")


@needs_exact_kernels
def test_logits_of_single_rows_are_those_of_each_alone_however_many() -> None:
    """The head's kernel decides by the rows of one sequence."""
    target = Target(kernel_model("llama"), "compiled")
    rows = torch.randn(300, target.hidden_size, generator=torch.Generator().manual_seed(1)).to(target.dtype)
    with torch.inference_mode():
        alone = torch.cat([target.logits(row[None]) for row in rows])
        assert torch.equal(target.logits(rows, widest=1), alone)
