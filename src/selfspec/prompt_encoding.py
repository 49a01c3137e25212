"""From a prompt in any of its forms to token ids that fit the model."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidPromptError, TokenizerMismatchError
from selfspec.prompt_forms import Prompt, as_ids, is_chat


class PromptEncoder:
    """Encodes prompts with a tokenizer, or takes token ids.

    Args:
        tokenizer: of the model; ``None`` takes token ids only.
        vocab_size: number of token ids that the model knows.

    Raises:
        TokenizerMismatchError: the tokenizer has ids that the model has no embedding for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        largest = -1 if tokenizer is None else max(tokenizer.get_vocab().values(), default=-1)
        if largest >= vocab_size:
            raise TokenizerMismatchError(
                f"the tokenizer's largest id is {largest}, but the model has {vocab_size} embeddings; "
                "load the tokenizer that belongs to this model"
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt.

        Args:
            prompt: text, token ids, or chat messages (through the tokenizer's chat template).

        Raises:
            InvalidPromptError: the prompt is empty without a BOS token, out of vocabulary, or not one sequence.
        """
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        if is_chat(prompt):
            return self.encode_chat(prompt)
        return self._check(as_ids(prompt))

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
            text: the text.
            add_special_tokens: let the tokenizer add what it puts around a text, such as BOS.

        Raises:
            InvalidPromptError: it is empty without a BOS token, or no valid text.
        """
        return self._check(self._encode_text(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, messages: Sequence[Any], **variables: Any) -> list[int]:
        """The token ids of a chat.

        Args:
            messages: with ``role`` and ``content``.
            **variables: of the chat template, such as ``tools`` and ``add_generation_prompt``.

        Raises:
            InvalidPromptError: there is no chat template, or it refuses the messages.
        """
        return self._check(self._encode_chat(messages, **variables))

    def _encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._require_tokenizer()
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidPromptError(
                f"the prompt is not valid text: character {error.start} is a lone surrogate, {text[error.start]!r}; "
                "decode the bytes that it came from as what they are"
            ) from error
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _encode_chat(self, messages: Sequence[Any], **variables: Any) -> list[int]:
        tokenizer = self._require_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidPromptError("the tokenizer has no chat template; give a plain prompt")
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, **{"add_generation_prompt": True, **variables}
            )
        except Exception as error:  # templates raise whatever they like
            raise InvalidPromptError(f"the chat template refused the messages: {error}") from error
        starts_with_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        return self._encode_text(text, add_special_tokens=not starts_with_bos)

    def _check(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            bos = getattr(self._tokenizer, "bos_token_id", None)
            if bos is None:
                raise InvalidPromptError("the prompt is empty and there is no BOS token to start from; give some text")
            return [bos]
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidPromptError(
                    f"token id {token_id} of the prompt is outside the model's vocabulary of {self._vocab_size}"
                )
        return token_ids

    def _require_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise InvalidPromptError("text needs a tokenizer; give the engine one, or give token ids")
        return self._tokenizer
