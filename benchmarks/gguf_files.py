"""Compares selfspec with llama.cpp on a GGUF file: ``python benchmarks/gguf_files.py --model FILE --text BOOK.txt``.

Each candidate is a process of its own with as many threads. They take turns, and each waits while another one works:
``auto`` and plain decoding of selfspec, and llama.cpp with its defaults; with ``--candidates``, plain decoding with
``--activations exact`` (``exact``), too, and llama.cpp with the prompt lookup of llama-cpp-python, for answers only.
What is measured (``--only`` takes some):

- ``bandwidth``: bytes a second at which memory is read;
- ``chat``: greedy answers to three chat prompts, tokens after the first ÷ seconds after the first;
- ``sampled``: the chat answers by the samplers of each with llama.cpp's defaults (temperature 0.8, ``top_k`` 40,
  ``top_p`` 0.95, ``min_p`` 0.05);
- ``edits``: the same of two code edits and an extraction, whose answers repeat much of the prompt;
- ``calls``: the same of three calls of tools, as JSON of a schema that the prompt has; each by its own grammar;
- ``rows``: forwards of 1 to 16 rows after 64 cached tokens, with the logits of every row; not of ``auto``;
- ``prompt``: a prompt of 512 tokens to its first token; not of ``auto``;
- ``long``: a text of 4,096 tokens to its first token, and the tokens that go on with it, after the first ÷ seconds;
- ``busy``: the chat answers beside a process that begins with them and computes all the time;
- ``memory``: resident memory in a fresh process, after load and at its peak, which a prompt of 512 tokens and 64 more
  tokens are part of; llama.cpp without torch, with 1,024 positions;
- ``first``: wall time of a command that loads the file and writes one token, which is in the page cache;
- ``perplexity``: of ``--tokens`` tokens of ``--text`` in windows of 512, each by itself, by the logits of all rows, and
  with ``--reference`` that of transformers' model of the dequantised float32 weights.

Prints the table. ``--out FILE`` writes all samples; ``--table FILE`` prints the table of such a file.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader

from gguf_sides.comparison import EXACT, LOOKUP, REFERENCE, Comparison
from gguf_sides.figures import AUTO, LLAMA, PLAIN, figures, perplexity, table
from gguf_sides.questions import WINDOW, make_questions
from selfspec.files import replace_file
from selfspec_lab.bench.llama_cpp import describe_build
from selfspec_lab.bench.stamp import make_stamp, parse_and_check

MEASUREMENTS = (
    "bandwidth",
    "chat",
    "sampled",
    "edits",
    "calls",
    "rows",
    "prompt",
    "long",
    "busy",
    "memory",
    "first",
    "perplexity",
)


def describe_file(path: Path) -> dict[str, Any]:
    """Name, bytes and types; ``step_bytes`` are the tensors that a step reads: all but a separate embedding."""
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    by_type: dict[str, int] = defaultdict(int)
    for tensor in tensors.values():
        by_type[tensor.tensor_type.name] += int(tensor.n_bytes)
    embedding = int(tensors["token_embd.weight"].n_bytes) if "output.weight" in tensors else 0
    return {
        "name": path.name,
        "bytes": path.stat().st_size,
        "bytes_by_type": dict(by_type),
        "step_bytes": sum(by_type.values()) - embedding,
    }


def parse_option(text: str) -> tuple[str, Any]:
    """An option of the engine, ``name=value``; numbers and truth values as in JSON."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"'{text}' is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]}; choose from {', '.join(known)}")
        return names

    return parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    candidates = (PLAIN, EXACT, AUTO, LLAMA, LOOKUP)
    parser.add_argument("--model", type=Path, help="the GGUF file")
    usual = [PLAIN, AUTO, LLAMA]
    parser.add_argument("--candidates", type=_listed(candidates), default=usual, metavar="A,B")
    parser.add_argument("--only", type=_listed(MEASUREMENTS), default=list(MEASUREMENTS), metavar="A,B")
    parser.add_argument("--text", type=Path, help="text whose tokens are the long prompt and the windows")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of the text for the perplexity")
    parser.add_argument("--reference", action="store_true", help="perplexity of the dequantised float32 model, too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--option",
        type=parse_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of selfspec's engine and command, as in weights=int8; repeatable",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this file, and measure nothing")
    options = parse_and_check(parser, arguments, lambda given: given.out is not None)
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return
    if options.model is None or options.text is None:
        parser.error("name the file by --model, and a text by --text")
    torch.set_num_threads(options.threads)
    comparison = Comparison(options, make_questions(options.model, options.text, options.tokens))
    comparison.measure_speed()
    if "memory" in options.only:
        comparison.measure_memory()
    if "first" in options.only:
        comparison.measure_first_token()
    if "perplexity" in options.only:
        comparison.measure_perplexity()
    result = report(options, comparison)
    print(table(result))
    if options.out:
        replace_file(options.out, (json.dumps(result, indent=1) + "\n").encode())


def report(options: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """All that was measured, ready for JSON."""
    found: dict[str, Any] = figures(comparison.samples)
    if comparison.windows:
        base = REFERENCE if REFERENCE in comparison.windows else LLAMA
        found["perplexity"] = perplexity(comparison.windows, WINDOW - 1, base)
    plain = comparison.token_ids.get(PLAIN)
    return {
        "file": describe_file(options.model),
        "candidates": options.candidates + [REFERENCE] * (REFERENCE in comparison.windows),
        "options": {
            name: value for name, value in vars(options).items() if name not in ("model", "text", "out", "table")
        },
        "text": options.text.name,
        **make_stamp(torch.device("cpu")),
        "llama_cpp": describe_build(),
        "figures": found,
        "same_tokens_as_plain": {name: ids == plain for name, ids in comparison.token_ids.items()},
        "samples": comparison.samples,
        "likelihoods": comparison.windows,
    }


if __name__ == "__main__":
    main()
