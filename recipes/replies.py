"""Texts for ``selfspec train early-exit``: what a chat model itself replies to requests made of the training data.

``python recipes/replies.py --model smollm2 --gsm8k DATA --books DATA/books --out replies.txt``
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from data import load_math, load_prose
from selfspec import Engine

REQUESTS = (
    "Continue this story:\n\n{}",
    "Summarize the following text.\n\n{}",
    "Who and what is this passage about?\n\n{}",
    "Translate into German:\n\n{}",
    "Explain this to a child:\n\n{}",
    "Rewrite this in plain modern English:\n\n{}",
)
"""What is asked about a passage of a novel."""

_PASSAGE = 400
"""Characters of a passage."""


def requests(gsm8k: Path, books: Path, count: int, seed: int) -> list[str]:
    """As many problems of the train file as requests about passages of the novels, held-out parts left out."""
    chooser = random.Random(seed)
    problems = [problem.split("\nAnswer:")[0].removeprefix("Question: ") for problem in load_math(gsm8k).train]
    passages = [piece[:_PASSAGE].strip() for piece in load_prose(books).train]
    asked = [chooser.choice(REQUESTS).format(passage) for passage in chooser.sample(passages, count // 2)]
    mixed = chooser.sample(problems, count - count // 2) + asked
    chooser.shuffle(mixed)
    return mixed


def main(
    gsm8k: Annotated[Path, typer.Option(help="Folder with gsm8k_train.jsonl and gsm8k_test.jsonl.")],
    books: Annotated[Path, typer.Option(help="Folder of novels, *.txt.")],
    out: Annotated[Path, typer.Option(help="Text file to write.")],
    model: Annotated[str, typer.Option(help="A chat model.")] = "smollm2",
    count: Annotated[int, typer.Option(help="Requests.")] = 768,
    tokens: Annotated[int, typer.Option(help="Longest reply.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the replies.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of requests and replies.")] = 0,
) -> None:
    """Write requests and replies in the model's chat form, one after the other."""
    engine = Engine.from_pretrained(model, method="autoregressive", max_batch=32)
    prompts = [
        engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
        )
        for request in requests(gsm8k, books, count, seed)
    ]
    with out.open("w", encoding="utf-8") as file:
        for first in range(0, len(prompts), 32):
            some = prompts[first : first + 32]
            replies = engine.generate(some, max_new_tokens=tokens, temperature=temperature, seed=seed + first)
            for prompt, reply in zip(some, replies, strict=True):
                file.write(prompt + engine.tokenizer.decode(reply.token_ids) + "\n")
            file.flush()


if __name__ == "__main__":
    typer.run(main)
