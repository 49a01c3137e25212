"""Text between a beginning and an end, for models whose tokenizers have tokens for that (fill in the middle)."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

_STYLES = (
    # before the beginning, between beginning and end, after the end
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("[SUFFIX]", "[PREFIX]"),  # Codestral, without the third: before the end, between it and the beginning
)
_FILE_NAMES = ("<|file_sep|>", "<file_sep>", "<filename>")

Encode = Callable[[str], list[int]]


class FillTokens:
    """The tokens of a tokenizer between which code models read what is around a gap.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizer.get_vocab()
        known = next((style for style in _STYLES if vocabulary.keys() >= {*style}), ())
        self._style = [vocabulary[name] for name in known]
        self._file = next((vocabulary[name] for name in _FILE_NAMES if name in vocabulary), None)
        self._bos = tokenizer.bos_token_id if getattr(tokenizer, "add_bos_token", False) else None

    @property
    def can_fill(self) -> bool:
        """Whether the tokenizer has the tokens."""
        return bool(self._style)

    def encode(self, before: str, after: str, encode: Encode, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        """The token ids after which a model writes what is between two texts.

        ``files`` are names and texts that the model should know, where the tokenizer has a token for that; ``encode``
        gives the ids of a text without special tokens.
        """
        start = [] if self._bos is None else [self._bos]
        if self._file is not None:
            for name, text in files:
                start += [self._file, *encode(f"{name}\n{text}\n")]
            start += [self._file, *encode("\n")] if files else []
        assert self.can_fill, "the tokenizer has no tokens to fill with"
        texts = (before, after) if len(self._style) > 2 else (after, before)
        first, second, *last = self._style
        return [*start, first, *encode(texts[0]), second, *encode(texts[1]), *last]
