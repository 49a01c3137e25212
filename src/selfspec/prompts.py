"""Prompts: their forms, how a list of prompts is distinguished from one prompt, and their token ids."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TypeGuard

import torch

from selfspec.errors import InvalidPromptError
from selfspec.text_encoder import TextEncoder

Prompt = str | Sequence[int] | torch.Tensor | Sequence[Mapping[str, str]]
"""Text, token ids (a sequence, or a tensor ``[length]`` or ``[1, length]``), or chat messages."""

Prompts = (
    list[str]
    | tuple[str, ...]
    | Sequence[Sequence[int]]
    | Sequence[torch.Tensor]
    | Sequence[Sequence[Mapping[str, str]]]
)
"""A list or tuple of prompts, all of one form: texts, sequences of token ids, or chats."""

_ROWS_REMEDY = (
    ", whose rows may hold padding; give Engine.generate a list of rows without padding, or give the tensor and its "
    "attention mask to model.generate with custom_generate"
)


def as_batch(prompt: Prompt | Prompts) -> list[Prompt] | None:
    """The prompts of a list of prompts in order; ``None`` if ``prompt`` is one prompt.

    The first element decides: a list of numbers is one prompt of token ids and a list of messages is one chat, but a
    list of texts, sequences or tensors is several prompts.

    Raises:
        InvalidPromptError: the list is empty, or its elements have different forms.
    """
    if not isinstance(prompt, (list, tuple)):
        return None
    if not prompt:
        raise InvalidPromptError(
            "the list is empty: it has neither prompts nor token ids; an empty text, '', starts from the BOS token, "
            "if there is one"
        )
    if not isinstance(prompt[0], (str, Sequence, torch.Tensor)):
        return None
    wanted = _form(prompt[0])
    for index, element in enumerate(prompt):
        if (form := _form(element)) != wanted:
            raise InvalidPromptError(
                f"prompt {index} of the list is {form}, but prompt 0 is {wanted}; give prompts of one form"
            )
    return list(prompt)


def is_chat(prompt: object) -> TypeGuard[Sequence[Mapping[str, str]]]:
    """Whether a prompt is a list of chat messages; one that has a message first and another thing later is refused."""
    if not (isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping)):
        return False
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise InvalidPromptError(
                f"message {index} of the chat is {type(message).__name__}, not a dict with 'role' and 'content'"
            )
    return True


def as_ids(prompt: object) -> list[int]:
    """The token ids of a prompt that is neither text nor chat, but one sequence of whole numbers."""
    if isinstance(prompt, torch.Tensor):
        if prompt.dim() not in (1, 2) or (prompt.dim() == 2 and prompt.shape[0] != 1) or prompt.is_floating_point():
            raise InvalidPromptError(
                f"a prompt is one sequence of token ids, not a {prompt.dtype} tensor of shape {list(prompt.shape)}"
                + (_ROWS_REMEDY if prompt.dim() == 2 else "")
            )
        prompt = prompt.flatten().tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidPromptError(
            f"a prompt is text, a sequence of token ids, or a list of chat messages, not {type(prompt).__name__}"
        )
    if set(map(type, prompt)) == {int}:  # the usual case, without a loop in Python
        return list(prompt)
    for index, token_id in enumerate(prompt):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            several = isinstance(token_id, (str, Sequence, torch.Tensor))
            raise InvalidPromptError(
                f"a prompt is a sequence of token ids, but {token_id!r} at index {index} is not a token id"
                + ("; give a list of prompts to Engine.generate" if several else "")
            )
    return [int(token_id) for token_id in prompt]


def _form(prompt: object) -> str:
    """The form of a prompt, for messages."""
    if isinstance(prompt, str):
        return "text"
    if is_chat(prompt):
        return "a chat"
    if isinstance(prompt, (Sequence, torch.Tensor)):
        return "a sequence of token ids"
    return f"{type(prompt).__name__} {prompt!r:.60}"


class PromptEncoder(TextEncoder):
    """Encodes prompts of any form; without a tokenizer it takes token ids only."""

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt of any form."""
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        if is_chat(prompt):
            return self.encode_chat(prompt)
        return self.check_ids(as_ids(prompt))
