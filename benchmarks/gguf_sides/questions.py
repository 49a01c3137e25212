"""What the sides are asked: chat prompts, a long prompt, windows of a text; all as token ids, the same for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

CHAT = (
    "Explain to a beginner how a hash table works, with an example.",
    "Write a Python function that merges two sorted lists, and explain each step.",
    "Describe a walk through a city in the rain, in three paragraphs.",
)
FIRST = "Why is the sky blue?"
"""The prompt of the commands whose first token is timed."""
PROMPT_TOKENS = WINDOW = 512
ROWS = (1, 2, 4, 8, 16)
ROWS_CONTEXT = 64
"""Cached tokens before the rows."""


@dataclass(frozen=True)
class Questions:
    """Prompts of a model.

    Attributes:
        chat: chat prompts.
        long: a prompt of ``PROMPT_TOKENS``.
        windows: successive windows of a text, without special tokens.
        eos_ids: tokens that end an output.
    """

    chat: list[list[int]]
    long: list[int]
    windows: list[list[int]]
    eos_ids: list[int]


def make_questions(path: Path, text: Path, tokens: int) -> Questions:
    """Tokenises by transformers, with the tokenizer of the file.

    Args:
        path: the GGUF file.
        text: a text file.
        tokens: of the text, in windows.

    Raises:
        ValueError: the text is too short.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    chat = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for each in CHAT
    ]
    ids: Sequence[int] = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    if len(ids) < max(tokens, PROMPT_TOKENS):
        raise ValueError(f"{text} has {len(ids)} tokens, fewer than {max(tokens, PROMPT_TOKENS)}; take a longer text")
    windows = [list(ids[start : start + WINDOW]) for start in range(0, tokens - WINDOW + 1, WINDOW)]
    return Questions(chat, list(ids[-PROMPT_TOKENS:]), windows, [tokenizer.eos_token_id])
