"""The rows of a left-padded batch that ``generate`` prepared, and the logits processors as each row needs them.

A row is generated without its padding, so processors and stopping criteria see ``[1, length]`` ids without padding too,
as they would if ``generate`` had been given this row alone: padding is neither penalised nor part of an n-gram. What
``generate`` counted or collected over the padded batch is converted for the row, see ``processors_of``.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from selfspec.errors import InvalidPromptError

_LENGTHS = {
    ExponentialDecayLengthPenalty: "regulation_start",
    ForcedEOSTokenLogitsProcessor: "max_length",
    MinLengthLogitsProcessor: "min_length",
    MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    SuppressTokensAtBeginLogitsProcessor: "begin_index",
}
"""Processors that compare the length of the ids with a length, and the attribute that holds it, padding included."""


@dataclass(frozen=True)
class Row:
    """One row of a batch.

    Attributes:
        index: its place in the batch.
        batch: number of rows.
        padded_ids: long ``[length]``, padding first.
        padding: number of padding tokens.
    """

    index: int
    batch: int
    padded_ids: torch.Tensor
    padding: int

    @property
    def token_ids(self) -> torch.Tensor:
        """The prompt, long ``[length - padding]``."""
        return self.padded_ids[self.padding :]


def split_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> list[Row]:
    """The rows of a batch without their padding.

    Args:
        input_ids: long ``[batch, length]``.
        attention_mask: ``[batch, length]`` of 0 (padding) and 1; ``None`` where there is no padding.
        position_ids: ``[batch, length]`` or ``[1, length]``; counted from 0 after the padding. Those of padding are
            not looked at.

    Returns:
        The rows in order.

    Raises:
        InvalidPromptError: a row is padded elsewhere than at its left, or empty; the mask holds other numbers than 0
            and 1; the positions are not those of the mask. The message names the row.
    """
    batch, length = input_ids.shape
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise InvalidPromptError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(input_ids.shape)}; they must be equal"
        )
    paddings = [_padding(index, values) for index, values in enumerate(mask.tolist())]
    if position_ids is not None:
        _check_positions(position_ids, paddings, length)
    return [Row(index, batch, input_ids[index], padding) for index, padding in enumerate(paddings)]


def processors_of(row: Row, processors: Iterable[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """The processors of a batch as one row needs them; those that ``generate`` prepared are left as they are.

    - Lengths count without the row's padding (``MinNewTokensLengthLogitsProcessor`` and its like).
    - The repetition penalty's ``prompt_ignore_length``, which ``generate`` sets to skip padding, is the row's own.
    - The encoder processors look at the row's own prompt, without padding.
    - ``prefix_allowed_tokens_fn`` is told the row's index.

    Any other processor is handed on unchanged.

    Args:
        row: the row.
        processors: those that ``generate`` prepared for the batch.
    """
    return tuple(_for_row(row, processor) for processor in processors)


def _padding(index: int, mask: list[Any]) -> int:
    if any(value not in (0, 1) for value in mask):
        raise InvalidPromptError(f"row {index} of attention_mask holds other values than 0 and 1")
    if 1 not in mask:
        raise InvalidPromptError(f"row {index} is padding only; leave it out")
    padding = mask.index(1)
    if not all(mask[padding:]):
        raise InvalidPromptError(
            f"row {index} is padded at token {mask.index(0, padding)}, not only at its left; use padding_side='left'. "
            "If no attention_mask was given, generate took the pad token for padding: give a mask of ones"
        )
    return padding


def _check_positions(position_ids: torch.Tensor, paddings: list[int], length: int) -> None:
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, len(paddings)) or position_ids.shape[1] != length:
        raise InvalidPromptError(
            f"position_ids of shape {list(position_ids.shape)} do not fit {len(paddings)} rows of {length} tokens"
        )
    for index, (padding, positions) in enumerate(
        zip(paddings, position_ids.expand(len(paddings), length).tolist(), strict=True)
    ):
        if positions[padding:] != list(range(length - padding)):
            raise InvalidPromptError(f"position_ids of row {index} must count from 0 after its padding; leave them out")


def _for_row(row: Row, processor: LogitsProcessor) -> LogitsProcessor:
    changes = _changes(row, processor)
    if not changes:
        return processor
    processor = copy.copy(processor)
    for name, value in changes.items():
        setattr(processor, name, value)
    return processor


def _changes(row: Row, processor: Any) -> dict[str, Any]:
    """The attributes of a processor that differ for a row."""
    for kind, name in _LENGTHS.items():
        if isinstance(processor, kind):
            return {name: getattr(processor, name) - row.padding} if row.padding else {}
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, torch.Tensor):
            ignored = int(ignored[_source(row, len(ignored))])
        return {} if ignored is None else {"prompt_ignore_length": max(0, ignored - row.padding)}
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        batch_ids: torch.Tensor = processor.encoder_input_ids
        ids = batch_ids[_source(row, len(batch_ids))]
        return {"encoder_input_ids": (row.token_ids if torch.equal(ids, row.padded_ids) else ids)[None]}
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        return {"batch_size": 1, "generated_ngrams": [_encoder_ngrams(row, processor)]}
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return {"_prefix_allowed_tokens_fn": lambda _, token_ids: allowed(row.index, token_ids)}
    return {}


def _encoder_ngrams(row: Row, processor: EncoderNoRepeatNGramLogitsProcessor) -> Any:
    """The n-grams of the row's prompt; those of other ids, where the caller made the processor of such, as they are."""
    found = processor.generated_ngrams[_source(row, processor.batch_size)]

    def ngrams(token_ids: Any) -> Any:
        return EncoderNoRepeatNGramLogitsProcessor(processor.ngram_size, token_ids[None]).generated_ngrams[0]

    return ngrams(row.token_ids) if found == ngrams(row.padded_ids) else found


def _source(row: Row, count: int) -> int:
    """Which of ``count`` entries is a row's, where ``generate`` repeated every row (``num_return_sequences``)."""
    return row.index * count // row.batch
