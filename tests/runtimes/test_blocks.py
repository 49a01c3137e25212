"""The fused blocks against transformers' own modules, and the model that lends them its weights."""

import copy
import io
import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from helpers.kernels import needs_kernels
from helpers.models import FAMILY_NAMES, RELATIVES, SUBLAYERS, VARIANTS, build, prompt
from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError, NonFiniteLogitsError, UnsupportedModelError
from selfspec.model.forward import Forward, SequenceState, branches
from selfspec.runtimes.branches import describe_weights
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.kernels import row_limit
from selfspec.runtimes.products import CompiledProduct, DenseProduct
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree

CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}
FUSED_MLPS = {
    **{"mixtral": 0, "mixtral-window": 0, "qwen3-moe": 1, "qwen3-moe-window": 0},
    **{"qwen2-moe": 0, "olmoe": 0, "granite-moe": 0, "glm4-moe": 1, "gpt-oss": 0},
}
"""Fused MLPs of the mixtures of experts, of which one layer of two models is none. Every other model fuses all."""

FUSED_ATTENTIONS = {"stablelm-head-norms": 0}
"""Fused attentions where each head has a layer norm of its own. Every other model fuses all."""

LAYOUTS: list[dict[str, Any]] = [
    {"rows": 1},
    {"rows": 5},
    {"rows": 40},  # more than are packed
    {"rows": 3, "start": 53, "prefix": 30},
    {"rows": 40, "start": 53, "prefix": 1},
    {"rows": 6, "depths": [0, 1, 2] * 2, "visible": branches(2, 3)},
]


def random_tree(size: int, seed: int) -> TokenTree:
    draw = random.Random(seed)
    return TokenTree(tuple(draw.randint(max(-1, node - 4), node - 1) for node in range(size)))


def layouts() -> list[dict[str, Any]]:
    trees = [random_tree(12, 1), random_tree(36, 2)]
    return LAYOUTS + [
        {"rows": len(tree) + 1, "depths": list(tree.depths), "visible": tree.visibility()} for tree in trees
    ]


@torch.inference_mode()
def run(target: Target, state: SequenceState, token_ids: list[int], **layout: Any) -> torch.Tensor:
    """Logits of all rows, ``[rows, vocab]``."""
    step = target.lay_out(state, len(token_ids), **layout)
    hidden_states = target.run(target.embed(torch.tensor(token_ids)), range(target.sublayer_count), step).hidden_states
    return target.logits(hidden_states)


