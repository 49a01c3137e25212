"""Text from tokens, one by one, and the stop strings in it."""

import codecs
import copy
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are not (or not yet) UTF-8."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte-fallback token. A run of them is decoded as a whole, so its end can still change its beginning."""

_CHARACTER = 4
"""Most bytes of a character, and so most tokens that one can be spread over."""

_SLIDE = 8
"""Tokens after the anchor from which on they become the next one: each time takes a decode of its own."""

_MOST_UNFINISHED = 8 * _CHARACTER
"""Tokens of an undecodable run after which the window is cut."""


class TextStream:
    """Turns tokens into text one by one and watches for stop strings.

    The pieces of ``push`` and ``flush``, joined, are ``tokenizer.decode(token_ids, skip_special_tokens=...,
    clean_up_tokenization_spaces=False)``; transformers 5 ignores the clean-up for BPE tokenizers by default. Text is
    held back while later tokens can change it: an incomplete UTF-8 sequence, a run of byte-fallback tokens.

    Stop strings are searched in the text of the output, not of the prompt, including text that is held back except an
    incomplete character at its end. A stop string is found at the token that completes it, wherever in that token it
    ends. This is the meaning of ``stop_strings`` in ``generate``, except that skipped special tokens are not text here.

    Each token costs one decode of the few tokens since the last certain text and some before it. In a run of
    undecodable bytes this window is cut. A run of byte-fallback tokens is decoded once, at its end: until then its
    bytes are only searched for stop strings, one by one.

    ``stopped`` is the stop string that the output contains, the one that ends first; ``None`` until then.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        self.stopped: str | None = None
        self._tokenizer, self._backend = tokenizer, _backend_of(tokenizer)
        self._stop = tuple(stop)
        self._reach = max((len(text) for text in self._stop), default=1) - 1
        self._skip_special_tokens = skip_special_tokens
        self._special_ids = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._window: list[int] = []  # an anchor, whose text was given already, and the tokens after it
        self._anchor = 0  # number of tokens of the anchor
        self._given = 0  # characters of the window's text that were given already
        self._tail = ""  # the last characters that were given, as many as a stop string can span
        self._most = _MOST_UNFINISHED  # tokens of a window before it is cut
        self._bytes: _ByteRun | None = None  # the run of byte-fallback tokens at the window's end

    @property
    def has_stop(self) -> bool:
        """Whether there are stop strings, so that ``stopped`` may change with any token."""
        return bool(self._stop)

    def copy(self) -> "TextStream":
        """Another one that has come as far, and changes nothing of this one."""
        other = copy.copy(self)
        other._window, other._bytes = [*self._window], None if self._bytes is None else self._bytes.copy()
        return other

    def whole(self, token_ids: list[int]) -> str:
        """The text of a finished output, decoded at once."""
        return self._decode(token_ids)

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is certain now and was not before, often one word, sometimes none."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str) or self._is_skipped(token_id):
            return ""
        self._window.append(token_id)
        if (byte := BYTE_TOKEN.fullmatch(token)) and self._decode([token_id]) != token:
            self._push_byte(int(byte[1], 16))
            return ""
        self._bytes = None
        text = self._decode(self._window)
        self._find_stop(text)
        unfinished = text.endswith(REPLACEMENT)
        piece = self._give(text[: len(text) - unfinished])
        if not unfinished:
            if len(self._window) - self._anchor >= _SLIDE:
                self._slide()
            self._most = _MOST_UNFINISHED
        elif len(self._window) > self._most:
            self._cut(text)
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

    def _cut(self, text: str) -> None:
        """Drops the beginning of a window of undecodable bytes, where the rest is decoded alike without it.

        No character reaches from before the cut to the window's end, so that tokens to come change nothing there.
        """
        cut = len(self._window) - _CHARACTER
        before, anchor = self._decode(self._window[:cut]), self._window[cut - _CHARACTER : cut]
        rest = self._decode(anchor + self._window[cut:])
        if text == before + rest[len(self._decode(anchor)) :]:
            self._window, self._anchor, self._given = anchor + self._window[cut:], len(anchor), len(rest) - 1
            self._most = _MOST_UNFINISHED
        else:
            self._most = 2 * len(self._window)

    def _push_byte(self, byte: int) -> None:
        """Searches a run of byte-fallback tokens, which has text only where it ends with a whole character."""
        if not self._stop or self.stopped is not None:
            return
        self._bytes = self._bytes or _ByteRun(self._tail)
        if self._bytes.push(byte, self._reach) and self._bytes.tail.endswith(self._stop):
            self._find_stop(self._decode(self._window))

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
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens))
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What decodes for a tokenizer that changes nothing of how transformers does: its own checks take longer."""
    own, usual = type(tokenizer), PreTrainedTokenizerFast
    changed = own.decode is not usual.decode or own._decode is not usual._decode or "decode" in vars(tokenizer)
    return None if changed else tokenizer.backend_tokenizer


class _ByteRun:
    """A run of bytes: ``tail`` are its last characters, and those of the text before it."""

    def __init__(self, tail: str) -> None:
        self.tail = tail
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_text = True  # decoders write nothing but replacement characters for a run that is not

    def copy(self) -> "_ByteRun":
        """Another one that has come as far."""
        other = copy.copy(self)
        other._decoder = copy.copy(self._decoder)
        return other

    def push(self, byte: int, reach: int) -> bool:
        """Adds a byte; returns whether it completes a character. The tail keeps ``reach`` characters before that."""
        try:
            character = self._decoder.decode(bytes([byte])) if self._is_text else ""
        except UnicodeDecodeError:
            self._is_text, character = False, ""
        self.tail = (self.tail + character)[-reach - 1 :]
        return bool(character)
