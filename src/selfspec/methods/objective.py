"""The papers' objectives, as pure functions.

Every argument is a number or a tensor; tensors broadcast, so one call scores a grid of choices. The result is a tensor
of the broadcast shape, which is ``[]`` if all arguments are numbers.
"""

import torch

Number = float | torch.Tensor


def expected_tokens(alpha: Number, draft_length: Number) -> torch.Tensor:
    """Tokens that a round commits, including the target's own one, if draft tokens are accepted with one probability.

    ``1 + α + … + α^γ = (1 - α^(γ+1)) / (1 - α)``, and ``γ + 1`` at ``α = 1`` (Leviathan et al. 2023, equation 1).
    """
    alpha, most = _tensor(alpha), _tensor(draft_length) + 1
    # The plain quotient loses precision near α = 1; expm1 and log do not.
    tokens = -torch.expm1(most * torch.log(alpha)) / (1 - alpha)
    return torch.where(alpha == 1, most.to(tokens.dtype), tokens)


def tokens_per_layer(alpha: Number, exit_layer: Number, draft_length: Number, layer_count: Number) -> torch.Tensor:
    """DEL's objective TPL: tokens of a round ÷ layers that it loads (Entezari Zarch et al. 2025, equation 1).

    ``(1 - α^(d+1)) / ((1 - α)(d ℓ + L))``: each of the ``d`` draft tokens loads ``ℓ`` layers, the verification ``L``.
    Length 0 is plain decoding, ``1 / L``.
    """
    draft_length = _tensor(draft_length)
    return expected_tokens(alpha, draft_length) / (draft_length * exit_layer + layer_count)


def tokens_per_time(
    alpha: Number, draft_length: Number, draft_time: Number, target_time: Number, head_time: Number = 0.0
) -> torch.Tensor:
    """KnapSpec's objective TPT: tokens of a round ÷ time of the round (equation 4).

    ``(1 - α^(γ+1)) / (1 - α) · 1 / (γ t_draft + t_target)``. The paper counts the time of attention and MLP branches
    only (``tpt=paper``). ``head_time`` adds the time outside of them to every draft step and to the verification
    (``tpt=with_head``, ours).
    """
    draft_length = _tensor(draft_length)
    time = draft_length * (_tensor(draft_time) + head_time) + (_tensor(target_time) + head_time)
    return expected_tokens(alpha, draft_length) / time


def _tensor(number: Number) -> torch.Tensor:
    """A tensor as it is; a number as a float64 tensor without dimensions, which does not promote other tensors."""
    return number if isinstance(number, torch.Tensor) else torch.tensor(number, dtype=torch.float64)
