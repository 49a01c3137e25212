"""GGUF files that hold a small trained vocabulary and no weights."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"
CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the other fox doesn't; they're 12 or 345 of 6789.\n"
    "def run(value):\n    return value + 1\n\n\nHTTPServer camelCase grüße über Größe 世界 你好世界 123 1234 12345\n"
    "123\n123\nthe then there these those this that with within without   and   more   spaces\n"
)
Token = tuple[str, int]
"""Text and type."""


@cache
def _trained(byte_level: bool, entries: int = 420) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens and merges of a vocabulary trained on the text above."""
    tokenizer: Any = Tokenizer(models.BPE())
    alphabet = [SPACE]
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=entries, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([line for line in CORPUS.splitlines(keepends=True) for _ in range(3)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(tokens), tuple((left, right) for left, right in model["merges"])


def _write(path: Path, architecture: str, tokens: list[Token], more: dict[str, Any]) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    return writer


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_byte_level(
    path: Path, pre: str | None = "gpt-2", added: tuple[Token, ...] = (), architecture: str = "llama", **more: Any
) -> Path:
    """A byte-level vocabulary; ``added`` come last, ``more`` are names of ``GGUFWriter.add_...`` and their values."""
    tokens, merges = _trained(byte_level=True)
    all_tokens = [("<|endoftext|>", CONTROL), *((token, NORMAL) for token in tokens), *added]
    special = {"bos_token_id": 0, "eos_token_id": 0}
    writer = _write(path, architecture, all_tokens, special | more)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    _close(writer)
    return path


def save_sentencepiece(path: Path, added: tuple[Token, ...] = (), architecture: str = "llama", **more: Any) -> Path:
    """A SentencePiece vocabulary with bytes; merges are in the order of the scores."""
    tokens, merges = _trained(byte_level=False)
    merged = list(dict.fromkeys(left + right for left, right in merges))
    pieces = [*merged, *(token for token in tokens if token not in set(merged))]
    head = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((f"<0x{i:02X}>", BYTE) for i in range(256))]
    all_tokens = [*head, *((piece, NORMAL) for piece in pieces), *added]
    scores = [0.0] * len(head) + [-float(i) for i in range(len(pieces))] + [0.0] * len(added)
    special = {"unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    writer = _write(path, architecture, all_tokens, {"token_scores": scores} | special | more)
    writer.add_tokenizer_model("llama")
    _close(writer)
    return path


def save_tokens(path: Path, architecture: str, tokens: list[Token], **more: Any) -> Path:
    """A SentencePiece vocabulary of these tokens alone."""
    writer = _write(path, architecture, tokens, {"token_scores": [0.0] * len(tokens), **more})
    writer.add_tokenizer_model("llama")
    _close(writer)
    return path


def save_gemma4(path: Path, added: tuple[Token, ...] = (), **more: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of Gemma 4; returns its tokens, but for the added ones, and its merges."""
    tokens, merges = _trained(byte_level=False)
    head = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", CONTROL), ("<mask>", CONTROL)]
    known = [*head, *((f"<0x{i:02X}>", BYTE) for i in range(256)), *((token, NORMAL) for token in tokens)]
    all_tokens = [*known, *added]
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "unk_token_id": 3, "add_bos_token": True}
    scores = [-1000.0] * len(all_tokens)
    writer = _write(path, "gemma4", all_tokens, {"token_scores": scores, "add_space_prefix": False} | special | more)
    writer.add_tokenizer_model("gemma4")
    writer.add_token_merges([" ".join(merge) for merge in merges])
    _close(writer)
    return {token: i for i, (token, _) in enumerate(known)}, list(merges)
