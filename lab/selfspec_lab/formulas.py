"""Formulas of the papers by which runs are judged, and which no method uses."""

import torch

from selfspec.methods.objective import Number


def ideal_speedup(mean_generated_length: Number, alpha: Number, cost: Number) -> torch.Tensor:
    """Speedup over plain decoding if nothing but draft and target steps takes time (SWIFT, equation 6).

    ``M α / ((M - 1) c + α)``. It assumes that a round has drafted ``(M - 1) / α`` tokens. At ``M = 1``, where no token
    was accepted, that number is not defined, and the result is 1 as for rounds that draft nothing.
    ``c`` is the time of a draft step ÷ that of a target step, ``M`` the committed tokens ÷ target forwards.
    """
    length, alpha = (
        number if isinstance(number, torch.Tensor) else torch.tensor(number, dtype=torch.float64)
        for number in (mean_generated_length, alpha)
    )
    speedup = length * alpha / ((length - 1) * cost + alpha)
    return torch.where(length == 1, torch.ones_like(speedup), speedup)


def sufficient_cosine(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The cosine similarity above which a state of equal norm has the same greedy token (KnapSpec, lemma 4.1).

    ``1 - ξ² / (2 ‖x‖² max ‖w* - w_j‖²)``, where ``ξ`` is the margin of the greedy token ``w*`` over the second best.
    ``states`` are ``x``, inputs of the LM head, ``[..., hidden]``, and ``head`` its weights, ``[vocab, hidden]``. The
    distances come from scalar products, because the differences of all tokens would be another head for each state.
    """
    scores = states @ head.T
    best, second = scores.topk(2).values.unbind(-1)
    greedy, squares = head[scores.argmax(-1)], torch.einsum("vh,vh->v", head, head)
    distance = (squares - 2 * greedy @ head.T).amax(-1) + greedy.square().sum(-1)
    margin: torch.Tensor = (best - second).square() / (2 * states.square().sum(-1) * distance)
    return 1 - margin
