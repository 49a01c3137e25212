"""Measures a trained checkpoint on held-out text and writes its model card: ``python recipes/evaluate.py --help``."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer

from card import write_card
from data import Domain, load_domains
from export import read_checkpoint
from measure import Text, bits_per_byte, choose_skip_set, encode_text, exit_agreement, skip_agreement
from model import Llama
from sample import Writer

WINDOWS = (1024, 2048)
"""Window lengths in tokens, BOS included, for held-out documents; the loss is reported for both."""

CALIBRATION_WINDOW = 256

app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
@torch.no_grad()
def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder written by train.py; the card and the figures are written there.")
    ],
    gsm8k: Annotated[Path, typer.Option(help="Folder with gsm8k_train.jsonl and gsm8k_test.jsonl.")],
    books: Annotated[Path, typer.Option(help="Folder of novels, *.txt.")],
    agreement_tokens: Annotated[int, typer.Option(help="Held-out tokens per domain for the agreement tables.")] = 32768,
    calibration_tokens: Annotated[int, typer.Option(help="Training tokens for choosing a skip set.")] = 4096,
    samples: Annotated[int, typer.Option(min=1, help="Continuations per domain, of prompts and of held-out text.")] = 6,
    dtype: Annotated[str, typer.Option(help="Arithmetic: float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the calibration text.")] = 0,
) -> None:
    """Measure loss, agreement with half of the middle sublayers skipped, and early exits; write the model card."""
    weights, shape, tokenizer = read_checkpoint(checkpoint)
    precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    llama = Llama(shape, {name: [part.to(precision) for part in parts] for name, parts in weights.items()}, False)
    domains = load_domains(gsm8k, books)
    texts = {
        name: encode_text(tokenizer, domain.held_out, WINDOWS[0], agreement_tokens) for name, domain in domains.items()
    }
    writer = Writer(checkpoint)
    figures = {
        "dtype": dtype,
        "seed": seed,
        "parameters": sum(part.numel() for parts in weights.values() for part in parts),
        "middle_sublayers": len(shape.middle),
        "agreement_tokens": {name: text.tokens for name, text in texts.items()},
        "calibration_tokens": calibration_tokens,
        "samples": writer.samples(samples),
        "held_out_form": {name: writer.form(domain, samples) for name, domain in domains.items()},
        "held_out": {name: _loss(llama, tokenizer, domain) for name, domain in domains.items()},
        "exit_agreement": {name: _told(name, exit_agreement(llama, text)) for name, text in texts.items()},
        "skip_half": {
            name: _skip_half(llama, name, _calibration(tokenizer, domain, calibration_tokens, seed), texts)
            for name, domain in domains.items()
        },
    }
    (checkpoint / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n")
    write_card(checkpoint, json.loads((checkpoint / "training.json").read_text()), figures)


def _loss(llama: Llama, tokenizer: Tokenizer, domain: Domain) -> dict[str, Any]:
    windows = {window: encode_text(tokenizer, domain.held_out, window) for window in WINDOWS}
    figures = {
        "documents": len(domain.held_out),
        "tokens": windows[WINDOWS[0]].tokens,
        "bytes": windows[WINDOWS[0]].bytes,
        "bits_per_byte": {window: bits_per_byte(llama, text) for window, text in windows.items()},
    }
    return _told(domain.name, figures)


def _calibration(tokenizer: Tokenizer, domain: Domain, tokens: int, seed: int) -> Text:
    documents = random.Random(seed).sample(domain.train, len(domain.train))
    return encode_text(tokenizer, documents, CALIBRATION_WINDOW, tokens)


def _skip_half(llama: Llama, name: str, calibration: Text, texts: dict[str, Text]) -> dict[str, Any]:
    order = choose_skip_set(llama, calibration, len(llama.shape.middle) // 2)
    figures = {
        "skipped_sublayers": sorted(order),
        "chosen_in_order": order,
        "agreement": {other: skip_agreement(llama, text, set(order)) for other, text in texts.items()},
    }
    return _told(name, figures)


def _told(name: str, figures: dict[Any, Any]) -> dict[Any, Any]:
    typer.echo(f"{name}: {figures}")
    return figures


if __name__ == "__main__":
    app()
