"""The vocabulary of a GGUF file, from a tokenizer of transformers."""

import json
from typing import Any

from selfspec.loading import name_splitting


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