def outputs(target: Target, prefix: int) -> list[torch.Tensor]:
    """Logits after a prefix for every layout, with those of the prefix itself before them."""
    state = target.new_sequence(prefix, capacity=prefix + 60, last_length=prefix + 1)
    found = [run(target, state, prompt(prefix))]
    state.cache.commit(range(prefix))
    for layout in layouts():
        options = {key: value for key, value in layout.items() if key != "rows"}
        if "start" in options:
            options["start"] += prefix - 50
        found.append(run(target, state, prompt(layout["rows"], seed=3), **options))
    return found


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("runtime", ["fused", "compiled"])
@pytest.mark.parametrize("name", VARIANTS)
def test_fused_blocks_compute_what_the_modules_do(name: str, runtime: str) -> None:
    """Long and short prompts in one forward, single rows, chains, trees, branches, gaps."""
    fused, generic = Target(build(name), runtime), Target(build(name), "eager")
    assert generic.fused_count == 0
    for prefix in (50, 90):
        for index, (ours, wanted) in enumerate(zip(outputs(fused, prefix), outputs(generic, prefix), strict=True)):
            torch.testing.assert_close(
                ours, wanted, **CLOSE, msg=lambda text, i=index, n=prefix: f"layout {i} after {n}: {text}"
            )


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_takes_the_fused_path(name: str) -> None:
    target = Target(build(name), "fused")
    attentions = sum(isinstance(sublayer, FusedAttention) for sublayer in target.sublayers[::2])
    assert attentions == FUSED_ATTENTIONS.get(name, SUBLAYERS // 2)
    mlps = sum(isinstance(sublayer, FusedMLP) for sublayer in target.sublayers[1::2])
    assert mlps == FUSED_MLPS.get(name, SUBLAYERS // 2)
    assert target.fused_count == attentions + mlps


@needs_kernels
@pytest.mark.parametrize("name", [*VARIANTS, *RELATIVES])
def test_mlps_and_mixtures_run_in_kernels(name: str) -> None:
    assert all(native(sublayer) for sublayer in Target(build(name)).sublayers[1::2])


@needs_kernels
@pytest.mark.parametrize(("head_dim", "known"), [(64, True), (96, True), (24, False), (608, False)])
def test_attention_runs_in_kernels_where_its_heads_fit_them(head_dim: int, known: bool) -> None:
    assert native(Target(fresh(head_dim=head_dim)).sublayers[0]) == known


def native(sublayer: Any) -> bool:
    """Whether a sublayer can be part of a native forward."""
    return describe_weights(sublayer) is not None


ROW_COUNTS = (*range(1, 18), 40, 64, 96, 97, 200)
"""Numbers of rows that fill tiles of the kernels and that do not, in one pass over the weights and in several."""


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs_count"), [(64, 48), (37, 21), (200, 5), (8, 1), (1024, 50), (2100, 50)])
def test_a_compiled_product_is_torchs(dtype: torch.dtype, inputs: int, outputs_count: int) -> None:
    """Sizes that fill no vector or strip too; and a row's result does not depend on how many others there are."""
    torch.manual_seed(3)
    linear = nn.Linear(inputs, outputs_count, dtype=dtype)
    product = CompiledProduct(DenseProduct(linear.weight.data, linear.bias.data))
    rows = torch.randn(max(ROW_COUNTS), inputs, dtype=dtype)
    with torch.inference_mode():
        exact = linear.double()(rows.double())
        alone = torch.cat([product(row[None]) for row in rows])
        for count in ROW_COUNTS:
            ours = product(rows[:count])
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), exact[:count], rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
            if count <= row_limit(dtype):
                assert torch.equal(ours, alone[:count])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_compiled_mlp_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    target = Target(copy.deepcopy(build("llama")).to(dtype), "compiled")
    rows = torch.randn(100, target.hidden_size, generator=torch.Generator().manual_seed(6)).to(dtype)
    state = target.new_sequence(100, capacity=100, last_length=100)

    def mlp(rows: torch.Tensor, forward: Forward) -> torch.Tensor:
        return target.run(rows, (1,), forward).hidden_states

    with torch.inference_mode():
        alone = torch.cat([mlp(row[None], target.lay_out(state, 1)) for row in rows])
        for count in (2, 7, 16, 90, 100):
            if count <= row_limit(dtype):
                assert torch.equal(mlp(rows[:count], target.lay_out(state, count)), alone[:count])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "key_heads", "head_dim"), [(4, 2, 64), (4, 1, 128), (2, 2, 192)])
