"""The output of a request: its tokens, its text with incremental decoding and stop strings, and where it ends."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from selfspec.errors import InvalidParameterError
from selfspec.types import FinishReason, TextPiece, TokenLogprobs, TokenOrigin

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are not (or not yet) UTF-8."""

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A byte-fallback token. A run of them is decoded as a whole, so its end can still change its beginning."""


class TextStream:
    """Turns tokens into text one by one and watches for stop strings.

    The pieces of ``push`` and ``flush``, joined, are ``tokenizer.decode(token_ids, skip_special_tokens=...,
    clean_up_tokenization_spaces=False)``; transformers 5 ignores the clean-up for BPE tokenizers by default. Text is
    held back while later tokens can change it: an incomplete UTF-8 sequence, a run of byte-fallback tokens.

    Stop strings are searched in the text of the output, not of the prompt, including text that is held back except an
    incomplete character at its end. A stop string is found at the token that completes it, wherever in that token it
    ends. This is the meaning of ``stop_strings`` in ``generate``, except that skipped special tokens are not text here.

    Each token costs one decode of the few tokens since the last certain text and some before it. This window grows only
    inside an unbroken run of undecodable or byte-fallback tokens.

    ``stopped`` is the stop string that the output contains, the one that ends first; ``None`` until then.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise InvalidParameterError(f"stop is {stop!r}: give a list of non-empty strings")
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._reach = max((len(text) for text in self._stop), default=1) - 1
        self._skip_special_tokens = skip_special_tokens
        self._special_ids = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._window: list[int] = []  # an anchor, whose text was given already, and the tokens after it
        self._anchor = 0  # number of tokens of the anchor
        self._given = 0  # characters of the window's text that were given already
        self._tail = ""  # the last characters that were given, as many as a stop string can span

    @property
    def has_stop(self) -> bool:
        """Whether there are stop strings, so that ``stopped`` may change with any token."""
        return bool(self._stop)

    def whole(self, token_ids: list[int]) -> str:
        """The text of a finished output, decoded at once."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is certain now and was not before, often one word, sometimes none."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str) or self._is_skipped(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        self._find_stop(text)
        if BYTE_TOKEN.fullmatch(token):
            return ""
        unfinished = text.endswith(REPLACEMENT)
        piece = self._give(text[: len(text) - unfinished])
        if not unfinished:
            self._slide()
        return piece

    def flush(self) -> str:
        """The text still held back, as it stands: the output ends here."""
        return self._give(self._decode(self._window))

    def _give(self, certain: str) -> str:
        piece = certain[self._given :]
        self._given = max(self._given, len(certain))
        self._tail = (self._tail + piece)[-self._reach :] if self._reach else ""
        return piece

    def _slide(self) -> None:
        """Makes the tokens that were just completed the new anchor, if they have text.

        Decoders drop a space at the start of a text. After an anchor without text the next token would lose its space.
        """
        anchor = self._window[self._anchor :]
        text = self._decode(anchor)
        if text:
            self._window, self._given = anchor, len(text)
        self._anchor = len(self._window)

    def _find_stop(self, text: str) -> None:
        if self.stopped is not None:
            return
        searched = self._tail + text[self._given :].rstrip(REPLACEMENT)
        ends = [(searched.find(stop) + len(stop), stop) for stop in self._stop if stop in searched]
        if ends:
            self.stopped = min(ends, key=lambda end: end[0])[1]

    def _is_skipped(self, token_id: int) -> bool:
        return self._skip_special_tokens and token_id in self._special_ids and not self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


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
    def ends_by_ids(self) -> bool:
        """Whether ids and the number of tokens alone end it: no stop strings, no stopping criteria."""
        return not self._criteria and not (self._text is not None and self._text.has_stop)

    def ends_with(self, token_id: int) -> bool:
        """Whether a token ends it by its id."""
        return token_id in self._eos_ids or token_id in self._stop_ids

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
