"""Limits of a request: the model's context and the memory of the device."""

import torch

from selfspec.errors import ContextLengthError, OutOfMemoryError


def check_context(prompt_length: int, max_new_tokens: int, context_limit: int) -> None:
    """Refuses a request that could exceed the model's context, all in tokens."""
    if prompt_length + max_new_tokens > context_limit:
        room = context_limit - prompt_length
        remedy = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        raise ContextLengthError(
            f"a prompt of {prompt_length} tokens and {max_new_tokens} new tokens do not fit the model's context of "
            f"{context_limit}; {remedy}"
        )


def out_of_memory(prompt_length: int, max_new_tokens: int) -> OutOfMemoryError:
    """The error of a request that ran out of memory, which says what to reduce."""
    return OutOfMemoryError(
        f"out of memory with a prompt of {prompt_length} tokens and up to {max_new_tokens} new ones; "
        "reduce max_new_tokens, the prompt, or prefill_chunk, or load the model in bfloat16"
    )


_OUT_OF_MEMORY = "can't allocate memory", "not enough memory", "backend out of memory", "error: out of memory"
"""What errors of other classes say: of the host, of Metal, and of a driver."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return any(each in text for each in _OUT_OF_MEMORY)
