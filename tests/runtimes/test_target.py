"""Any kept set over any rows against transformers with the other branches silenced; the model stays untouched."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.models import FAMILY_NAMES, LAYERS, SUBLAYERS, VARIANTS, build, plain_text, prompt
from selfspec.engine import Engine
from selfspec.model.forward import SequenceState, branches
from selfspec.runtimes.target import StackOutput, Target
from selfspec.sampling.acceptance import TokenTree

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
EVERY_BOUNDARY = range(SUBLAYERS + 1)

_MIDDLES = {
    "olmo2": "mlp",
    "exaone4": "mlp",
    "gemma2": "pre_feedforward_layernorm",
    "gemma3_text": "pre_feedforward_layernorm",
}
"""The module of a layer that takes the residual stream between attention and MLP, where it is not the usual one."""


class Oracle:
    """transformers' own forward, with branches silenced, and the residual stream it had before every sublayer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def __call__(self, token_ids: list[int], kept: tuple[int, ...]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits ``[rows, vocab]`` and by sublayer ``h[i]``, ``[rows, hidden]``."""
        streams: dict[int, torch.Tensor] = {}
        with contextlib.ExitStack() as hooks:
            for index in set(range(SUBLAYERS)) - set(kept):
                hooks.enter_context(self._silenced(index))
            for index in EVERY_BOUNDARY:
                hooks.enter_context(self._recorded(index, streams))
            logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits, streams

    @contextlib.contextmanager
    def _silenced(self, index: int) -> Iterator[None]:
        layer = self._model.model.layers[index // 2]

        def zero(module: Any, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (torch.zeros_like(output[0]), *output[1:])
            return torch.zeros_like(output)

        mlp = getattr(layer, "block_sparse_moe", None) or layer.mlp
        handle = (mlp if index % 2 else layer.self_attn).register_forward_hook(zero)
        yield
        handle.remove()

    @contextlib.contextmanager
    def _recorded(self, index: int, streams: dict[int, torch.Tensor]) -> Iterator[None]:
        def record(module: Any, arguments: Any, keywords: Any) -> None:
            streams[index] = (arguments[0] if arguments else keywords["hidden_states"])[0]

        handle = self._boundary(index).register_forward_pre_hook(record, with_kwargs=True)
        yield
        handle.remove()

    def _boundary(self, index: int) -> torch.nn.Module:
        if index == SUBLAYERS:
            return self._model.model.norm
        layer = self._model.model.layers[index // 2]
        middle = _MIDDLES.get(self._model.config.model_type, "post_attention_layernorm")
        return getattr(layer, middle) if index % 2 else layer


@torch.inference_mode()
def run_rows(
    target: Target, state: SequenceState, token_ids: list[int], kept: tuple[int, ...] | None = None, **layout: Any
) -> StackOutput:
    """One forward, capturing everything."""
    step = target.lay_out(state, len(token_ids), **layout)
    sublayers = range(SUBLAYERS) if kept is None else kept
    return target.run(target.embed(torch.tensor(token_ids)), sublayers, step, EVERY_BOUNDARY)


def in_chunks(
    target: Target, token_ids: list[int], lengths: list[int], kept: tuple[int, ...]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """A sequence run in several forwards: logits and streams of all its rows."""
    assert sum(lengths) == len(token_ids)
    state = target.new_sequence(len(token_ids), capacity=len(token_ids), last_length=len(token_ids))
    outputs = []
    for length in lengths:
        start = state.cache.length
        outputs.append(run_rows(target, state, token_ids[start : start + length], kept))
        state.cache.commit(range(length))
    streams = {index: torch.cat([output.captured[index] for output in outputs]) for index in EVERY_BOUNDARY}
    return target.logits(torch.cat([output.hidden_states for output in outputs])), streams


def kept_sets(seed: str) -> list[tuple[int, ...]]:
    """Random ones beside the extremes."""
    draw = random.Random(seed)
    some = [tuple(sorted(draw.sample(range(SUBLAYERS), count))) for count in (3, 6, 9)]
    return [(), tuple(range(SUBLAYERS)), tuple(range(0, SUBLAYERS, 2)), tuple(range(1, SUBLAYERS, 2)), *some]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_kept_set_is_the_model_with_the_other_branches_silenced(name: str) -> None:
    target, oracle, token_ids = Target(build(name)), Oracle(build(name)), prompt(45)
    for kept in kept_sets(name):
        wanted_logits, wanted = oracle(token_ids, kept)
        for lengths in ([45], [20, 1, 1, 17, 6]):
            logits, streams = in_chunks(target, token_ids, lengths, kept)
            where = f"kept {kept} in chunks of {lengths}"
            for index in EVERY_BOUNDARY:
                torch.testing.assert_close(
                    streams[index], wanted[index], **CLOSE, msg=lambda text, i=index, w=where: f"h[{i}], {w}: {text}"
                )
            torch.testing.assert_close(logits, wanted_logits, **CLOSE, msg=lambda text, w=where: f"logits, {w}: {text}")


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_layer_boundaries_are_the_hidden_states_of_transformers(name: str) -> None:
    token_ids = prompt(30)
    _, streams = in_chunks(Target(build(name)), token_ids, [30], tuple(range(SUBLAYERS)))
    with torch.inference_mode():
        wanted = build(name)(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    assert len(wanted) == LAYERS + 1
    for layer in range(LAYERS):  # the last one is after the final norm
        torch.testing.assert_close(streams[2 * layer], wanted[layer][0], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_only_what_was_asked_for_is_captured(name: str) -> None:
    target = Target(build(name))
    state = target.new_sequence(3, capacity=3, last_length=3)
    with torch.inference_mode():
        step = target.lay_out(state, 3)
        rows = target.embed(torch.tensor([1, 2, 3]))
        output = target.run(rows, (0, 1, 4), step, {0, 3, 12})
    assert set(output.captured) == {0, 3, 12}
    assert torch.equal(output.captured[0], rows)
    assert torch.equal(output.captured[12], output.hidden_states)


def prefilled(target: Target, prefix_ids: list[int], room: int) -> SequenceState:
    """A request with a committed prefix and room after it."""
    capacity = len(prefix_ids) + room
    state = target.new_sequence(len(prefix_ids), capacity=capacity, last_length=capacity)
    if prefix_ids:
        run_rows(target, state, prefix_ids)
        state.cache.commit(range(len(prefix_ids)))
    return state


def random_tree(size: int, seed: int) -> TokenTree:
    draw = random.Random(seed)
    return TokenTree(tuple(draw.randint(max(-1, node - 4), node - 1) for node in range(size)))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_tree_is_each_of_its_paths_run_alone(name: str) -> None:
    """Prefixes shorter than the window, around it, and longer."""
    target, oracle = Target(build(name)), Oracle(build(name))
    for prefix_length, seed in [(0, 1), (3, 2), (14, 3), (40, 4)]:
        prefix_ids, tree = prompt(prefix_length), random_tree(13, seed)
        token_ids = prompt(len(tree) + 1, seed=seed)
        state = prefilled(target, prefix_ids, room=len(token_ids))
        output = run_rows(target, state, token_ids, depths=tree.depths, visible=tree.visibility())
        leaves = [row for row in range(len(tree) + 1) if not tree.children[row]]
        for leaf in leaves:
            path = tree.path(leaf)
            _, wanted = oracle([*prefix_ids, *(token_ids[row] for row in path)], tuple(range(SUBLAYERS)))
            for index in (2, 7, SUBLAYERS):
                torch.testing.assert_close(
                    output.captured[index][path],
                    wanted[index][prefix_length:],
                    **CLOSE,
                    msg=lambda text, p=path, i=index, n=prefix_length: f"h[{i}] on path {p} behind {n} tokens: {text}",
                )


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_branches_are_independent_continuations(name: str) -> None:
    target, oracle = Target(build(name)), Oracle(build(name))
    count, length = 3, 7
    for prefix_length in (1, 12, 40):
        prefix_ids, token_ids = prompt(prefix_length), prompt(count * length, seed=5)
        state = prefilled(target, prefix_ids, room=len(token_ids))
        depths = [*range(length)] * count
        output = run_rows(target, state, token_ids, depths=depths, visible=branches(count, length))
        for branch in range(count):
            rows = slice(branch * length, (branch + 1) * length)
            _, wanted = oracle([*prefix_ids, *token_ids[rows]], tuple(range(SUBLAYERS)))
            torch.testing.assert_close(output.hidden_states[rows], wanted[SUBLAYERS][prefix_length:], **CLOSE)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_window_can_be_scored_behind_a_gap(name: str) -> None:
    """Rows of an earlier position, in scratch slots, as a method scores a kept set on the last tokens."""
    target, oracle = Target(build(name)), Oracle(build(name))
    kept = (0, 1, 2, 5, 6, 9, 10, 11)
    token_ids, window = prompt(50), prompt(8, seed=6)
    state = prefilled(target, token_ids, room=12)
    committed = [tensor[:, :, :50].clone() for tensor in (*state.cache.keys, *state.cache.values)]
    for prefix in (1, 10, 30, 42):
        fresh = prefilled(target, token_ids[:prefix], room=len(window))
        expected = run_rows(target, fresh, window, kept)
        output = run_rows(target, state, window, kept, start=53, prefix=prefix)
        torch.testing.assert_close(output.hidden_states, expected.hidden_states, **CLOSE)
        _, wanted = oracle([*token_ids[:prefix], *window], tuple(range(SUBLAYERS)))
        full = run_rows(target, state, window, start=53, prefix=prefix)
        torch.testing.assert_close(full.hidden_states, wanted[SUBLAYERS][prefix:], **CLOSE)
    assert state.cache.length == 50
    after = [tensor[:, :, :50] for tensor in (*state.cache.keys, *state.cache.values)]
    assert all(torch.equal(old, new) for old, new in zip(committed, after, strict=True)), "scoring wrote into the text"


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything a forward could leave behind in a model: weights, buffers, config, hooks, attributes."""
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    attributes = {
        (path, key): id(value) if not isinstance(value, (int, float, str, bool, type(None))) else value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
    }
    hooks = {
        (path, key): list(value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key.endswith("_hooks")
    }
    return {
        "tensors": {key: value.clone() for key, value in tensors.items()},
        "attributes": attributes,
        "hooks": hooks,
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "gradients": [parameter.grad is None for parameter in model.parameters()],
    }


def assert_unchanged(model: PreTrainedModel, before: dict[str, Any]) -> None:
    after = snapshot(model)
    tensors = before.pop("tensors")
    assert tensors.keys() == after["tensors"].keys()
    changed = [key for key, value in tensors.items() if not torch.equal(value, after["tensors"][key])]
    assert not changed
    for part, value in before.items():
        assert value == after[part], f"{part} changed"


@pytest.mark.parametrize("name", [*FAMILY_NAMES, "phi3-longrope", "llama-dynamic-rope"])
def test_a_run_leaves_the_model_as_it_was(name: str) -> None:
    model = build(name)
    with torch.inference_mode():
        model(torch.tensor([prompt(200)]), use_cache=False)  # leaves a dynamic rope set to long sequences
    before = snapshot(model)
    for length in (40, 200):
        Engine(model, method="uniform").generate(prompt(length), max_new_tokens=12)
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("calls", [0, 1, 6])
def test_an_exception_in_the_middle_leaves_nothing_behind(
    name: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prefill, in a draft, in a verification."""
    model = build(name)
    engine = Engine(model, method="layerskip", settings={"exit_layer": 4, "draft_length": 3})
    before = snapshot(model)
    module, remaining = model.model.layers[3].mlp, [calls]
    forward = module.forward

    def fail_later(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if not remaining[0]:
            raise ArithmeticError("broken on purpose")
        remaining[0] -= 1
        return forward(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", fail_later)
        with pytest.raises(ArithmeticError, match="broken on purpose"):
            engine.generate(prompt(20), max_new_tokens=30)
    vars(module).pop("forward", None)  # what monkeypatch put back is an attribute of the instance

    assert_unchanged(model, before)
    assert engine.generate(prompt(20), max_new_tokens=12).token_ids == plain_text(name, prompt(20), 12)
