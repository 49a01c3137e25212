"""What the sides are asked: chat prompts, a long prompt, windows of a text; all as token ids, the same for each."""

from __future__ import annotations

import json
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
_ACCOUNT = '''class Account:
    """Money of one person, in cents."""

    def __init__(self, owner: str, balance: int = 0) -> None:
        self.owner = owner
        self.balance = balance
        self.history: list[tuple[str, int]] = []

    def deposit(self, amount: int) -> None:
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount: int) -> None:
        if amount > self.balance:
            raise ValueError("there is not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))
'''
_MEETING = (
    "On Tuesday, 3 March, the board of the Lindhof cooperative met in the old dairy. Present were Anna Berg (chair), "
    "Jonas Reuter (treasurer), Mira Kowalski (secretary) and Tomas Lund. The treasurer reported an income of 48,200 "
    "euros and costs of 41,750 euros for the year. The board decided to buy a second delivery van for at most 12,000 "
    "euros and to repaint the shop in April. Mira Kowalski was asked to collect three offers by 20 March. The next "
    "meeting is on Tuesday, 7 April."
)
EDITS = (
    f"Rename the attribute balance to funds everywhere, and give back the whole file:\n\n{_ACCOUNT}",
    f"Add type-checked docstrings of one line to the methods, and give back the whole file:\n\n{_ACCOUNT}",
    "Give back as JSON, with the fields date, place, people (with name and role), income, costs, decisions and next "
    f"meeting, what this text says:\n\n{_MEETING}",
)
"""Code edits and an extraction: their answers repeat much of the prompt."""
TOOL = "Answer with a call of a tool, as JSON of this schema:"
TOOLS = (
    (
        "Two second class train tickets from Zurich to Milan on 3 March 2026, please.",
        "book_train_journey",
        {
            "departure_station": {"type": "string"},
            "arrival_station": {"type": "string"},
            "departure_date": {"type": "string"},
            "travel_class": {"enum": ["first_class", "second_class"]},
            "number_of_passengers": {"type": "integer"},
        },
    ),
    (
        "Put a meeting with Jonas about the delivery van into my calendar, next Tuesday from 10 to 11, in the dairy.",
        "create_calendar_event",
        {
            "title": {"type": "string"},
            "participants": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "weekday": {"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]},
            "start_time": {"type": "string"},
            "end_time": {"type": "string"},
            "location": {"type": "string"},
        },
    ),
    (
        "Find the function that parses dates in the folder src, and show me its first 40 lines.",
        "search_source_files",
        {
            "search_pattern": {"type": "string"},
            "folder": {"type": "string"},
            "is_case_sensitive": {"type": "boolean"},
            "most_lines": {"type": "integer"},
        },
    ),
)
"""Requests with the one tool that they need, and its arguments."""
FIRST = "Why is the sky blue?"
"""The prompt of the commands whose first token is timed."""
PROMPT_TOKENS = WINDOW = 512
TEXT_TOKENS = 4096
"""Of the text that is read and gone on with."""
ROWS = (1, 2, 4, 8, 16)
ROWS_CONTEXT = 64
"""Cached tokens before the rows."""


@dataclass(frozen=True)
class Questions:
    """Prompts of a model.

    Attributes:
        chat: chat prompts.
        edits: chat prompts whose answers repeat much of them.
        calls: chat prompts that are answered by a call of a tool, and the schema of that.
        long: a prompt of ``PROMPT_TOKENS``.
        text: one of ``TEXT_TOKENS``.
        windows: successive windows of a text, without special tokens.
        eos_ids: tokens that end an output.
    """

    chat: list[list[int]]
    edits: list[list[int]]
    calls: list[tuple[list[int], str]]
    long: list[int]
    text: list[int]
    windows: list[list[int]]
    eos_ids: list[int]


def call_schema(name: str, arguments: dict[str, Any]) -> str:
    """The JSON schema of a call of a tool, all of whose arguments are given."""
    given = {"type": "object", "properties": arguments, "required": [*arguments], "additionalProperties": False}
    call = {"name": {"const": name}, "arguments": given}
    return json.dumps({"type": "object", "properties": call, "required": [*call], "additionalProperties": False})


def ask(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """The token ids of questions, each as a user's first message."""
    chats = [[{"role": "user", "content": each}] for each in prompts]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in chats
    ]


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
    chat, edits = (ask(tokenizer, prompts) for prompts in (CHAT, EDITS))
    schemas = [call_schema(name, arguments) for _, name, arguments in TOOLS]
    tools = [f"{TOOL}\n{schema}\n\n{wish}" for schema, (wish, *_) in zip(schemas, TOOLS, strict=True)]
    calls = list(zip(ask(tokenizer, tools), schemas, strict=True))
    ids: Sequence[int] = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    if len(ids) < max(tokens, TEXT_TOKENS):
        raise ValueError(f"{text} has {len(ids)} tokens, fewer than {max(tokens, TEXT_TOKENS)}; take a longer text")
    windows = [list(ids[start : start + WINDOW]) for start in range(0, tokens - WINDOW + 1, WINDOW)]
    long, whole = (list(ids[-count:]) for count in (PROMPT_TOKENS, TEXT_TOKENS))
    return Questions(chat, edits, calls, long, whole, windows, [tokenizer.eos_token_id])
