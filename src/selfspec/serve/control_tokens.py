"""Control tokens that users write, such as ``<|im_start|>``: they are text, and never begin another message."""

import re
import secrets
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase


class ControlTokens:
    """Keeps the special tokens of a tokenizer, in texts that go through a chat template, from being control tokens.

    ``hide`` puts a mark that nobody can guess after the first character of each. ``split`` finds the marks in what the
    template wrote.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokens = {each.content for each in tokenizer.added_tokens_decoder.values() if each.special and each.content}
        self._mark = f"\ue000{secrets.token_hex(8)}"
        longest_first = sorted(tokens, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._hidden = re.compile(f"({'|'.join(re.escape(self._put_mark(each)) for each in longest_first) or '(?!)'})")

    def hide(self, value: Any) -> Any:
        """A JSON value with the mark in the control tokens of its texts, names of fields included."""
        if isinstance(value, str):
            return self._tokens.sub(lambda found: self._put_mark(found[0]), value)
        if isinstance(value, dict):
            return {self.hide(name): self.hide(each) for name, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list) else value

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a text, without marks, and whether a part is a control token to be read as text."""
        for index, part in enumerate(self._hidden.split(text)):
            if part:
                yield (part.replace(self._mark, ""), True) if index % 2 else (part, False)

    def _put_mark(self, token: str) -> str:
        return token[:1] + self._mark + token[1:]
