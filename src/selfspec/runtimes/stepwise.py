"""Attention step by step, as transformers computes it, for what torch has no kernel of."""

import torch


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with capped scores, or with sinks.

    Args:
        queries: ``[1, key heads, rows, head_dim]``.
        keys: ``[1, key heads, slots, head_dim]``.
        values: likewise.
        mask: bool, which slots each row sees; ``None`` for all.
        scale: of the scores.
        softcap: caps them.
        sinks: by row the score of a slot without a value that it sees besides, ``[1, key heads, rows, 1]``.

    Returns:
        Like the queries.
    """
    scores = torch.matmul(queries, keys.transpose(2, 3)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        shares = scores.softmax(-1, dtype=torch.float32)
    else:
        shares = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(shares.to(queries.dtype), values)
