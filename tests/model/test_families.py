"""The table of families: every family gives transformers' own logits, everything else is refused with its reason."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    StableLmConfig,
    T5Config,
)

from helpers.models import RELATIVES, ROPE_SWITCH, VARIANTS, WINDOW, build, plain_text, prompt
from selfspec.engine import Engine
from selfspec.errors import ContextLengthError, UnsupportedModelError
from selfspec.model.families import FAMILIES, find_family, require_row
from selfspec.model.splitting import LayerPart, Nothing
from selfspec.runtimes.target import Target
from selfspec.types import SamplingParams


def all_logits(target: Target, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position, in one forward of all sublayers."""
    state = target.new_sequence(len(token_ids), capacity=len(token_ids), last_length=len(token_ids))
    with torch.inference_mode():
        step = target.lay_out(state, len(token_ids))
        rows = target.embed(torch.tensor(token_ids))
        return target.logits(target.run(rows, range(target.sublayer_count), step).hidden_states)


def transformers_logits(name: str, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return build(name)(torch.tensor([token_ids]), use_cache=False).logits[0]


def test_every_family_is_tested() -> None:
    assert {build(name).config.model_type for name in (*VARIANTS, *RELATIVES)} == set(FAMILIES)
    assert len({family.name for family in FAMILIES.values()}) == len(FAMILIES) >= 40


@pytest.mark.parametrize("name", [*VARIANTS, *RELATIVES])
def test_logits_are_those_of_transformers(name: str) -> None:
    target = Target(build(name))
    for length in (1, 2, WINDOW, WINDOW + 1, 90):
        token_ids = prompt(length)
        torch.testing.assert_close(
            all_logits(target, token_ids), transformers_logits(name, token_ids), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", [None] * 6),
        ("mistral", [None] * 6),
        ("mistral-window", [WINDOW] * 6),
        ("qwen2-window", [WINDOW, None, WINDOW] * 2),
        ("smollm3-window", [None, WINDOW] * 3),
        ("gemma2", [WINDOW, None] * 3),
        ("gemma3", [WINDOW, WINDOW, None] * 2),
        ("qwen3-moe", [None] * 6),
        ("qwen3-moe-window", [WINDOW] * 6),
        ("starcoder2", [None] * 6),
        ("starcoder2-window", [WINDOW] * 6),
    ],
)
def test_windows_of_the_layers(name: str, windows: list[int | None]) -> None:
    assert [sublayer.window for sublayer in Target(build(name)).sublayers[::2]] == windows


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "'t5' is not supported: an encoder-decoder model"),
        (AutoConfig.for_model("clip"), "'clip' is not supported: transformers has no language model of it"),
        (PreTrainedConfig(auto_map={"AutoModelForCausalLM": "own.Model"}), "it needs code of the checkpoint"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_other_families_are_refused_by_name(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        find_family(config)


def test_a_family_without_a_row_has_no_low_bit_weights() -> None:
    with pytest.raises(UnsupportedModelError, match="a 'gpt2' model runs by transformers' own modules only") as refusal:
        require_row(AutoConfig.for_model("gpt2"))
    assert all(family.name in str(refusal.value) for family in FAMILIES.values())


def fresh_llama(**options: object) -> torch.nn.Module:
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    return AutoModelForCausalLM.from_config(config, **options).eval()


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        Target(fresh_llama().train())


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no LM head"):
        Target(fresh_llama().model)


def test_an_attention_without_tree_masks_is_refused() -> None:
    model = fresh_llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
        Target(model)


def test_a_model_without_its_weights_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="without its weights"):
        Target(fresh_llama().to("meta"))


def test_a_model_that_looks_ahead_is_refused() -> None:
    options = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma3TextConfig(
        vocab_size=16, num_hidden_layers=2, head_dim=4, use_bidirectional_attention=True, **options
    )
    with pytest.raises(UnsupportedModelError, match="depend on the tokens that are read with it"):
        Target(AutoModelForCausalLM.from_config(config).eval())


def test_a_model_with_parallel_branches_has_no_row() -> None:
    """Attention and MLP of one layer read the same stream; the same family without that has its row."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = StableLmConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_parallel_residual=True)
    target = Target(AutoModelForCausalLM.from_config(config).eval())
    assert [type(sublayer) for sublayer in target.sublayers] == [LayerPart, Nothing] * 2
    config.use_parallel_residual = False
    assert find_family(config) is FAMILIES["stablelm"]


def without(name: str, path: str) -> Any:
    """A copy of a variant that lacks the module ``path``."""
    model: Any = copy.deepcopy(build(name))
    owner, _, attribute = path.rpartition(".")
    delattr(model.get_submodule(owner), attribute)
    return model


@pytest.mark.parametrize("runtime", ["eager", "auto"])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama", "mlp.gate_proj"),
        ("llama", "self_attn"),
        ("qwen3-window", "self_attn.o_proj"),
        ("phi3", "mlp.gate_up_proj"),
        ("gemma2", "pre_feedforward_layernorm"),
        ("starcoder2", "mlp.c_fc"),
        ("glm4", "post_self_attn_layernorm"),
        ("stablelm", "post_attention_layernorm"),
    ],
)
def test_a_layer_that_lacks_a_module_is_refused_by_its_name(name: str, part: str, runtime: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"layer 3 of this .* model has no module '{part}'"):
        Target(without(name, f"model.layers.3.{part}"), runtime)


@pytest.mark.parametrize("part", ["model.norm", "model.rotary_emb", "model.embed_tokens"])
def test_a_model_that_lacks_a_module_is_refused_by_its_name(part: str) -> None:
    model = without("llama", part)
    if part == "model.embed_tokens":
        model.get_output_embeddings = lambda: model.lm_head
    with pytest.raises(UnsupportedModelError, match=f"this Llama model has no module '{part}'"):
        Target(model)


def test_a_module_that_goes_missing_is_noticed_at_the_next_request() -> None:
    model: Any = copy.deepcopy(build("llama"))
    engine = Engine(model, method="autoregressive")
    engine.generate(prompt(5), max_new_tokens=2)
    del model.model.layers[2].mlp.up_proj
    with pytest.raises(UnsupportedModelError, match=r"layer 2 of this Llama model has no module 'mlp\.up_proj'"):
        engine.generate(prompt(5), max_new_tokens=2)


def test_a_module_of_ones_own_needs_no_parts() -> None:
    """It is called as it is, so that nothing in it has to have a name."""
    model: Any = copy.deepcopy(build("llama"))
    mlp = model.model.layers[2].mlp
    model.model.layers[2].mlp = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).eval()
    ours, token_ids = all_logits(Target(model), prompt(9)), torch.tensor([prompt(9)])
    with torch.inference_mode():
        torch.testing.assert_close(ours, model(token_ids, use_cache=False).logits[0], rtol=1e-4, atol=1e-4)
        model.model.layers[2].mlp = mlp
        assert not torch.allclose(ours, model(token_ids, use_cache=False).logits[0], atol=1e-2)


EARLY_EXIT = {"method": "layerskip", "settings": {"exit_layer": 2, "draft_length": 4}}


@pytest.mark.parametrize(
    ("length", "new_tokens"),
    [(1, 40), (30, ROPE_SWITCH - 30 + 1), (ROPE_SWITCH, 1), (ROPE_SWITCH + 1, 30), (300, 30)],
)
def test_longrope_is_exact_on_either_side_of_the_switch(length: int, new_tokens: int) -> None:
    engine = Engine(build("phi3-longrope"), **EARLY_EXIT, prefill_chunk=64)
    result = engine.generate(prompt(length), max_new_tokens=new_tokens)
    assert result.token_ids == plain_text("phi3-longrope", prompt(length), new_tokens)
    assert new_tokens == 1 or result.accepted > 0


def test_longrope_takes_other_frequencies_past_the_switch() -> None:
    target = Target(build("phi3-longrope"))
    states = [target.new_sequence(length, capacity=length, last_length=length) for length in (8, ROPE_SWITCH + 1)]
    (short, _), (long, _) = (target.lay_out(state, 8).turn(None) for state in states)
    assert not torch.allclose(short, long, atol=0.1)


@pytest.mark.parametrize("length", [1, 30, ROPE_SWITCH])
def test_crossing_the_rope_switch_is_refused_with_the_numbers(length: int) -> None:
    engine = Engine(build("phi3-longrope"), **EARLY_EXIT)
    room = ROPE_SWITCH - length + 1
    with pytest.raises(ContextLengthError) as refusal:
        engine.generate(prompt(length), max_new_tokens=room + 1)
    for number in (length, ROPE_SWITCH, ROPE_SWITCH + 1, room):
        assert str(number) in str(refusal.value)
    with pytest.raises(ContextLengthError, match="crosses this model's rope switch"):
        engine.request(prompt(length), SamplingParams(max_new_tokens=room + 1))  # before it is queued


def test_requests_on_both_sides_of_the_switch_can_take_turns() -> None:
    engine = Engine(build("phi3-longrope"), **EARLY_EXIT)
    prompts = [prompt(40), prompt(200)]
    streams = [engine.stream(token_ids, max_new_tokens=20) for token_ids in prompts]
    for _ in zip(*streams, strict=False):
        pass
    for stream, token_ids in zip(streams, prompts, strict=True):
        assert stream.result.token_ids == plain_text("phi3-longrope", token_ids, 20)
