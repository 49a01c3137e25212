"""The tokens that begin, end and fill a text, from the header of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "<eos>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Special tokens that end a text or a turn. Files name one end of a text, but chat models end turns by others, too."""

_CONTROL_ENDS = frozenset({"</s>"})
"""Ends where they are control tokens; vocabularies of Gemma have such a tag of HTML among those that a user defined."""

_MESSAGE_END = "<|end|>"
_CHANNEL_ENDS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""What ends a text where a turn has several messages (gpt-oss, Solar Open), each of which ``<|end|>`` closes."""

_OWN_ENDS = {"gemma4": frozenset({"<|tool_response>"})}
"""Further ones, by the kind of tokenizer: Gemma 4 ends a turn that calls a tool by what begins the tool's answer."""

_CONTROL = 3
_SPECIAL_TYPES = (_CONTROL, 4)
"""The types of tokens that are never cut into pieces: control tokens, and those that a user defined."""

_SENTENCEPIECE_END = 2
"""The end of a text in vocabularies of SentencePiece that do not name it."""


def read_special_tokens(metadata: Mapping[str, Any], entries: int) -> dict[str, Any]:
    """The ids of a config: ``bos_token_id``, ``eos_token_id`` (a list if there are several) and ``pad_token_id``.

    Args:
        metadata: the keys of the file's header.
        entries: size of the model's vocabulary.
    """
    named = {name: _token(metadata, name, entries) for name in ("bos", "eos", "eot", "eom", "padding")}
    known, others = _known_ends(metadata, entries)
    ends = [named["eos"], named["eot"], named["eom"], *known]
    if named["eos"] is None and metadata.get("tokenizer.ggml.model") == "llama" and entries > _SENTENCEPIECE_END:
        ends.append(_SENTENCEPIECE_END)
    distinct = list(dict.fromkeys(each for each in ends if each is not None and each not in others))
    return {
        "bos_token_id": named["bos"],
        "eos_token_id": distinct[0] if len(distinct) == 1 else distinct or None,
        "pad_token_id": named["padding"],
    }


def _token(metadata: Mapping[str, Any], name: str, entries: int) -> int | None:
    """A token's id; ``None`` if there is none or, as some files say it, if it is no token of the model."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int and 0 <= value < entries else None


def _known_ends(metadata: Mapping[str, Any], entries: int) -> tuple[list[int], list[int]]:
    """The tokens that end a text by what they are, and those that end none though a file may name them."""
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, np.ndarray):
        return [], []
    types = types[: min(len(tokens), entries)]
    special = {tokens[place]: place for place in np.flatnonzero(np.isin(types, _SPECIAL_TYPES)).tolist()}
    ends = _ENDS | _OWN_ENDS.get(str(metadata.get("tokenizer.ggml.model")), frozenset())
    ends |= {token for token in _CONTROL_ENDS & special.keys() if types[special[token]] == _CONTROL}
    if pairs := [pair for pair in _CHANNEL_ENDS if pair <= special.keys()]:
        ends = ends.union(*pairs) - {_MESSAGE_END}
    others = [special[_MESSAGE_END]] if pairs and _MESSAGE_END in special else []
    return [place for token, place in special.items() if token in ends], others
