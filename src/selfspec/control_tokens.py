"""Control tokens that users write, such as ``<|im_start|>``: they are text, and never begin another message."""

import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

_CONTROL = re.compile(r"<[|｜].+[|｜]>")
"""Names that only control tokens have."""


class ControlTokens:
    """Keeps the control tokens of a tokenizer, in texts that go through a chat template, from being control tokens.

    They are its special tokens, and of its other added ones those that the chat template writes, or that are named like
    control tokens: many models have ``<tool_call>`` and ``<|fim_middle|>`` among them. Others, such as runs of spaces,
    are words.

    ``hide`` puts a random mark after the first character of each. ``split`` finds the marks in what the template wrote.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "") -> None:
        added = [each for each in tokenizer.added_tokens_decoder.values() if each.content]
        special = {each.content for each in added if each.special}
        # `split_special_tokens` is about special tokens alone: others are read wherever a text spells them, so they are
        # encoded in two parts. One whose second part is or has such a token would gain nothing by that.
        self._cut = {
            each.content
            for each in added
            if each.content not in special
            and (_CONTROL.fullmatch(each.content) or (each.content in template and _is_tag(each.content)))
            and not any(other.content in each.content[1:] for other in added)
        }
        self._mark = f"\ue000{secrets.token_hex(8)}"
        self._special, self._all = _one_of(special), _one_of(special | self._cut)
        self._hidden = _one_of(map(self._put_mark, special | self._cut))

    def hide(self, value: Any, *, special_alone: bool = False) -> Any:
        """A JSON value with the mark in the control tokens of its texts, names of fields included.

        ``special_alone`` is for what the model wrote itself: templates look for its tags in there.
        """
        if isinstance(value, str):
            tokens = self._special if special_alone else self._all
            return tokens.sub(lambda found: self._put_mark(found[0]), value)
        if isinstance(value, dict):
            return {
                self.hide(name, special_alone=special_alone): self.hide(each, special_alone=special_alone)
                for name, each in value.items()
            }
        return [self.hide(each, special_alone=special_alone) for each in value] if isinstance(value, list) else value

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a text, without marks, and whether a part is of a control token, to be read as text."""
        end = 0
        for found in self._hidden.finditer(text):
            if found.start() > end:
                yield text[end : found.start()], False
            token, end = found[0].replace(self._mark, ""), found.end()
            for part in (token[:1], token[1:]) if token in self._cut else (token,):
                yield part, True
        if end < len(text):
            yield text[end:], False

    def _put_mark(self, token: str) -> str:
        return token[:1] + self._mark + token[1:]


def _is_tag(name: str) -> bool:
    """Whether a token that a template writes is a tag, not a word or whitespace that texts have, too."""
    return len(name) > 2 and (name[0], name[-1]) in (("<", ">"), ("[", "]"), ("◁", "▷"))


def _one_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches one of the names, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
