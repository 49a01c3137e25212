"""A pruned checkpoint computes what a draft with the kept set computes, in every family of the table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.models import RELATIVES, SUBLAYERS, VARIANTS, build, prompt
from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec_lab.export.pruned import check_prunable, kept_layers, prune, zeroed_halves
from selfspec_lab.families.tiny import tiny_config

MIXED = KeptSet((0, 1, 3, 4, 8, 9, 10, 11), SUBLAYERS)
"""Layer 3 is left out; layer 1 keeps its MLP, layer 2 its attention."""
WHOLE = KeptSet((0, 1, 2, 3, 6, 7, 10, 11), SUBLAYERS)
"""Layers 2 and 4 are left out."""
TOKENS = 48
"""More than the windows of the tiny models."""


@torch.inference_mode()
def draft_logits(model: PreTrainedModel, sublayers: tuple[int, ...], ids: list[int]) -> torch.Tensor:
    """The logits of some sublayers of a model, run one after the other by transformers' modules."""
    target = Target(model, runtime="eager")
    state = target.new_sequence(len(ids), len(ids), len(ids))
    forward = target.lay_out(state, len(ids))
    states = target.run(target.embed(torch.tensor(ids), forward), sublayers, forward).hidden_states
    return target.logits(states)


@pytest.mark.parametrize("name", [*VARIANTS, *RELATIVES])
def test_logits_are_those_of_our_draft(name: str) -> None:
    model, ids = build(name), prompt(TOKENS)
    for kept in (MIXED, WHOLE):
        pruned = prune(model, kept)
        expected = draft_logits(model, kept.sublayers, ids)
        everything = tuple(range(2 * len(kept_layers(kept))))
        assert torch.equal(draft_logits(pruned, everything, ids), expected)
        with torch.inference_mode():
            torch.testing.assert_close(pruned(torch.tensor([ids])).logits[0], expected, atol=2e-4, rtol=1e-4)
    full = draft_logits(model, tuple(range(SUBLAYERS)), ids)
    assert not torch.allclose(full, draft_logits(model, MIXED.sublayers, ids), atol=1e-2)


@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen3-window", "gemma3", "smollm3-window", "glm4-moe"])
def test_a_saved_checkpoint_is_read_back_the_same(name: str, tmp_path: Path) -> None:
    model, ids = build(name), prompt(TOKENS)
    pruned = prune(model, MIXED)
    pruned.save_pretrained(tmp_path)
    reader: Any = AutoModelForCausalLM
    loaded = reader.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    assert loaded.config.num_hidden_layers == 5
    assert draft_logits(loaded, tuple(range(10)), ids).equal(draft_logits(model, MIXED.sublayers, ids))
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == model.config.tie_word_embeddings


def test_what_a_config_says_of_single_layers_goes_with_them() -> None:
    qwen: Any = prune(build("qwen3-window"), WHOLE).config
    own: Any = build("qwen3-window").config
    assert qwen.layer_types == [own.layer_types[layer] for layer in (0, 1, 3, 5)]
    smollm: Any = prune(build("smollm3"), WHOLE).config
    assert build("smollm3").config.no_rope_layers == [1, 1, 0, 1, 1, 0]
    assert smollm.no_rope_layers == [1, 1, 1, 0]
    gemma: Any = prune(build("gemma3"), WHOLE).config
    assert gemma.layer_types.count("full_attention") == 1
    assert prune(build("qwen3-moe"), KeptSet.skipping((0, 1), SUBLAYERS)).config.mlp_only_layers == [0]
    assert prune(build("glm4-moe"), KeptSet.skipping((0, 1), SUBLAYERS)).config.first_k_dense_replace == 0


def test_the_model_is_not_changed() -> None:
    model = build("qwen2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    prune(model, MIXED)
    assert model.config.num_hidden_layers == 6
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_halves() -> None:
    assert kept_layers(MIXED) == (0, 1, 2, 4, 5)
    assert zeroed_halves(MIXED) == (2, 5)
    assert zeroed_halves(WHOLE) == ()


@pytest.mark.parametrize("model_type", ["jamba", "qwen3_next", "lfm2", "mamba2", "gpt2"])
def test_families_without_a_row_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"the depth of a '{model_type}' model cannot be pruned"):
        check_prunable(tiny_config(model_type))


def test_a_pattern_of_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer 1 would become another one"):
        prune(build("ernie4_5_moe"), KeptSet.skipping((0, 1), SUBLAYERS))


def test_sets_that_are_no_draft_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="skips nothing"):
        prune(build("llama"), KeptSet.full(SUBLAYERS))
    with pytest.raises(InvalidParameterError, match="skips everything"):
        prune(build("llama"), KeptSet((), SUBLAYERS))
