"""Takes a model's weights off a quantisation grid, to time drafts of a checkpoint that was stored at few bits.

The weights of a 4-bit file lie on a grid of groups. Low-bit weights made with the same groups would be equal to them,
and every draft would be accepted, which says nothing about weights that were never on a grid.
"""

import torch
from torch import nn

STEP_SHARE = 0.5
"""Size of the noise: of the step of a 4-bit grid over the weights of a row."""


@torch.no_grad()
def perturb(model: nn.Module, group: int = 32, seed: int = 0) -> None:
    """Adds uniform noise of up to half a step of the 4-bit grid of each group to all matrices of a model, in place.

    The model then has another text, which all methods share. Embeddings, and heads tied to them, are left as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for module in model.modules():
        if not isinstance(module, nn.Linear) or id(module.weight) in embeddings:
            continue
        weight = module.weight
        if weight.shape[1] % group:
            continue
        groups = weight.float().view(weight.shape[0], -1, group)
        step = groups.abs().amax(-1, keepdim=True) / 7
        noise = torch.rand(groups.shape, generator=generator).to(weight.device) - 0.5
        weight.copy_((groups + 2 * STEP_SHARE * step * noise).view_as(weight))
