"""Which rows of a forward see which: causal rows and independent branches."""

import torch


def causal(rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A causal mask: each row sees itself and the rows before it.

    Args:
        rows: number of rows.
        device: where to create it.

    Returns:
        bool ``[rows, rows]`` (query, key).
    """
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril_()


def branches(count: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask of independent continuations, laid out one after the other.

    Each branch sees the cached prefix and itself, causally, and no other branch (CLaSp's and KnapSpec's parallel rows).

    Args:
        count: number of branches.
        length: rows of each.
        device: where to create it.

    Returns:
        bool ``[count * length, count * length]`` (query, key), block diagonal.
    """
    branch = torch.arange(count * length, device=device) // length
    return causal(count * length, device) & (branch[:, None] == branch[None, :])
