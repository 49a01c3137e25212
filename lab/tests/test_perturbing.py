"""Weights off a grid: how far they move, and what stays."""

import copy

import torch

from helpers.models import build
from selfspec_lab.perturbing import perturb


def grid(weight: torch.Tensor) -> torch.Tensor:
    """The weights at 4 bits in groups of 32."""
    groups = weight.view(weight.shape[0], -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 7
    return ((groups / step).round() * step).view_as(weight)


def test_weights_leave_the_grid_by_half_a_step_at_most() -> None:
    model = copy.deepcopy(build("llama"))
    linear, embedding = model.model.layers[0].mlp.up_proj, model.get_input_embeddings().weight.clone()
    with torch.no_grad():
        linear.weight.copy_(grid(linear.weight))
    before = linear.weight.clone()
    step = before.view(len(before), -1, 32).abs().amax(-1, keepdim=True).div(7).expand(-1, -1, 32).reshape(before.shape)
    perturb(model)
    assert not torch.equal(grid(linear.weight), linear.weight)
    assert ((linear.weight - before).abs() <= 0.5001 * step).all()
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_noise_depends_on_the_seed_alone() -> None:
    first, second, other = (copy.deepcopy(build("llama")) for _ in range(3))
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        perturb(model, seed=seed)
    weights = [model.model.layers[1].self_attn.q_proj.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
