"""The output of a request: its tokens, their text and log-probabilities, and where it ends."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import StoppingCriteria

from selfspec.decoding.text import TextStream
from selfspec.model import transfer
from selfspec.types import FinishReason, TextPiece, TokenLogprobs, TokenOrigin


class Output:
    """The tokens of an output, which ends exactly where plain decoding would end it.

    ``text`` is ``None`` without a tokenizer; ``criteria`` are called after every token. ``finish_reason`` is ``None``
    while the output grows. ``prompt_logprobs`` are those of the prompt's tokens from the second on.
    """

    def __init__(
        self,
        *,
        max_new_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
        stop_ids: frozenset[int] = frozenset(),
        text: TextStream | None = None,
        criteria: Sequence[StoppingCriteria] = (),
    ) -> None:
        self.token_ids: list[int] = []
        self.origins: list[TokenOrigin] = []
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._undecoded: list[tuple[int, TokenOrigin, TokenLogprobs | None]] = []
        self._pieces: list[TextPiece] = []
        self._max_new_tokens = max_new_tokens
        self._eos_ids = eos_ids
        self._stop_ids = stop_ids
        self._text = text
        self._criteria = criteria

    def append(
        self,
        token_id: int,
        origin: TokenOrigin,
        context: Callable[[], torch.Tensor],
        logprobs: TokenLogprobs | None = None,
    ) -> bool:
        """Adds the next token; returns whether it was the last one.

        ``context`` gives prompt and output up to this token, long ``[1, length]``, for stopping criteria.
        """
        assert self.finish_reason is None, "the output has ended"
        self.token_ids.append(token_id)
        self.origins.append(origin)
        self.logprobs += [logprobs] if logprobs is not None else []
        self._undecoded.append((token_id, origin, logprobs))
        if self._text is not None and self._text.has_stop:
            self._decode()
        self.finish_reason = self._find_end(token_id, context)
        return self.finish_reason is not None

    @property
    def has_criteria(self) -> bool:
        """Whether stopping criteria may end it, which are called after every token."""
        return bool(self._criteria)

    def ends_with(self) -> Callable[[int], bool]:
        """Says of the tokens after this output, which it is given in order, whether one ends it by its id or text."""
        ids = self._eos_ids | self._stop_ids
        if self._text is None or not self._text.has_stop:
            return ids.__contains__
        text = self._text.copy()

        def ends(token_id: int) -> bool:
            text.push(token_id)
            return token_id in ids or text.stopped is not None

        return ends

    def end_without_tokens(self) -> None:
        """Ends an output that is to have no tokens."""
        assert not self._max_new_tokens
        self.finish_reason = "length"

    def take_pieces(self) -> list[TextPiece]:
        """The pieces since the last call. Without stop strings, tokens are decoded here and nowhere else."""
        self._decode()
        pieces, self._pieces = self._pieces, []
        if pieces and self.finish_reason is not None and self._text is not None:
            pieces[-1] = replace(pieces[-1], text=pieces[-1].text + self._text.flush())
        return pieces

    def decode(self) -> str:
        """The text of all tokens; empty without a tokenizer."""
        return "" if self._text is None else self._text.whole(self.token_ids)

    def _decode(self) -> None:
        """Turns the tokens since the last call into pieces."""
        for token_id, origin, logprobs in self._undecoded:
            text = "" if self._text is None else self._text.push(token_id)
            self._pieces.append(TextPiece(text, token_id, origin, logprobs))
        self._undecoded.clear()

    def _find_end(self, token_id: int, context: Callable[[], torch.Tensor]) -> FinishReason | None:
        if token_id in self._eos_ids:
            return "eos"
        if token_id in self._stop_ids:
            return "stop_token"
        if self._text is not None and self._text.stopped is not None:
            return "stop_string"
        if any(bool(torch.as_tensor(criterion(context(), None)).all()) for criterion in self._criteria):
            return "stopping_criteria"
        return "length" if len(self.token_ids) >= self._max_new_tokens else None


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], alternatives: int) -> list[TokenLogprobs]:
    """The log-probability of one token from each row under the model's own distribution, and the most probable ones.

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
