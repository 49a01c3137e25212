"""Suites in files, and a tokenizer for them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from selfspec_lab.bench.suites import Question, Suite, read_suite

BEGIN = 7
"""Stands for a BOS token."""


def encode(text: str) -> list[int]:
    """One token per byte, after the token that begins every text."""
    return [BEGIN, *(100 + byte for byte in text.encode())]


def decode(question: Question) -> str:
    assert question.token_ids is not None
    assert question.token_ids[0] == BEGIN
    return bytes(token - 100 for token in question.token_ids[1:]).decode()


def load(spec: str, context: int = 16, **options: Any) -> Suite:
    return read_suite(spec, **options).load(encode, context)


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
    return path


def keys(suite: Suite) -> list[str]:
    return [question.key for question in suite.questions]


def by_category(suite: Suite) -> dict[str, int]:
    return dict(Counter(question.category for question in suite.questions))


def spec_bench_entry(number: int, category: str = "writing") -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": [f"Write {number}.", "Shorter."]}
