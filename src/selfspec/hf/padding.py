"""Rows of a left-padded batch from ``generate``, and logits processors converted for each row.

A row is generated without its padding. Processors and stopping criteria get ``[1, length]`` ids without padding, as if
``generate`` had been called with this row alone: padding is neither penalised nor part of an n-gram. Values that
``generate`` computed over the padded batch are converted for the row, see ``processors_of``.
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
"""Processors that compare the number of ids with a length, and the attribute with that length (it counts padding)."""


@dataclass(frozen=True)
class PaddedRow:
    """Row ``index`` of ``batch`` rows: long ``[length]``, with ``padding`` padding tokens at the left."""

    index: int
    batch: int
    padded_ids: torch.Tensor
    padding: int

    @property
    def token_ids(self) -> torch.Tensor:
        """The prompt without padding, long ``[length - padding]``."""
        return self.padded_ids[self.padding :]


def split_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> list[PaddedRow]:
    """Splits a left-padded batch, ``[batch, length]``, into rows.

    Refused, naming the row, are rows that are empty or not padded at the left, and positions that do not count from 0
    after the padding; those of padding are ignored.
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
    return [PaddedRow(index, batch, input_ids[index], padding) for index, padding in enumerate(paddings)]


def processors_of(row: PaddedRow, processors: Iterable[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Converts the processors of a batch for one row. The originals are not modified.

    - Lengths do not count the row's padding (``MinNewTokensLengthLogitsProcessor`` and similar classes).
    - ``prompt_ignore_length`` of the repetition penalty, which ``generate`` sets to skip padding, is the row's own.
    - The encoder processors read the row's own prompt without padding.
    - ``prefix_allowed_tokens_fn`` is called with the row's index.

    Every other processor is used as it is.
    """
    return tuple(_for_row(row, processor) for processor in processors)


def _padding(index: int, mask: list[Any]) -> int:
    if any(value not in (0, 1) for value in mask):
        raise InvalidPromptError(f"row {index} of attention_mask has values other than 0 and 1; use 0 for padding")
    if 1 not in mask:
        raise InvalidPromptError(f"row {index} has only padding; leave it out")
    padding = mask.index(1)
    if not all(mask[padding:]):
        raise InvalidPromptError(
            f"row {index} is padded at token {mask.index(0, padding)}, not only at the left; use padding_side='left'. "
            "If no attention_mask was given, generate took the pad token for padding; give a mask of ones"
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


def _for_row(row: PaddedRow, processor: LogitsProcessor) -> LogitsProcessor:
    changes = _changes(row, processor)
    if not changes:
        return processor
    processor = copy.copy(processor)
    for name, value in changes.items():
        setattr(processor, name, value)
    return processor


def _changes(row: PaddedRow, processor: Any) -> dict[str, Any]:
    """The attributes of a processor that change for a row, with their new values."""
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


def _encoder_ngrams(row: PaddedRow, processor: EncoderNoRepeatNGramLogitsProcessor) -> Any:
    """The n-grams of the row's prompt, or the processor's own n-grams if the caller made it from other ids."""
    found = processor.generated_ngrams[_source(row, processor.batch_size)]

    def ngrams(token_ids: Any) -> Any:
        return EncoderNoRepeatNGramLogitsProcessor(processor.ngram_size, token_ids[None]).generated_ngrams[0]

    return ngrams(row.token_ids) if found == ngrams(row.padded_ids) else found


def _source(row: PaddedRow, count: int) -> int:
    """The index of a row's entry among ``count`` entries; ``generate`` may repeat rows (``num_return_sequences``)."""
    return row.index * count // row.batch
