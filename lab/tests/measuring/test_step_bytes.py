"""Bytes that a step has to read."""

from typing import Any

from helpers.models import LAYERS, WINDOW, build
from selfspec.runtimes.target import Target
from selfspec_lab.measuring import StepBytes


def test_bytes_of_a_step_are_those_of_the_weights_and_of_the_context() -> None:
    model: Any = build("llama")
    costs = StepBytes(Target(model))
    layer = model.model.layers[2]
    attention = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj]
    mlp = [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    assert costs.sublayers[4] == sum(each.weight.nbytes for each in attention) + layer.input_layernorm.weight.nbytes
    assert costs.sublayers[5] == sum(each.weight.nbytes for each in mlp) + layer.post_attention_layernorm.weight.nbytes
    assert costs.outside == model.lm_head.weight.nbytes + model.model.norm.weight.nbytes
    weights = sum(weight.nbytes for weight in model.parameters()) - model.model.embed_tokens.weight.nbytes
    slot = 2 * 2 * 24 * 4  # keys and values, 2 heads of 24, float32
    assert costs.target_step(0) == weights
    assert costs.target_step(100) == weights + LAYERS * slot * 100
    assert costs.step([0, 3, 4], 100) == costs.outside + sum(costs.sublayers[i] for i in (0, 3, 4)) + 2 * slot * 100


def test_a_tied_head_is_read_and_a_window_bounds_what_is_read_of_the_context() -> None:
    tied: Any = build("llama-tied-biases")
    assert StepBytes(Target(tied)).target_step(0) == sum(weight.nbytes for weight in tied.parameters())
    costs = StepBytes(Target(build("mistral-window")))
    assert costs.target_step(WINDOW) == costs.target_step(1000) > costs.target_step(WINDOW - 1)


def test_of_experts_only_those_of_one_row_count() -> None:
    model: Any = build("mixtral")
    costs = StepBytes(Target(model))
    experts = sum(weight.nbytes for weight in model.model.layers[0].mlp.experts.parameters())
    branch = sum(weight.nbytes for weight in Target(model).sublayers[1].parameters())
    assert costs.sublayers[1] == branch - experts // 2  # 2 of 4
