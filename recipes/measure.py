"""Figures of a checkpoint on held-out text: loss, agreement of drafts with the full model, early exits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from model import Llama

BATCH_TOKENS = 4096

SHORTLIST = 10
"""Sublayers tried in every round after the first when choosing a skip set: the best ones of the last try."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokenised documents in batches.

    Attributes:
        batches: token ids, int64 ``[rows, length]`` each; every row starts with BOS and is padded with -1.
        tokens: number of predicted tokens, without BOS and padding.
        bytes: UTF-8 bytes of those tokens.
    """

    batches: list[Tensor]
    tokens: int
    bytes: int


def encode_text(tokenizer: Tokenizer, documents: list[str], window: int, most_tokens: int | None = None) -> Text:
    """Cut documents into independent windows.

    Args:
        tokenizer: puts BOS before a text.
        documents: texts.
        window: most tokens of a row, including BOS; longer documents give several rows.
        most_tokens: approximate number of tokens to read; None for all.
    """
    bos = tokenizer.token_to_id("<|bos|>")
    rows: list[list[int]] = []
    size = bytes_read = 0
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        for start in range(0, len(ids), window - 1):
            if most_tokens is not None and size >= most_tokens:
                break
            part = ids[start : start + window - 1]
            rows.append([bos, *part])
            size += len(part)
            bytes_read += sum(len(tokenizer.id_to_token(token)) for token in part)
    return Text(list(_batches(rows)), size, bytes_read)


def bits_per_byte(llama: Llama, text: Text) -> float:
    """Teacher-forced negative log-likelihood of the text, in bits per UTF-8 byte."""
    nats = 0.0
    for tokens in text.batches:
        logits = _logits(llama, tokens, range(llama.shape.sublayers))[:, :-1].flatten(0, 1)
        nats += functional.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=-1, reduction="sum").item()
    return nats / math.log(2) / text.bytes


def greedy_choices(llama: Llama, text: Text, skipped: set[int]) -> list[Tensor]:
    """The most likely next token at every position without some sublayers; one tensor ``[positions]`` per batch."""
    kept = [sublayer for sublayer in range(llama.shape.sublayers) if sublayer not in skipped]
    return [_logits(llama, tokens, kept).argmax(-1)[tokens >= 0] for tokens in text.batches]


def agreement(choices: list[Tensor], target_choices: list[Tensor]) -> float:
    """Share of positions at which two models choose the same token, 0 ... 1."""
    equal = sum(int((mine == theirs).sum()) for mine, theirs in zip(choices, target_choices, strict=True))
    return equal / sum(len(choice) for choice in target_choices)


def skip_agreement(llama: Llama, text: Text, skipped: set[int]) -> float:
    """Share of the full model's greedy choices that stay the same without ``skipped``."""
    return agreement(greedy_choices(llama, text, skipped), greedy_choices(llama, text, set()))


def exit_agreement(llama: Llama, text: Text) -> dict[int, float]:
    """Share of the full model's greedy choices that an exit after each number of layers (1 ... layers - 1) makes."""
    layers = llama.shape.layers
    equal, positions = dict.fromkeys(range(1, layers), 0), 0
    for tokens in text.batches:
        read = tokens >= 0
        states, choices = llama.embed(tokens.clamp(min=0)), {}
        for layer in range(layers):
            states = llama.run(states, (2 * layer, 2 * layer + 1))
            choices[layer + 1] = llama.logits(states).argmax(-1)[read]
        positions += int(read.sum())
        for layer in equal:
            equal[layer] += int((choices[layer] == choices[layers]).sum())
    return {layer: count / positions for layer, count in equal.items()}


def choose_skip_set(llama: Llama, text: Text, size: int) -> list[int]:
    """Choose middle sublayers to skip greedily, one by one, by the least loss of agreement.

    Args:
        llama: the model.
        text: calibration text.
        size: number of sublayers to skip.

    Returns:
        the sublayers, in the order they were chosen.
    """
    target_choices = greedy_choices(llama, text, set())
    skipped: list[int] = []
    candidates, scores = list(llama.shape.middle), dict.fromkeys(llama.shape.middle, 1.0)
    for number in range(size):
        tried = candidates[:SHORTLIST] if number else candidates
        before = [_states_before(llama, tokens, set(skipped)) for tokens in text.batches]
        for candidate in tried:
            rest = [s for s in range(candidate + 1, llama.shape.sublayers) if s not in skipped]
            choices = [
                llama.logits(llama.run(states[candidate], rest)).argmax(-1)[tokens >= 0]
                for states, tokens in zip(before, text.batches, strict=True)
            ]
            scores[candidate] = agreement(choices, target_choices)
        skipped.append(max(tried, key=scores.__getitem__))
        candidates = sorted(set(candidates) - set(skipped), key=scores.__getitem__, reverse=True)
    return skipped


def _logits(llama: Llama, tokens: Tensor, kept: range | list[int]) -> Tensor:
    return llama.logits(llama.run(llama.embed(tokens.clamp(min=0)), kept)).float()


def _states_before(llama: Llama, tokens: Tensor, skipped: set[int]) -> dict[int, Tensor]:
    states, before = llama.embed(tokens.clamp(min=0)), {}
    for sublayer in range(llama.shape.sublayers):
        before[sublayer] = states
        if sublayer not in skipped:
            states = llama.run(states, (sublayer,))
    return before


def _batches(rows: list[list[int]]) -> Iterator[Tensor]:
    rows = sorted(rows, key=len)
    while rows:
        width = len(rows[-1])
        count = max(1, BATCH_TOKENS // width)
        rows, part = rows[:-count], rows[-count:]
        batch = torch.full((len(part), width), -1)
        for row, ids in zip(batch, part, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        yield batch
