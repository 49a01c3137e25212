"""Models without a row: split by looking, proven, or refused. All families: ``lab/tests/test_families.py``."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma4TextConfig, GPT2Config, GPTNeoXConfig, Qwen3NextConfig

from selfspec.engine import Engine
from selfspec.errors import UnsupportedModelError
from selfspec.model.splitting import LayerPart, Nothing, RowsPart
from selfspec.runtimes.costs.parts import measure_latencies
from selfspec.runtimes.target import Target

LAYERS = 3
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
PROMPT = [5, 9, 40, 3, 22, 9, 40, 7]


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=LAYERS, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    return AutoModelForCausalLM.from_config(config).eval()


def recurrent() -> Any:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **SIZES,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def kinds(model: Any) -> list[type]:
    return [type(sublayer) for sublayer in Target(model).sublayers]


def test_attention_and_mlp_are_found() -> None:
    target = Target(gpt2())
    assert [type(sublayer) for sublayer in target.sublayers] == [LayerPart, RowsPart] * LAYERS
    attention, mlp = ({id(weight) for weight in each.parameters()} for each in target.sublayers[:2])
    layer: Any = target.model.transformer.h[0]
    assert attention == {id(weight) for part in (layer.ln_1, layer.attn) for weight in part.parameters()}
    assert mlp == {id(weight) for part in (layer.ln_2, layer.mlp) for weight in part.parameters()}


def test_parallel_branches_are_one_part() -> None:
    config = GPTNeoXConfig(**SIZES, intermediate_size=32)
    assert kinds(AutoModelForCausalLM.from_config(config).eval()) == [LayerPart, Nothing] * LAYERS


def test_the_model_is_not_touched() -> None:
    model = gpt2()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    weights = copy.deepcopy(model.state_dict())
    Engine(model, method="uniform").generate(PROMPT, max_new_tokens=8)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


class Centred(nn.Module):
    """Subtracts the mean of the rows: each depends on all."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states - hidden_states.mean(1, keepdim=True)


class Counting(nn.Module):
    """Gives another result each time."""

    count = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return hidden_states * self.count


def test_rows_that_depend_on_others_are_refused() -> None:
    model = gpt2()
    model.transformer.h[1].mlp = Centred()
    with pytest.raises(UnsupportedModelError, match="depend on the tokens that are read with it"):
        Target(model)


def test_other_numbers_are_refused_with_layer_and_difference() -> None:
    model = gpt2()
    model.transformer.h[1].mlp = Counting()
    with pytest.raises(UnsupportedModelError, match=r"'gpt2' model .* layer 1 give other numbers .*\(difference \d"):
        Target(model)


GEMMA4: dict[str, dict[str, Any]] = {
    "per-layer embeddings": {"hidden_size_per_layer_input": 8},
    "shared keys": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}


def gemma4(case: str) -> Any:
    """Random, with layers that change what comes out little, so that drafts without some of them are often right."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "hidden_size_per_layer_input": 0, **GEMMA4[case]}
    config = Gemma4TextConfig(
        **sizes,
        intermediate_size=32,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        vocab_size_per_layer_input=64,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if "layers" in name else 1))
        if case == "shared keys":
            for layer in model.model.layers:
                layer.layer_scalar.fill_(1.1)
    return model


@pytest.mark.parametrize("case", GEMMA4)
@pytest.mark.parametrize("method", ["uniform", "layerskip", "clasp", "swift", "token-recycling"])
def test_layers_read_tokens_and_the_keys_of_others(case: str, method: str) -> None:
    """Alone and in a batch; with drafts that skip the layers whose keys others read."""
    model = gemma4(case)
    own = model.generate(torch.tensor([PROMPT]), max_new_tokens=32, do_sample=False)[0, len(PROMPT) :].tolist()
    engine = Engine(model, method=method)
    result = engine.generate(PROMPT, max_new_tokens=32)
    assert list(result.token_ids) == own
    assert 0 < result.accepted <= result.drafted
    together = engine.generate([PROMPT[:5], PROMPT], max_new_tokens=32)
    assert list(together[1].token_ids) == own


def test_costs_are_measured_with_many_layers() -> None:
    """Scratch caches have fewer buffers than layers."""
    target = Target(gemma4("shared keys"))
    profile = measure_latencies(target, repeats=1)
    assert profile.fits(target)
    assert profile.layers == 4
    assert profile.attention(1) > 0


def test_a_router_runs_with_what_it_routes() -> None:
    """Several tensors come of it, of which the layer reads the second, too: it cannot be left out alone."""
    sublayers: Any = Target(gemma4("experts")).sublayers
    assert [type(each) for each in sublayers] == [LayerPart, RowsPart] * 4
    run = [{name for name, child in each.module.named_children() if child in each.modules} for each in sublayers]
    assert all({"router", "experts"} <= names for names in run[1::2])
    assert all(("router" in names) == ("experts" in names) for names in run)


@pytest.mark.parametrize("runtime", ["fused", "compiled", "graphs"])
def test_other_runtimes_are_refused(runtime: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"which runtime '{runtime}' does not use; use runtime 'auto'"):
        Target(gpt2(), runtime)


def test_low_bit_drafts_and_weights_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use 16 bits"):
        Engine(gpt2(), method="low-bit")
    with pytest.raises(UnsupportedModelError, match="a 'gpt2' model runs by transformers' own modules only"):
        Engine(gpt2(), weights="int8")


def test_a_replaced_module_is_noticed_at_the_next_request() -> None:
    model = gpt2()
    engine = Engine(model, method="autoregressive")
    before = engine.generate(PROMPT, max_new_tokens=4).token_ids
    model.transformer.h[0].mlp = copy.deepcopy(gpt2().transformer.h[2].attn.c_proj)
    after = engine.generate(PROMPT, max_new_tokens=4).token_ids
    assert after == Engine(model, method="autoregressive").generate(PROMPT, max_new_tokens=4).token_ids != before


@pytest.mark.parametrize("make", [gpt2, recurrent])
def test_auto_runs(make: Callable[[], Any]) -> None:
    model = make()
    own = Engine(model, method="autoregressive").generate(PROMPT, max_new_tokens=24).token_ids
    assert (
        Engine(model, method="auto", settings={"trial_seconds": 0.2}).generate(PROMPT, max_new_tokens=24).token_ids
        == own
    )


def test_states_are_few_and_trees_become_chains() -> None:
    engine = Engine(recurrent(), method="token-recycling")
    kept: list[int] = []
    own = engine.target.new_sequence

    def watched(*args: Any, **kwargs: Any) -> Any:
        sequence = own(*args, **kwargs)
        put = sequence.cache.states.put

        def note(layer: int, slot: int, state: Any) -> None:
            put(layer, slot, state)
            kept.append(len(sequence.cache.states._layers[layer]))

        sequence.cache.states.put = note
        return sequence

    engine.target.new_sequence = watched  # type: ignore[method-assign]
    result = engine.generate(PROMPT, max_new_tokens=40)
    assert result.drafted > 0
    assert all(round_.candidates == round_.drafted for round_ in result.rounds)
    assert max(kept) <= 2 + max(round_.candidates for round_ in result.rounds)


def test_methods_that_need_other_rows_are_refused_for_states() -> None:
    with pytest.raises(UnsupportedModelError, match=r"swift tries layers on rows .* read tokens one after the other"):
        Engine(recurrent(), method="swift")
