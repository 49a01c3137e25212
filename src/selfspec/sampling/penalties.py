"""Logits processors of OpenAI's parameters: biases, penalties of what the output contains, and its least length.

All of them are functions of the tokens before a row, so they apply to drafted rows as they do to plain decoding.
"""

from collections.abc import Collection, Mapping

import torch
from transformers import LogitsProcessor

from selfspec.errors import InvalidParameterError
from selfspec.model import transfer


class LogitBias(LogitsProcessor):
    """Adds a constant to the logits of single tokens.

    Args:
        bias: what to add, by token id.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._token_ids, self._values = list(bias), list(bias.values())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Takes and returns scores, float ``[rows, vocab]``; does not read the tokens before them."""
        token_ids = transfer.send(self._token_ids, scores.device)
        return scores.index_add(1, token_ids, scores.new_tensor(self._values).expand(len(scores), -1))


class OutputPenalties(LogitsProcessor):
    """Makes tokens less likely that the output contains already; the prompt does not count.

    The score of a token that occurs ``c > 0`` times is reduced by ``presence + c * frequency``, as in OpenAI's API.

    Args:
        presence: the penalty for occurring at all.
        frequency: the penalty for each time.
        prompt_length: tokens of the prompt.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency = presence, frequency
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Takes the tokens of one row, long ``[1, length]``, and its scores, float ``[1, vocab]``; returns scores."""
        written = input_ids[0, self._prompt_length :]
        ones = torch.ones_like(written, dtype=scores.dtype)
        counts = torch.zeros_like(scores[0]).index_add_(0, written, ones)  # `unique` would wait for the device
        return scores - (self._frequency * counts + self._presence * counts.sign())


class MinTokens(LogitsProcessor):
    """Makes the tokens that end an output impossible before it has a number of tokens.

    Args:
        min_tokens: the number.
        prompt_length: tokens of the prompt.
        end_ids: tokens that end the output; those outside the vocabulary are ignored.
    """

    def __init__(self, min_tokens: int, prompt_length: int, end_ids: Collection[int]) -> None:
        self._first_end = prompt_length + min_tokens
        self._end_ids = sorted(end_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Takes the tokens of one row, long ``[1, length]``, and its scores, float ``[1, vocab]``; returns scores."""
        if input_ids.shape[1] >= self._first_end:
            return scores
        end_ids = [token_id for token_id in self._end_ids if token_id < scores.shape[1]]
        return scores.index_fill(1, transfer.send(end_ids, scores.device), -torch.inf)


def check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    """Refuses a bias of a token that the model does not know.

    Args:
        bias: what to add to logits, by token id.
        vocab_size: number of token ids.

    Raises:
        InvalidParameterError: an id is outside the vocabulary.
    """
    largest = max(bias, default=-1)
    if largest >= vocab_size:
        raise InvalidParameterError(
            f"logit_bias names token {largest}, but the model's vocabulary has {vocab_size} token ids; leave it out"
        )
