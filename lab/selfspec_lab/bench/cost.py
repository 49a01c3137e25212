"""Bytes that decoding has to read, exactly: of a step, of a whole output, with a draft and without."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from selfspec.runtimes.target import Target
from selfspec.types import Generation, Round


class StepBytes:
    """What one forward over a few rows reads from memory: weights once, keys and values of the context.

    Of the embedding only single rows are read, which do not count. Of a mixture of experts those of one row count.

    Args:
        target: the model.

    Attributes:
        sublayers: bytes of each sublayer's weights, norms included.
        outside: bytes of final norm and LM head, which every draft step reads too.
        total: number of sublayers.
    """

    def __init__(self, target: Target) -> None:
        model: Any = target.model
        slot = target.new_sequence(1, 1, 1).cache
        self._per_slot = [keys.nbytes + values.nbytes for keys, values in zip(slot.keys, slot.values, strict=True)]
        self._windows = [getattr(sublayer, "window", None) for sublayer in target.sublayers[::2]]
        self.sublayers = tuple(
            _nbytes(sublayer.parameters()) - _unread_experts(sublayer.module, target.config)
            for sublayer in target.sublayers
        )
        self.outside = _nbytes(model.model.norm.parameters()) + _nbytes(model.get_output_embeddings().parameters())
        self.total = len(self.sublayers)

    def step(self, sublayers: Iterable[int], context: int) -> int:
        """Bytes of one forward.

        Args:
            sublayers: those that run.
            context: cache slots that the rows see, their own included.
        """
        read = self.outside
        for index in sublayers:
            read += self.sublayers[index]
            if index % 2 == 0:
                read += self._per_slot[index // 2] * self._seen(index // 2, context)
        return read

    def target_step(self, context: int) -> int:
        """Bytes of one forward of the full model: a step of plain decoding, or a verification of any width.

        A verification behind a draft with a shared prefix (``methods.md``, section 1) reads no less: the rows that were
        drafted start at sublayer ``s``, but the last draft token has not been through the prefix yet, so that the
        prefix's weights are read for that one row.
        """
        return self.step(range(self.total), context)

    @property
    def slot(self) -> int:
        """Bytes of one token's keys and values, all layers together."""
        return sum(self._per_slot)

    def _seen(self, layer: int, context: int) -> int:
        window = self._windows[layer]
        return context if window is None else min(window, context)


@dataclass(frozen=True)
class DecodingBytes:
    """Bytes of decoding some tokens, prefill aside.

    Attributes:
        tokens: how many there are.
        plain: what plain decoding reads for them.
        draft_steps: forwards of the drafts' layers.
        draft: what those read.
        verify: what the verifications read.
    """

    tokens: int
    plain: int
    draft_steps: int
    draft: int
    verify: int

    @property
    def plain_step(self) -> float:
        """Bytes of a step of plain decoding at the contexts of these tokens, on average."""
        return self.plain / self.tokens

    @property
    def ideal_speedup(self) -> float:
        """Speedup over plain decoding if both read memory equally fast and nothing else took time.

        SWIFT's equation 6, ``M α / ((M - 1) c + α)``, with ``c`` in bytes (head included), over rounds as they were:
        where a round drafts ``(M - 1) / α`` tokens at one context, it is that very number.
        """
        return self.plain / (self.draft + self.verify)

    @property
    def cost_coefficient(self) -> float | None:
        """``c`` in bytes: those of a draft step ÷ those of a plain step; ``None`` where no layers drafted."""
        return self.draft / self.draft_steps / self.plain_step if self.draft_steps else None


def decoding_bytes(costs: StepBytes, generations: Sequence[Generation]) -> DecodingBytes:
    """Counts the bytes of finished outputs, round by round.

    Args:
        costs: of the model that wrote them.
        generations: outputs with their rounds.
    """
    tokens = plain = draft_steps = draft = verify = 0
    for generation in generations:
        length = generation.prompt_token_count + 1  # the first token comes from the prefill
        for record in generation.rounds:
            new = len(record.token_ids)
            plain += sum(costs.target_step(length + step) for step in range(new))
            verify += costs.target_step(length + record.candidates)
            draft += _draft_bytes(costs, record, length)
            draft_steps += record.drafted if record.kept is not None else 0
            tokens += new
            length += new
    return DecodingBytes(tokens, plain, draft_steps, draft, verify)


def _draft_bytes(costs: StepBytes, record: Round, length: int) -> int:
    """Of a layer draft every token is one forward; tokens that were found elsewhere read no weights."""
    if record.kept is None:
        return 0
    return sum(costs.step(record.kept.sublayers, length + step) for step in range(record.drafted))


def _nbytes(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.nbytes for weight in weights)


def _unread_experts(module: nn.Module, config: Any) -> int:
    experts = getattr(module, "experts", None)
    if not isinstance(experts, nn.Module):
        return 0
    count = int(getattr(config, "num_local_experts", None) or config.num_experts)
    return _nbytes(experts.parameters()) * (count - int(config.num_experts_per_tok)) // count
