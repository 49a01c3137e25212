r"""The training text: three domains, their held-out splits, and rows of tokens drawn from them.

* ``math``: GSM8K problems, ``Question: ...\nAnswer: ...``; held out is the test file, never trained on.
* ``code``: the Python standard library of the running interpreter; held out are the files whose name hashes low.
* ``prose``: novels as plain text; held out is the last part of each book.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

MIXTURE = {"math": 0.40, "code": 0.35, "prose": 0.25}
"""Share of each domain in the training tokens."""

MATH_HEAVY = {"math": 0.50, "code": 0.28, "prose": 0.22}
"""Shares with more math, to learn the form of worked sums, which small models get wrong most visibly."""

MATH_LIGHT = {"math": 0.30, "code": 0.35, "prose": 0.35}
"""Shares with less math, for phases in which subsets learn to agree with the full model; sums are easy for that."""

MATH_LIGHTEST = {"math": 0.20, "code": 0.35, "prose": 0.45}
"""Shares for the last phases of early exits."""

CODE_LIGHT = {"math": 0.40, "code": 0.20, "prose": 0.40}
"""Shares for the last phases, which improve the form of the text."""

HELD_OUT_CODE = 32
"""One file in this many, by the hash of its name, is held out of the code domain."""

HELD_OUT_PROSE = 0.04
"""Share of each book, at its end, that is held out of the prose domain."""

_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "lib2to3", "encodings", "pydoc_data", "__pycache__", "ensurepip"}
_LARGEST_CODE_FILE = 200_000
_PIECE_CHARACTERS = (1_500, 10_000)


@dataclass(frozen=True, slots=True)
class Domain:
    """Documents of one domain.

    Attributes:
        name: ``math``, ``code`` or ``prose``.
        train: texts that may be trained on.
        held_out: texts that may only be evaluated on.
    """

    name: str
    train: list[str]
    held_out: list[str]


def format_problem(question: str, answer: str) -> str:
    """Format one GSM8K problem as the model reads and writes it."""
    return f"Question: {question.strip()}\nAnswer: {answer.strip()}"


def load_math(gsm8k: Path) -> Domain:
    """Read GSM8K.

    Args:
        gsm8k: the folder that holds ``gsm8k_train.jsonl`` and ``gsm8k_test.jsonl``, or the train file itself.
    """
    train = gsm8k / "gsm8k_train.jsonl" if gsm8k.is_dir() else gsm8k
    return Domain("math", _read_problems(train), _read_problems(train.with_name(train.name.replace("train", "test"))))


def load_code(stdlib: Path | None = None) -> Domain:
    """Read the Python standard library without tests and generated tables.

    Args:
        stdlib: folder of a standard library; None for that of the running interpreter.
    """
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(name.parts) or path.stat().st_size > _LARGEST_CODE_FILE:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n").strip()
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        if text:
            (held_out if int.from_bytes(digest[:4], "big") % HELD_OUT_CODE == 0 else train).append(text)
    return Domain("code", train, held_out)


def load_prose(books: Path) -> Domain:
    """Read every ``*.txt`` of a folder, cut at blank lines into documents of a few thousand characters."""
    paths = sorted(books.glob("*.txt"))
    if not paths:
        raise FileNotFoundError(f"no *.txt in {books}; give --books a folder of plain-text novels")
    train, held_out = [], []
    for path in paths:
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n").strip()
        cut = text.find("\n\n", int(len(text) * (1 - HELD_OUT_PROSE)))
        train += _cut_into_pieces(text[:cut], random.Random(path.name))
        held_out += _cut_into_pieces(text[cut:], random.Random(path.name))
    return Domain("prose", train, held_out)


def load_domains(gsm8k: Path, books: Path, stdlib: Path | None = None) -> dict[str, Domain]:
    """Read the three domains, by name, in the order of ``MIXTURE``."""
    domains = (load_math(gsm8k), load_code(stdlib), load_prose(books))
    return {domain.name: domain for domain in domains}


def encode_stream(tokenizer: Tokenizer, texts: list[str], seed: int) -> torch.Tensor:
    """Shuffle documents and join them as ``BOS text EOS BOS text EOS ...``.

    Returns:
        token ids, int64 ``[tokens]``.
    """
    texts = list(texts)
    random.Random(seed).shuffle(texts)
    bos, eos = tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("<|eos|>")
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [bos, *encoding.ids, eos]
    return torch.tensor(ids)


class Mixer:
    """Draws training rows from the domains in given shares; any step's rows depend on the seed only.

    Every domain is one stream of tokens, cut into rows that start at a new random offset in every epoch, so that the
    cuts fall elsewhere each time. Every row starts with BOS, as every prompt does.
    """

    def __init__(self, streams: dict[str, torch.Tensor], bos: int, seed: int) -> None:
        """Keep the streams (int64 ``[tokens]`` each, by domain name)."""
        self._streams = streams
        self._bos = bos
        self.seed = seed

    def batch(
        self, step: int, rows: int, length: int, mixture: Mapping[str, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the rows of one step.

        Args:
            step: number of the step, counted over the whole training run.
            rows: rows in the batch.
            length: tokens per row.
            mixture: share of the rows, on average, that each domain gives.

        Returns:
            (inputs, targets), int64 ``[rows, length]`` each; targets are the inputs one token later.
        """
        chooser = random.Random(f"{self.seed} {step}")
        drawn = []
        for name in chooser.choices(list(mixture), weights=list(mixture.values()), k=rows):
            stream = self._streams[name]
            start = chooser.randrange(len(stream) - length)
            drawn.append(torch.cat([torch.tensor([self._bos]), stream[start : start + length]]))
        tokens = torch.stack(drawn)
        return tokens[:, :-1], tokens[:, 1:]


def _read_problems(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give --gsm8k a folder with gsm8k_train.jsonl and gsm8k_test.jsonl")
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [format_problem(problem["question"], problem["answer"]) for problem in problems]


def _cut_into_pieces(text: str, chooser: random.Random) -> list[str]:
    pieces, start = [], 0
    while start < len(text):
        cut = text.find("\n\n", start + chooser.randint(*_PIECE_CHARACTERS))
        end = cut if cut >= 0 else len(text)
        pieces.append(text[start:end].strip())
        start = end
    return [piece for piece in pieces if piece]