def test_compiled_attention_is_torchs(dtype: torch.dtype, heads: int, key_heads: int, head_dim: int) -> None:
    """For queries that fill tiles and that do not, after a prefix and as a tree; and rows do not depend on others."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head_dim}
    model = fresh(**shape).to(dtype)
    target = Target(model, "compiled")
    fused = Target(model, "fused").sublayers[0]

    def compiled(rows: torch.Tensor, forward: Forward) -> torch.Tensor:
        return target.run(rows, (0,), forward).hidden_states

    close: dict[str, Any] = CLOSE if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    draw = torch.Generator().manual_seed(8)
    state = target.new_sequence(70, capacity=70, last_length=70)
    with torch.inference_mode():
        state.cache.keys[0].normal_(generator=draw)
        state.cache.values[0].normal_(generator=draw)
        rows = torch.randn(12, target.hidden_size, generator=draw).to(dtype)
        for start in (0, 1, 41):
            state.cache.length = start
            steps = [target.lay_out(state, 1, start=start + row) for row in range(12)]
            alone = torch.cat([compiled(row[None], step) for row, step in zip(rows, steps, strict=True)])
            for count in (1, 2, 3, 5, 12):
                forward = target.lay_out(state, count)
                ours = compiled(rows[:count], forward)
                torch.testing.assert_close(ours, fused(rows[:count], forward), **close)
                if count <= row_limit(dtype, attends=True):
                    assert torch.equal(ours, alone[:count])
        tree = random_tree(9, 5)
        forward = target.lay_out(state, 10, depths=list(tree.depths), visible=tree.visibility())
        torch.testing.assert_close(compiled(rows[:10], forward), fused(rows[:10], forward), **close)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_verified_row_is_a_single_step_bit_for_bit(dtype: torch.dtype) -> None:
    """Of a chain and of a path in a tree, whose rows stand among those of its siblings."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    target = Target(fresh(**sizes).to(dtype), "compiled")
    draw = random.Random(5)
    prompt_ids = [draw.randrange(32) for _ in range(21)]
    trees = [TokenTree.chain(12), random_tree(12, 1), random_tree(36, 2), random_tree(60, 3)]
    for tree in (tree for tree in trees if len(tree) < row_limit(dtype)):
        token_ids = [draw.randrange(32) for _ in range(len(tree) + 1)]
        state = target.new_sequence(100, capacity=100, last_length=100)
        run(target, state, prompt_ids)
        state.cache.commit(range(len(prompt_ids)))
        verified = run(target, state, token_ids, depths=list(tree.depths), visible=tree.visibility())
        for row in (0, len(tree) // 2, len(tree)):
            state.cache.length = len(prompt_ids)
            for place in tree.path(row):
                alone = run(target, state, [token_ids[place]])
                state.cache.commit(range(1))
            assert torch.equal(verified[row], alone[0]), f"row {row} of {len(tree)}"


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_product(dtype: torch.dtype) -> None:
    """A weight large enough to be shared out, with a last panel that is not full, and rows in several groups."""
    torch.manual_seed(4)
    linear, rows = nn.Linear(1024, 1030, dtype=dtype), torch.randn(16, 1024, dtype=dtype)
    product = CompiledProduct(DenseProduct(linear.weight.data, linear.bias.data))
    alone = product(rows)
    torch.set_num_threads(3)
    try:
        shared = product(rows)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(shared, alone)
    torch.testing.assert_close(alone, linear(rows), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_not_a_number_stays_one() -> None:
    """What a kernel computes from broken weights has to be seen as broken."""
    for dtype in (torch.float32, torch.bfloat16):
        model = fresh().to(dtype)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
        with pytest.raises(NonFiniteLogitsError):
            Engine(model, method="autoregressive").generate(prompt_ids(), max_new_tokens=4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-window"])
def test_fused_blocks_call_no_module_of_theirs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    target = Target(model)
    state = target.new_sequence(4, capacity=8, last_length=8)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a module was called")

    for kind in (type(model.model.layers[0].self_attn), type(model.model.layers[0].mlp)):
        monkeypatch.setattr(kind, "forward", refuse)
    run(target, state, prompt(4))
    with pytest.raises(AssertionError, match="a module was called"):
        run(Target(model, "eager"), state, prompt(4))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("runtime", ["fused", "compiled"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_in_bfloat16_they_differ_by_rounding_only(name: str, runtime: str) -> None:
    """Neither is further from the float32 model than rounding takes the other."""
    exact = torch.cat(outputs(Target(build(name), "eager"), 50))
    half = copy.deepcopy(build(name)).to(torch.bfloat16)
    generic = torch.cat(outputs(Target(half, "eager"), 50)).float()
    fused = torch.cat(outputs(Target(half, runtime), 50)).float()
    assert fused.dtype == torch.float32
    generic_error, fused_error = ((logits - exact).square().mean().sqrt() for logits in (generic, fused))
    assert 0 < fused_error < 1.1 * generic_error


def fresh(**options: Any) -> PreTrainedModel:
    """A model of our own, that may be changed."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=2, eos_token_id=None, **{**sizes, **heads, **options})
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.inference_mode()
def own_logits(model: PreTrainedModel, rows: int = 9) -> torch.Tensor:
    return model(torch.arange(rows)[None], use_cache=False).logits[0]


def storages(model: PreTrainedModel) -> dict[int, int]:
    """Bytes of every piece of memory that the model's weights lie in, by its address."""
    found = [parameter.untyped_storage() for parameter in model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["plain", "biases"])
def test_weights_are_shared_and_the_model_computes_what_it_did(options: dict[str, Any]) -> None:
    model = fresh(**options)
    parameters, wanted = dict(model.named_parameters()), [own_logits(model, rows) for rows in (1, 9)]
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    bytes_before = sum(storages(model).values())
    targets = [Target(model)]
    joined = storages(model)
    targets.append(Target(model))
    assert storages(model) == joined, "the second engine joined them once more"
    assert sum(joined.values()) == bytes_before
    for sublayer in targets[0].sublayers:
        assert isinstance(sublayer, (FusedAttention, FusedMLP))
        for product in sublayer.products:
            assert product.values().untyped_storage().data_ptr() in storages(model)
    assert [target.fused_count for target in targets] == [4, 4]
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert all(torch.equal(parameters[name], value) for name, value in values.items())
    assert all(torch.equal(own_logits(model, rows), logits) for rows, logits in zip((1, 9), wanted, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_models_own_logits_stay_bit_for_bit(name: str) -> None:
    model = copy.deepcopy(build(name))
    with torch.no_grad():  # a copy of a fused model has weights of its own
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    untouched = own_logits(model, 40)
    Target(model)
    assert torch.equal(own_logits(model, 40), untouched)


def test_a_change_of_a_weight_is_seen_on_both_sides() -> None:
    model = fresh()
    engine = Engine(model, method="autoregressive")
    before = engine.generate(prompt_ids(), max_new_tokens=8).token_ids
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-3)
        model.model.layers[1].mlp.up_proj.weight.mul_(-3)
    after = engine.generate(prompt_ids(), max_new_tokens=8).token_ids
    assert engine.target.fused_count == 4
    assert after == Engine(model, method="autoregressive").generate(prompt_ids(), max_new_tokens=8).token_ids
    assert before != after


def prompt_ids() -> list[int]:
    return [token % 32 for token in prompt(12)]


def test_a_fused_model_can_be_saved_and_trained() -> None:
    model = fresh()
    Target(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    restored = fresh()
    restored.load_state_dict({name: torch.zeros_like(weight) for name, weight in restored.state_dict().items()})
    restored.load_state_dict(torch.load(file))
    assert torch.equal(own_logits(restored), own_logits(model))
    model(torch.arange(5)[None], labels=torch.arange(5)[None]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Adapted(nn.Module):
    """A linear layer with something added, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.added = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(hidden_states) + self.added(hidden_states)
        return output


class Quantised(nn.Linear):
    """A linear layer that is no longer an ordinary one."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).mul(2).round().div(2)


def add_adapter(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)


def add_quantised(model: Any) -> None:
    old = model.model.layers[0].self_attn.o_proj
    model.model.layers[0].self_attn.o_proj = Quantised(old.in_features, old.out_features, bias=False)


def add_hook(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, inputs, output: -2 * output)


def add_pre_hook(model: Any) -> None:
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, inputs, named: (inputs, {**named, "hidden_states": -2 * named["hidden_states"]}),
        with_kwargs=True,
    )


def replace_forward(model: Any) -> None:
    module = model.model.layers[0].self_attn.v_proj
    forward = type(module).forward
    module.forward = lambda hidden_states: -2 * forward(module, hidden_states)


def parametrize(model: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return -2 * weight

    nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn.v_proj, "weight", Doubled())


CHANGES = [add_adapter, add_quantised, add_hook, add_pre_hook, replace_forward, parametrize]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_sublayer_that_is_not_ordinary_stays_with_its_module(change: Any, late: bool) -> None:
    """Changed before the engine is made, or after it has generated."""
    torch.manual_seed(2)
    model = fresh()
    plain = own_logits(model)
    engine = Engine(model, method="autoregressive") if late else None
    if engine is not None:
        engine.generate(prompt_ids(), max_new_tokens=2)
        assert engine.target.fused_count == 4
    change(model.eval())
    engine = engine or Engine(model, method="autoregressive")
    wanted = own_logits(model)
    assert not torch.allclose(wanted, plain, atol=1e-3), "the change changed nothing"
    state = engine.target.new_sequence(9, capacity=9, last_length=9)
    torch.testing.assert_close(run(engine.target, state, list(range(9))), wanted, rtol=1e-4, atol=1e-4)
    kinds = [isinstance(sublayer, (FusedAttention, FusedMLP)) for sublayer in engine.target.sublayers]
    assert kinds == [False, True, True, True]


def test_a_model_whose_states_were_asked_for_is_fused_as_before() -> None:
    """transformers leaves its hooks in the model."""
    model = fresh()
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())
    engine = Engine(model, method="autoregressive")
    wanted = own_logits(model)
    state = engine.target.new_sequence(9, capacity=9, last_length=9)
    torch.testing.assert_close(run(engine.target, state, list(range(9))), wanted, rtol=1e-4, atol=1e-4)
    assert engine.target.fused_count == 4


def test_a_model_that_moves_to_another_dtype_is_fused_anew() -> None:
    model = fresh()
    engine = Engine(model, method="autoregressive")
    engine.generate(prompt_ids(), max_new_tokens=2)
    model.to(torch.float64)
    state = engine.target.new_sequence(9, capacity=9, last_length=9)
    ours = run(engine.target, state, list(range(9)))
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, own_logits(model), rtol=1e-6, atol=1e-6)
    assert engine.target.fused_count == 4
    assert sum(storages(model).values()) == sum(parameter.nbytes for parameter in model.parameters())


def test_unknown_runtimes_are_refused_by_name() -> None:
    with pytest.raises(InvalidParameterError, match=r"no runtime 'warp'; choose one of auto, eager, fused, compiled"):
        Engine(build("llama"), runtime="warp", method="autoregressive")


def test_fused_is_refused_where_nothing_can_be() -> None:
    model = fresh()
    for layer in model.model.layers:
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    assert Target(model.eval()).fused_count == 0
    with pytest.raises(UnsupportedModelError, match="runtime 'auto' or 'eager'"):
        Target(model, "fused")
