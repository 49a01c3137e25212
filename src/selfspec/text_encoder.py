"""From texts and chats to token ids. Imports no torch, so that a small process can do it."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidPromptError, TokenizerMismatchError


class TextEncoder:
    """Encodes texts and chats with a tokenizer.

    A tokenizer that has ids beyond the model's ``vocab_size`` is refused. Tokens that were added to it may be beyond,
    as that of pictures is in Gemma 3's models of text: then prompts with them are refused.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        ids = set() if tokenizer is None else {*tokenizer.get_vocab().values()} - tokenizer.added_tokens_decoder.keys()
        largest = max(ids, default=-1)
        if largest >= vocab_size:
            raise TokenizerMismatchError(
                f"the tokenizer's largest id is {largest}, but the model has {vocab_size} embeddings; "
                "load the tokenizer that belongs to this model"
            )

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; the tokenizer may add special tokens such as BOS."""
        return self.check_ids(self.tokens(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        """The token ids of a chat."""
        text = self.render_chat(messages)
        return self.check_ids(self.tokens(text, add_special_tokens=not self.starts_with_bos(text)))

    def render_chat(self, messages: Sequence[Any], variables: Mapping[str, Any] | None = None) -> str:
        """The text of a chat, as the template writes it; ``variables`` are its own, as ``add_generation_prompt``."""
        tokenizer = self._require_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidPromptError("the tokenizer has no chat template; give a plain prompt")
        given = {"add_generation_prompt": True, **(variables or {})}
        try:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **given))
        except Exception as error:  # templates raise whatever they like
            raise InvalidPromptError(f"the chat template refused the messages: {error}") from error

    def starts_with_bos(self, text: str) -> bool:
        """Whether the text begins with the BOS token, so that none is to be added."""
        bos = self._require_tokenizer().bos_token
        return bool(bos) and text.startswith(bos)

    def tokens(self, text: str, **options: bool) -> list[int]:
        """The token ids of a piece of text, with options of the tokenizer's ``encode``; none of an empty one."""
        tokenizer = self._require_tokenizer()
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidPromptError(
                f"the prompt is not valid text: character {error.start} is a lone surrogate, {text[error.start]!r}; "
                "decode the bytes that it came from as what they are"
            ) from error
        return list(tokenizer.encode(text, **options))

    def check_ids(self, token_ids: list[int]) -> list[int]:
        """The token ids, or BOS where there are none; refuses those outside the vocabulary."""
        if not token_ids:
            bos = getattr(self._tokenizer, "bos_token_id", None)
            if bos is None:
                raise InvalidPromptError("the prompt is empty and there is no BOS token to start from; give some text")
            token_ids = [bos]
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidPromptError(
                    f"token id {token_id} of the prompt is outside the model's vocabulary of {self._vocab_size}"
                )
        return token_ids

    def _require_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise InvalidPromptError("text needs a tokenizer; give the engine one, or give token ids")
        return self._tokenizer


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template of a tokenizer, of several the one with tools; empty where there is none."""
    given = getattr(tokenizer, "chat_template", None) or ""
    return given if isinstance(given, str) else str(given.get("tool_use", given.get("default", "")))
