"""Incremental text and stop strings against decoding everything and searching it."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, StopStringCriteria

from selfspec.decoding.output import Output
from selfspec.decoding.text import REPLACEMENT, TextStream

LINES = [
    "The quick brown fox jumps over the lazy dog. Stop here, please!\n\n",
    "Ünïcödé, naïve café: 日本語のテキスト 🎉👩‍👩‍👧 done.\n",
    "def stop(self):\n    return self.stopped  # the end\n",
    "Don't stop ; the top stops the stopper . <end>",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
NAMES = ["byte-level", "byte-fallback", "metaspace"]


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen, Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and friends: the space belongs to the word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: characters beyond the vocabulary fall apart into byte tokens."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [line for line in LINES if line.isascii()],
        trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    vocab = dict.fromkeys([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *model["vocab"]])
    merges = [tuple(merge) for merge in model["merges"]]
    ids = {token: index for index, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    backend = {"byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace}[name]()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip)


def naive_stop(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: list[str]) -> tuple[int, str | None]:
    """How many tokens plain decoding would keep, and the stop string that ended it, by searching everything."""
    for count in range(1, len(ids) + 1):
        text = decode(tokenizer, ids[:count]).rstrip(REPLACEMENT)
        found = [(text.find(string) + len(string), index) for index, string in enumerate(stop) if string in text]
        if found:
            return count, stop[min(found)[1]]
    return len(ids), None


def our_stop(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: list[str]) -> tuple[int, str | None]:
    stream = TextStream(tokenizer, stop)
    for count, token_id in enumerate(ids, start=1):
        stream.push(token_id)
        if stream.stopped is not None:
            return count, stream.stopped
    return len(ids), None


@st.composite
def outputs(draw: st.DrawFn, name: str) -> list[int]:
    """Tokens of real text, of bytes and of nothing in particular, in any mixture."""
    tokenizer = tokenizer_of(name)
    size = len(tokenizer)
    text = st.sampled_from(LINES).map(lambda line: tokenizer.encode(line, add_special_tokens=False))
    part = st.tuples(text, st.integers(0, 30), st.integers(0, 30)).map(lambda cut: cut[0][cut[1] : cut[1] + cut[2]])
    noise = st.lists(st.integers(0, size + 1), max_size=6)
    lonely = st.just([tokenizer.convert_tokens_to_ids(token) for token in ("▁", "Ġ", " ")][:1])
    emoji = st.sampled_from(["🎉", "é", "日本", "👩‍👧"]).map(
        lambda line: tokenizer.encode(line, add_special_tokens=False)
    )
    pieces = draw(st.lists(st.one_of(part, noise, lonely, emoji), max_size=5))
    return [token_id for piece in pieces for token_id in piece if token_id is not None]


@pytest.mark.parametrize("skip", [True, False], ids=["skip", "keep"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_pieces_join_to_the_decoded_text(name: str, skip: bool, data: st.DataObject) -> None:
    ids = data.draw(outputs(name))
    stream = TextStream(tokenizer_of(name), skip_special_tokens=skip)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.flush() == decode(tokenizer_of(name), ids, skip)
    assert stream.flush() == ""


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stop_strings_are_found_where_a_search_of_everything_finds_them(name: str, data: st.DataObject) -> None:
    ids = data.draw(outputs(name))
    text = decode(tokenizer_of(name), ids).replace(REPLACEMENT, "")
    inside = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 9)).map(
        lambda cut: text[cut[0] :][: cut[1]]
    )
    elsewhere = st.sampled_from(["stop", "\n\n", " the", "🎉", "é", "never there", "p"])
    stop = data.draw(st.lists(st.one_of(inside.filter(bool) if text else elsewhere, elsewhere), max_size=3))
    assert our_stop(tokenizer_of(name), ids, stop) == naive_stop(tokenizer_of(name), ids, stop)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_copy_goes_on_alone(name: str, data: st.DataObject) -> None:
    ids = data.draw(outputs(name))
    cut, stop = data.draw(st.integers(0, len(ids))), data.draw(st.lists(st.sampled_from(["e", "🎉", "é", "\n"])))
    stream = TextStream(tokenizer_of(name), stop)
    before = [stream.push(token_id) for token_id in ids[:cut]]
    other = stream.copy()
    others = [*map(other.push, ids[cut:]), other.flush()]
    assert others == [*map(stream.push, ids[cut:]), stream.flush()]
    assert "".join(before + others) == decode(tokenizer_of(name), ids)
    assert other.stopped == stream.stopped


@pytest.mark.parametrize(
    "stop", [["stop"], ["\n\n"], ["quick brown"], ["🎉"], ["本"], ["e"], ["zebra", "lf.s"], ["ed  #"]]
)
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_generate_would_stop_at_the_same_token(name: str, stop: list[str]) -> None:
    """``StopStringCriteria`` is what ``generate(stop_strings=...)`` asks after every token."""
    if not hasattr(StopStringCriteria, "_token_to_bytes") and not "".join(stop).isascii():
        pytest.skip("this transformers does not match stop strings by bytes")
    tokenizer = tokenizer_of(name)
    criterion = StopStringCriteria(tokenizer, stop)
    for line in LINES:
        ids = tokenizer(line, add_special_tokens=False, return_tensors="pt").input_ids
        counts = range(1, ids.shape[1] + 1)
        theirs = next((count for count in counts if bool(criterion(ids[:, :count], None))), ids.shape[1])
        assert our_stop(tokenizer, ids[0].tolist(), stop)[0] == theirs


def test_incomplete_characters_are_held_back() -> None:
    tokenizer = tokenizer_of("byte-level")
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("a🎉b")[0][0]
    stream = TextStream(tokenizer)
    assert [stream.push(tokenizer.convert_tokens_to_ids(symbol)) for symbol in symbols] == ["a", "", "", "", "🎉", "b"]


def test_the_window_stays_small() -> None:
    """However long the output, a decode sees a few tokens."""
    tokenizer = tokenizer_of("byte-level")
    stream = TextStream(tokenizer, ["never there"])
    lengths = []
    for token_id in tokenizer.encode("".join(LINES) * 5 + "<s>" * 20, add_special_tokens=False):
        stream.push(token_id)
        lengths.append(len(stream._window))
    assert len(lengths) > 300
    assert max(lengths) < 20


def test_most_tokens_take_one_decode() -> None:
    tokenizer = tokenizer_of("byte-level")
    stream = TextStream(tokenizer)
    decodes, real = 0, stream._decode

    def counted(token_ids: list[int]) -> str:
        nonlocal decodes
        decodes += 1
        return real(token_ids)

    stream._decode = counted  # type: ignore[method-assign]
    ids = tokenizer.encode("".join(LINES) * 5, add_special_tokens=False)
    for token_id in ids:
        stream.push(token_id)
    assert decodes < 1.3 * len(ids)


def raw_bytes(name: str, data: bytes) -> list[int]:
    """A token for each byte."""
    tokenizer = tokenizer_of(name)
    if name == "byte-fallback":
        return [int(tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")) for byte in data]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 writes these as themselves
    others = [byte for byte in range(256) if byte not in shown]
    symbols = {byte: chr(byte) for byte in shown} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [int(tokenizer.convert_tokens_to_ids(symbols[byte])) for byte in data]


BYTES = st.one_of(
    st.binary(min_size=1, max_size=60),
    st.sampled_from([b"\x80", b"\xf0\x9f", b"\xe2\x82", b"\xff", b"\xf0\x9f\x8e\x89", b"a"]).map(
        lambda each: each * 40
    ),
)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(BYTES, min_size=1, max_size=4), stop=st.sampled_from([(), ("a\N{PARTY POPPER}",), ("aaa",)]))
def test_runs_of_bytes_give_the_decoded_text(name: str, parts: list[bytes], stop: tuple[str, ...]) -> None:
    ids = raw_bytes(name, b"".join(parts))
    stream = TextStream(tokenizer_of(name), stop)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.flush() == decode(tokenizer_of(name), ids)
    assert our_stop(tokenizer_of(name), ids, list(stop)) == naive_stop(tokenizer_of(name), ids, list(stop))


@pytest.mark.parametrize("stop", [(), ("never there",)])
@pytest.mark.parametrize("data", [b"\x80", b"\xf0\x9f", b"a", "é".encode()])
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_a_run_of_bytes_takes_time_as_long_as_it_is(name: str, data: bytes, stop: tuple[str, ...]) -> None:
    """All that is decoded, summed up, is a multiple of the run."""
    ids = raw_bytes(name, data * (4000 // len(data)))
    stream = TextStream(tokenizer_of(name), stop)
    decoded, real = 0, stream._decode

    def counted(token_ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return real(token_ids)

    stream._decode = counted  # type: ignore[method-assign]
    for token_id in ids:
        stream.push(token_id)
    stream.flush()
    assert decoded < 50 * len(ids)


def test_the_stop_string_that_ends_first_is_named() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("the stopper", add_special_tokens=False)
    assert our_stop(tokenizer, ids, ["stopper", "top", "stop"])[1] in {"top", "stop"}
    assert our_stop(tokenizer, ids, ["he stop", "the"])[1] == "the"


def test_text_after_the_stop_string_in_its_token_belongs_to_the_output() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode(" the", add_special_tokens=False)
    stream = TextStream(tokenizer, ["t"])
    assert len(ids) == 1
    assert stream.push(ids[0]) + stream.flush() == " the"
    assert stream.stopped == "t"


def test_spaces_are_as_they_were_written_in_the_whole_text_too() -> None:
    """transformers cleans them up for tokens of other kinds than BPE, where an old config asks for it."""
    scores = [(token, -1.0) for token in ("<unk>", "▁hello", "▁.", "▁you")]
    backend = Tokenizer(models.Unigram(scores, unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    output = Output(max_new_tokens=3, text=TextStream(tokenizer))
    for token_id in (1, 2, 3):
        output.append(token_id, "target", no_context)
    assert "".join(piece.text for piece in output.take_pieces()) == output.decode() == "hello . you"


def no_context() -> torch.Tensor:
    raise AssertionError("there are no stopping criteria")


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(data=st.data())
def test_pieces_of_an_output_join_to_its_text_whenever_they_are_taken(name: str, data: st.DataObject) -> None:
    tokenizer, ids = tokenizer_of(name), data.draw(outputs(name).filter(bool))
    taken_after = data.draw(st.sets(st.integers(0, len(ids) - 1)))
    stop = data.draw(st.sampled_from([(), ("\N{SNOWMAN}",)]))  # with stop strings every token is decoded at once
    output = Output(max_new_tokens=len(ids), text=TextStream(tokenizer, stop))
    pieces = []
    for index, token_id in enumerate(ids):
        assert output.append(token_id, "target", no_context) == (index == len(ids) - 1)
        pieces += output.take_pieces() if index in taken_after else []
    pieces += output.take_pieces()
    assert [piece.token_id for piece in pieces] == ids
    assert "".join(piece.text for piece in pieces) == decode(tokenizer, ids)
    assert output.take_pieces() == []


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer that decodes in a way of its own."""

    def _decode(self, *args: Any, **options: Any) -> str:
        return super()._decode(*args, **options).upper()


def test_a_tokenizer_that_decodes_in_its_own_way_does_so_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are not asked: what decodes for them takes half of the time."""
    usual = tokenizer_of("byte-level")
    own = Shouting(tokenizer_object=usual.backend_tokenizer)
    ids = usual.encode(LINES[0], add_special_tokens=False)
    stream = TextStream(own)
    assert "".join(map(stream.push, ids)) + stream.flush() == LINES[0].upper()
    monkeypatch.setattr("transformers.tokenization_utils_base.to_py_obj", None)
    stream = TextStream(usual)
    assert "".join(map(stream.push, ids)) + stream.flush() == LINES[0]
