"""The vocabulary of a GGUF file, from a tokenizer of transformers."""

import json
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from selfspec.errors import UnsupportedModelError
from selfspec.loading import SPLITTINGS

_SAMPLE = (
    "It's 12345 tokens,\tfooBar HTMLPage x_1 /usr/bin... we'll  see:\n\n  "
    "cafe\u0301 \u0915\u093f \u4f60\u597d\u4e16\u754c!? a\r\n\u0130\u01c5 -- 7\n    x  8"
)
"""A text that no two rules of the table split alike."""


def add_vocabulary(writer: Any, tokenizer: Any, entries: int, kinds: Any) -> None:
    """Adds tokens, merges, special tokens and the chat template to the header of a file.

    Args:
        writer: of the package ``gguf``.
        tokenizer: a byte-level one.
        entries: size of the model's vocabulary; ids without a token get a placeholder.
        kinds: ``gguf.TokenType``.

    Raises:
        UnsupportedModelError: the tokenizer is not byte-level, or its rules have no name.
    """
    backend = tokenizer.backend_tokenizer
    pre = name_splitting(backend)
    model = json.loads(backend.to_str())["model"]
    tokens = {index: token for token, index in model["vocab"].items()}
    types = dict.fromkeys(tokens, kinds.NORMAL)
    for index, added in tokenizer.added_tokens_decoder.items():
        tokens[index] = added.content
        types[index] = kinds.CONTROL if added.special else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(entries)])
    writer.add_token_types([types.get(index, kinds.UNUSED) for index in range(entries)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(tokenizer("x").input_ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def name_splitting(backend: Tokenizer) -> str:
    """The name of the rules by which a byte-level tokenizer splits text, for a file of its own.

    Contractions in capital letters are not looked at: tokenizers differ in them that files do not tell apart.

    Raises:
        UnsupportedModelError: no name is known for its rules, or it is not byte-level.
    """
    model = json.loads(backend.to_str())["model"]
    if model["type"] == "BPE" and not model.get("byte_fallback") and backend.pre_tokenizer is not None:
        words = _words_of(backend.pre_tokenizer, backend.normalizer)
        for splitting, names in reversed(SPLITTINGS):
            alike = splitting.ignore_merges == bool(model.get("ignore_merges"))
            if alike and _words_of(splitting.pre_tokenizer(), splitting.normalizer()) == words:
                return names[0]
    raise UnsupportedModelError(
        "this tokenizer cannot be written to a GGUF file: it is not byte-level, or splits text by rules for which GGUF "
        "has no name"
    )


def _words_of(splits: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None) -> list[str]:
    text = _SAMPLE if normalizer is None else normalizer.normalize_str(_SAMPLE)
    return [word for word, _ in splits.pre_tokenize_str(text)]
