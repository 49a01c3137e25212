"""The text of a token and its bytes, by which log-probabilities name it."""

from functools import cache, lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfspec.decoding.text import BYTE_TOKEN, REPLACEMENT


@lru_cache(2**16)
def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> tuple[str, bytes]:
    """A token's text, also of a special token, and its bytes, which can be a part of a character.

    Decoders drop the space at the start of a text, so the text is what the token adds after itself.
    """
    alone = _decode(tokenizer, token_id)
    if REPLACEMENT not in alone:
        text = _decode(tokenizer, token_id, token_id)[len(alone) :]
        return text, text.encode("utf-8", "replace")
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if byte := BYTE_TOKEN.fullmatch(token):
        return alone, bytes.fromhex(byte[1])
    known = _byte_of()
    if all(char in known for char in token):
        return alone, bytes(known[char] for char in token)
    return alone, alone.encode("utf-8", "replace")


def _decode(tokenizer: PreTrainedTokenizerBase, *token_ids: int) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


@cache
def _byte_of() -> dict[str, int]:
    """The bytes that the characters of byte-level tokens stand for."""
    return {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
