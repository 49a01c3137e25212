"""Chats as token ids of which only the chat template writes the control tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.control_tokens import ControlTokens
from selfspec.text_encoder import TextEncoder, template_of


class ChatEncoder(TextEncoder):
    """Encodes chats so that control tokens in the texts of messages are text, not the beginning of another message."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        super().__init__(tokenizer, vocab_size)
        self._control = ControlTokens(tokenizer, template_of(tokenizer))

    def encode_chat(self, messages: Sequence[Any], variables: Mapping[str, Any] | None = None) -> list[int]:
        """The token ids of messages with ``role`` and ``content``; ``variables`` are the template's."""
        hidden = [self._control.hide(each, special_alone=each["role"] == "assistant") for each in messages]
        text = self.render_chat(hidden, self._control.hide(dict(variables or {})))
        return self.check_ids(self._split(text, add_special_tokens=not self.starts_with_bos(text)))

    def words(self, text: str) -> list[int]:
        """The token ids of a text without control tokens, those that it spells included."""
        return self._split(self._control.hide(text))

    def _split(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a text in which control tokens are hidden that are text."""
        token_ids: list[int] = []
        for part, is_control in self._control.split(text):
            token_ids += self.tokens(part, add_special_tokens=add_special_tokens, split_special_tokens=is_control)
            add_special_tokens = False
        return token_ids
