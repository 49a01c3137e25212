"""The text of a token and its bytes, with tokenizers of every kind."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from helpers.checkpoints import EOS, make_tokenizer
from selfspec.decoding.text import REPLACEMENT
from selfspec.serve.token_text import token_text


def byte_fallback() -> PreTrainedTokenizerBase:
    """As Llama 2."""
    names = ["<unk>", "\u2581the", "the", "\u2581", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>"]
    backend = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize(
    ("name", "text", "data"),
    [
        ("<unk>", "<unk>", b"<unk>"),
        ("\u2581the", " the", b" the"),
        ("the", "the", b"the"),
        ("\u2581", " ", b" "),
        ("<0x0A>", "\n", b"\n"),
        ("<0xE2>", REPLACEMENT, b"\xe2"),
        ("<0xAC>", REPLACEMENT, b"\xac"),
    ],
)
def test_a_token_keeps_its_space_and_its_byte(name: str, text: str, data: bytes) -> None:
    tokenizer = byte_fallback()
    assert token_text(tokenizer, int(tokenizer.convert_tokens_to_ids(name))) == (text, data)


def test_parts_of_a_character_have_the_bytes_that_they_are() -> None:
    tokenizer = make_tokenizer(300)
    found = [token_text(tokenizer, token_id) for token_id in tokenizer.encode(" \N{EURO SIGN}")]
    assert found == [(" ", b" "), *((REPLACEMENT, bytes([byte])) for byte in "\N{EURO SIGN}".encode())]
    assert token_text(tokenizer, 0) == (EOS, EOS.encode())
