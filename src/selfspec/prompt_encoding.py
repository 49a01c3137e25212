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
            token_ids = self._encode_text(prompt)
        elif is_chat(prompt):
            token_ids = self._encode_chat(prompt)
        else:
            token_ids = as_ids(prompt)
        return self._check(token_ids)

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

    def _encode_chat(self, messages: Sequence[Any]) -> list[int]:
        tokenizer = self._require_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidPromptError("the tokenizer has no chat template; give a plain prompt")
        try:
            text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
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
