"""Log-probabilities of tokens under the model's own distribution."""

from collections.abc import Sequence

import torch

from selfspec.model import transfer
from selfspec.types import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], alternatives: int) -> list[TokenLogprobs]:
    """The log-probability of one token from each row, and the most probable tokens.

    The distribution is the softmax of the logits in float32, before logits processors and temperature. Synchronises
    with the device once.

    Args:
        logits: ``[n, vocab]``, the model's own.
        token_ids: ``[n]``, the tokens that follow the rows.
        alternatives: how many of the most probable tokens to report; at most the vocabulary.

    Returns:
        ``[n]``, one for each token.
    """
    chosen = transfer.send(token_ids, logits.device)
    values = logits.float()
    normaliser = values.logsumexp(-1, keepdim=True)
    own = values.gather(1, chosen[:, None]) - normaliser
    best = values.topk(min(alternatives, values.shape[1]), dim=1)
    chances, best_ids, best_chances = transfer.read(own[:, 0], best.indices, best.values - normaliser)
    return [
        TokenLogprobs(token_id, chance, tuple(zip(map(int, ids), own_chances, strict=True)))
        for token_id, chance, ids, own_chances in zip(token_ids, chances, best_ids, best_chances, strict=True)
    ]
