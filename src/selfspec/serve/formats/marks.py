"""Tokens of a tokenizer's own, such as ``<tool_call>``, as characters of a text that no other tokens can write."""

import json
import re

from transformers import PreTrainedTokenizerBase

_FIRST = 0xD800
_MOST = 0x800


class Marks:
    """Stands a lone surrogate, which no decoded text contains, for each added token that a format names.

    So a format is written once, with the names of tokens. Where the tokenizer has a token of a name, only that token is
    the mark, and a text that merely spells the name is none; where it has not, the spelled text is the mark.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._known = {token.content: (index, token.special) for index, token in tokenizer.added_tokens_decoder.items()}
        self._by_id: dict[int, str] = {}
        self._names: dict[str, str] = {}
        self._tokens = re.compile("|".join(re.escape(name) for name in sorted(self._known, key=len, reverse=True)))

    def __call__(self, text: str) -> str:
        """The text of a format with its marks."""
        return self._tokens.sub(lambda found: self._mark(found[0]), text) if self._known else text

    def has(self, name: str) -> bool:
        """Whether the tokenizer has a token of this name."""
        return name in self._known

    def of_token(self, token_id: int, text: str) -> str:
        """The text of a piece with its mark, if it ends with one."""
        mark = self._by_id.get(token_id)
        if mark is None:
            return text
        name = self._names[mark]
        if self._known[name][1]:  # texts leave special tokens out
            return text + mark
        return text.removesuffix(name) + mark if text.endswith(name) else text

    def plain(self, text: str) -> str:
        """A text as clients get it: marks are their tokens' text, and special ones none."""
        if not self._names or text.isascii():
            return text
        return "".join(self._plain(char) for char in text)

    def lark(self, text: str) -> str:
        """What matches exactly this text, in Lark's notation."""
        parts = re.split(f"([{chr(_FIRST)}-{chr(_FIRST + _MOST - 1)}])", text)
        return " ".join(
            f"<[{self._known[self._names[part]][0]}]>" if part in self._names else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def is_mark(self, text: str) -> bool:
        """Whether a text is a single mark."""
        return text in self._names

    def _mark(self, name: str) -> str:
        index = self._known[name][0]
        if index not in self._by_id:
            assert len(self._names) < _MOST, "more tokens than marks"
            mark = chr(_FIRST + len(self._names))
            self._by_id[index], self._names[mark] = mark, name
        return self._by_id[index]

    def _plain(self, char: str) -> str:
        name = self._names.get(char)
        if name is None:
            return char
        return "" if self._known[name][1] else name
