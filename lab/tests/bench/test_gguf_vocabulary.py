"""Vocabularies that are written to GGUF files are read back as the same tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.models import build
from selfspec import load_model
from selfspec.errors import UnsupportedModelError
from selfspec.loading.gguf_splits import SPLITTINGS, Splitting, find_splitting
from selfspec_lab.bench.gguf_vocabulary import name_splitting
from selfspec_lab.bench.gguf_writer import write_gguf

SPECIAL = ("<|begin|>", "<|end|>")


def byte_level(splitting: Splitting) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:124]
    assert {"t", "s"} <= set(alphabet)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet, "ts"])}
    model: Any = models.BPE(vocab=vocabulary, merges=[("t", "s")], ignore_merges=splitting.ignore_merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = splitting.pre_tokenizer()  # type: ignore[assignment]
    backend.normalizer = splitting.normalizer()  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return backend


@pytest.mark.parametrize("splitting", [each for each, _ in SPLITTINGS], ids=[names[0] for _, names in SPLITTINGS])
def test_rules_get_a_name_that_means_them(splitting: Splitting) -> None:
    found = find_splitting(name_splitting(byte_level(splitting)))
    assert (found.patterns, found.ignore_merges, found.composes) == (
        splitting.patterns,
        splitting.ignore_merges,
        splitting.composes,
    )


def test_a_vocabulary_is_read_back(tmp_path: Path) -> None:
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=byte_level(find_splitting("qwen2")),
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        chat_template="{{ messages[0]['content'] }}",
    )
    write_gguf(build("qwen2"), tmp_path / "model.gguf", tokenizer, "Q8_0")
    _, found = load_model(tmp_path / "model.gguf", device="cpu")
    text = f"It's 12{SPECIAL[1]}\n its x"
    assert "ts" in tokenizer.tokenize(text)
    assert found(text).input_ids == tokenizer(text).input_ids
    assert (found.bos_token, found.eos_token) == SPECIAL
    assert found.chat_template == tokenizer.chat_template
    assert len(found) == build("qwen2").config.vocab_size == len(tokenizer) + 1


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    backend = byte_level(find_splitting("gpt-2"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="cannot be written to a GGUF file"):
        name_splitting(backend)
    assert json.loads(backend.to_str())["model"]["type"] == "BPE"
