"""The output of a request: its tokens, its text, and where it ends."""

from collections.abc import Sequence

import torch
from transformers import StoppingCriteria

from selfspec.decoding.text import TextStream
from selfspec.types import FinishReason, TextPiece, TokenOrigin


class Output:
    """Takes tokens one by one and ends exactly where plain decoding would.

    Args:
        prompt_ids: tokens of the prompt.
        max_new_tokens: longest output.
        eos_ids: the model's end-of-sequence ids.
        stop_ids: further ids that end the output.
        text: the text of the output with its stop strings; ``None`` without a tokenizer.
        criteria: Hugging Face stopping criteria, asked after every token.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
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
        self._pieces: list[TextPiece] = []
        self._max_new_tokens = max_new_tokens
        self._eos_ids = eos_ids
        self._stop_ids = stop_ids
        self._text = text
        self._criteria = criteria
        self._sequence = torch.empty(1, len(prompt_ids) + max_new_tokens, dtype=torch.long) if criteria else None
        if self._sequence is not None:
            self._sequence[0, : len(prompt_ids)] = torch.tensor(prompt_ids)
        self._prompt_length = len(prompt_ids)

    def append(self, token_id: int, origin: TokenOrigin) -> bool:
        """Takes the next token.

        Args:
            token_id: the token.
            origin: who chose it first.

        Returns:
            Whether it was the last one.
        """
        assert self.finish_reason is None, "the output has ended"
        self.token_ids.append(token_id)
        self.origins.append(origin)
        text = "" if self._text is None else self._text.push(token_id)
        self.finish_reason = self._find_end(token_id)
        if self.finish_reason is not None and self._text is not None:
            text += self._text.flush()
        self._pieces.append(TextPiece(text, token_id, origin))
        return self.finish_reason is not None

    def take_pieces(self) -> list[TextPiece]:
        """The pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _find_end(self, token_id: int) -> FinishReason | None:
        if token_id in self._eos_ids:
            return "eos"
        if token_id in self._stop_ids:
            return "stop_token"
        if self._text is not None and self._text.stopped is not None:
            return "stop_string"
        if self._any_criterion(token_id):
            return "stopping_criteria"
        return "length" if len(self.token_ids) >= self._max_new_tokens else None

    def _any_criterion(self, token_id: int) -> bool:
        if self._sequence is None:
            return False
        length = self._prompt_length + len(self.token_ids)
        self._sequence[0, length - 1] = token_id
        context = self._sequence[:, :length]
        return any(bool(torch.as_tensor(criterion(context, None)).all()) for criterion in self._criteria)
