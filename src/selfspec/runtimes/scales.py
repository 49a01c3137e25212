"""Scales of groups of weights and their symmetric integers, as ``packing.h`` has them, by operations of torch."""

import torch

_STEP = 0.3
_STEPS, _FEW_STEPS = (0, -4, -2, -1, 1, 3), (0, -3, 3)
"""Scales that are tried, at 4 bits and at more; of equally good ones the first is taken."""

_SMALLEST = 1e-30
"""A group of smaller values has a scale of zero."""


def choose_scales(groups: torch.Tensor, offset: int) -> torch.Tensor:
    """The scale of each group, ``[…]`` of float32 ``[…, inputs]``: of those tried the one of least squared error.

    Sums of squared errors are added in another order than in the kernel, so that of two scales with nearly the same
    error the other one may be taken.

    Args:
        groups: the weights.
        offset: the lowest integer is as much below zero.
    """
    greatest, least = groups.amax(-1).clamp(min=0), groups.amin(-1).clamp(max=0)
    largest = torch.where(greatest > -least, greatest, least)
    best, smallest = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for step in _STEPS if offset == 8 else _FEW_STEPS:
        scales = (largest / (_STEP * step - offset)).bfloat16().float()
        found = (groups - scales[..., None] * to_integers(groups, scales, offset)).square_().sum(-1)
        is_better = (found < smallest) | (step == 0)  # also where errors are no numbers, or too large
        best, smallest = torch.where(is_better, scales, best), torch.where(is_better, found, smallest)
    return torch.where(largest.abs() < _SMALLEST, 0.0, best)


def to_integers(groups: torch.Tensor, scales: torch.Tensor, offset: int) -> torch.Tensor:
    """The integers of groups ``[…, inputs]``, as floats; zeros where the scale is zero."""
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (groups * inverse[..., None]).round_().clamp_(-offset, offset - 1)
