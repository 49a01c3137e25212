"""Tokenizers of GGUF files: as transformers reads them where it is right, by the models' own rules where it is not."""

import os
import random
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, GemmaTokenizer
from transformers.integrations import gguf as transformers_gguf

from helpers import raw_gguf as raw
from helpers.gguf_vocabularies import (
    BYTE,
    CONTROL,
    CORPUS,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    save_byte_level,
    save_gemma4,
    save_sentencepiece,
    save_tokens,
)
from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.gguf_ends import read_special_tokens
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_splits import find_splitting
from selfspec.loading.gguf_tokenizer import read_tokenizer

REAL = os.environ.get("SELFSPEC_TEST_GGUF", "")
"""A model's file, if there is one."""

TEMPLATE = "{{ bos_token }}{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}<|end|>"
ADDED = (("<|user|>", CONTROL), ("<|end|>", CONTROL), ("<think>", USER_DEFINED))
TEXTS = (
    CORPUS,
    "",
    " ",
    "  two spaces, then text ",
    "line\n\n\n  next\r\n\tlast\t\n",
    "I'm, WE'LL, It'S 1234567 3.14 v1.2-rc3 ٣٤٥ ½²",
    "<|user|>the <think> fox</think><|end|>",
    "<|endoftext|>the<s> fox</s> <unk>",
    "naïve Ǆ ǅ ª 世界123中文 こんにちは 한국어 🌍👩‍👩‍👧 العربية हिन्दी",
    "\u00a0\u3000\u2003em\u200bzero\x00\x7f",
    "camelCase HTTPServer2 foo_bar(**kwargs)//x != y;",
)


def random_texts(count: int = 150) -> list[str]:
    generator = random.Random(0)
    letters = "abcXYZ 0189 \n\t\r'.,!?-_/()[]{}<>|@#äößé你好世界こは한국🌍\u00a0\u3000ǅٱ१"
    return ["".join(generator.choices(letters, k=generator.randint(1, 40))) for _ in range(count)]


def read(path: Path) -> Any:
    with GgufFile.open(path) as file:
        return read_tokenizer(file)


compares = pytest.mark.skipif(
    not hasattr(transformers_gguf, "convert_gguf_tokenizer"),
    reason="the reader of older versions of transformers has other faults",
)


def check_as_transformers_reads(path: Path, texts: Sequence[str] = TEXTS) -> None:
    """Compares token ids, decoded texts, special tokens and template."""
    found: Any = read(path)
    expected: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in map(composed, (*texts, *random_texts())):
        ids = found.encode(text)
        assert ids == expected.encode(text), text
        assert found.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False)
        for skips in (True, False):
            assert found.decode(ids, skip_special_tokens=skips) == expected.decode(ids, skip_special_tokens=skips)
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template"):
        assert getattr(found, name) == getattr(expected, name), name
    assert len(found) == len(expected)


def composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@compares
@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "deepseek-r1-qwen", "dbrx", "gpt-4o", "llama4"])
def test_byte_level_vocabularies_are_read_as_transformers_reads_them(pre: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"chat_template": TEMPLATE, "pad_token_id": 0, "add_bos_token": True}
    check_as_transformers_reads(save_byte_level(tmp_path / "model.gguf", pre, ADDED, **more))


@compares
def test_sentencepiece_vocabularies_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    check_as_transformers_reads(save_sentencepiece(tmp_path / "model.gguf", ADDED, chat_template=TEMPLATE))


@compares
@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_is_read_as_transformers_reads_it(architecture: str, tmp_path: Path) -> None:
    names = ("<pad>", "<bos>", "<eos>", "<mask>")  # without them, transformers makes the vocabulary larger
    spaces = (("  ", USER_DEFINED), ("\n\n", USER_DEFINED))
    added = (*ADDED, *((name, CONTROL) for name in names), *spaces)
    check_as_transformers_reads(save_sentencepiece(tmp_path / "model.gguf", added, architecture))


def test_gemma4_is_as_transformers_has_it(tmp_path: Path) -> None:
    added = (("<turn|>", CONTROL), ("<|tool_response>", USER_DEFINED), ("<think>", USER_DEFINED))
    vocabulary, merges = save_gemma4(tmp_path / "m.gguf", added)
    found, expected = read(tmp_path / "m.gguf"), GemmaTokenizer(vocabulary, merges)
    expected.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in added])
    for text in (*TEXTS, *random_texts(), "<turn|>\n<|tool_response>the  fox<think>"):
        assert found.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False), text
        assert found.encode(text)[0] == found.bos_token_id == 2
        assert found.decode(found.encode(text)) == expected.decode(found.encode(text))
    with GgufFile.open(tmp_path / "m.gguf") as file:
        ends = read_special_tokens(file.metadata, len(found))["eos_token_id"]
    assert [found.convert_ids_to_tokens(end) for end in ends] == ["<eos>", "<turn|>", "<|tool_response>"]


def test_gemma4_without_merges_is_refused(tmp_path: Path) -> None:
    save_gemma4(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes().replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.xerges")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match="it has no merges"):
        read(tmp_path / "m.gguf")


@compares
def test_phi3_is_read_as_transformers_reads_it_but_for_spaces_after_special_tokens(tmp_path: Path) -> None:
    texts = [text for text in TEXTS if "</s> " not in text]
    check_as_transformers_reads(save_sentencepiece(tmp_path / "plain.gguf", (), "phi3"), texts)
    tokenizer = read(save_sentencepiece(tmp_path / "model.gguf", ADDED, "phi3"))
    assert tokenizer.encode("<|user|>\nthe<|end|> \n<|user|>the") == tokenizer.encode("<|user|>the<|end|><|user|>the")
    assert tokenizer.encode("<s>\nthe") != tokenizer.encode("<s>the")


@compares
@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="SELFSPEC_TEST_GGUF does not name a GGUF file")
def test_a_real_file_is_read_as_transformers_reads_it() -> None:
    if GgufFile.open(REAL).metadata["tokenizer.ggml.pre"] != "qwen2":
        pytest.skip("transformers may be wrong about this vocabulary; it is right about Qwen2.5")
    check_as_transformers_reads(Path(REAL))


def test_the_file_is_not_read_again_nor_the_gguf_package_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_byte_level(tmp_path / "model.gguf", "qwen2", ADDED)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with GgufFile.open(path) as file:
        path.unlink()
        tokenizer = read_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


def test_a_saved_tokenizer_loads_as_the_same(tmp_path: Path) -> None:
    tokenizer = read(save_byte_level(tmp_path / "m.gguf", "smollm", ADDED, chat_template=TEMPLATE, add_bos_token=True))
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.chat_template == TEMPLATE
    messages = [{"role": "user", "content": "the fox"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids == loaded.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(ids) == "<|endoftext|><|user|>the fox<|end|>"


SPLITS = {
    "gpt-2": ("I'm a  cat, 1234!\n\n  x", ["I", "'m", " a", " ", " cat", ",", " 1234", "!", "\n\n ", " x"]),
    "smollm": ("at 12, 3", ["at", " ", "1", "2", ",", " ", "3"]),
    "starcoder": ("x=10", ["x", "=", "1", "0"]),
    "refact": ("v10", ["v", "1", "0"]),
    "llama-bpe": ("WE'LL (12345)\n\n x", ["WE", "'LL", " (", "123", "45", ")\n\n", " x"]),
    "dbrx": ("a12345", ["a", "123", "45"]),
    "glm4": ("a12345", ["a", "123", "45"]),
    "qwen2": ("it'S 12\n\n  x", ["it", "'S", " ", "1", "2", "\n\n", " ", " x"]),
    "stablelm2": ("a12", ["a", "1", "2"]),
    "tekken": ("HTTPServer getName 12 /\n", ["HTTPServer", " get", "Name", " ", "1", "2", " /\n"]),
    "gpt-4o": ("getName'S 1234/\n", ["get", "Name'S", " ", "123", "4", "/\n"]),
    "deepseek-coder": ("\na 12,你好x", ["\n", "a", " ", "1", "2", ",", "你好", "x"]),
    "joyai-llm": ("it's 1234,\n你好x", ["it", "'s", " ", "123", "4", ",\n", "你好", "x"]),
    "granite-docling": ("I'm 1234!\n\n  x", ["I", "'m", " 1234", "!", "\n\n ", " x"]),
    "minicpm5": ("IT'S  12345 (x)\n b", ["IT", "'S", "  ", "123", "45", " (", "x", ")\n", " b"]),
    "deepseek-v3": ("it's 1234,\n你好x (ab)\n", ["it", "'s", " ", "123", "4", ",\n", "你好", "x", " (", "ab", ")\n"]),
    "falcon": ("I'm a=b 12345?!", ["I", "'", "m", " a", "=", "b", " ", "123", "45", "?!"]),
    "bloom": ("the end, (12|x)\n y", ["the", " end", ", (", "12", "|", "x", ")\n", " y"]),
    "deepseek-llm": ("\nab 12,!你好", ["\n", "ab", " ", "1", "2", ",!", "你好"]),
    "youtu": ("你好。getName'S 12", ["你好", "。", "get", "Name'S", " ", "1", "2"]),
    "falcon-h1": ("WE'LL (12345)", ["WE", "'LL", " (", "123", "45", ")"]),
    "minimax-m2": ("getName'S 1234/\n", ["get", "Name'S", " ", "123", "4", "/\n"]),
    "cohere2moe": ("getName 1234567/\n", ["get", "Name", " ", "1", "234", "567", "/\n"]),
    "afmoe": ("it's 1234,\n你好x12 (ab)", ["it", "'s", " ", "1", "234", ",\n", "你好", "x", "12", " (", "ab", ")"]),
    "laguna": ("see:\n\n ab 12", ["see", ":", "\n\n", " ab", " ", "1", "2"]),
    "bailingmoe2": ("it'S\n\n12", ["it", "'S", "\n\n", "1", "2"]),
    "exaone-moe": ("a bc 12/\n\n", ["a bc", " ", "1", "2", "/\n", "\n"]),
    "jais-2": ("a    b 1234", ["a", "  ", " ", " b", " ", "123", "4"]),
    "seed-coder": ("a,\n12", ["a", ",", "\n", "1", "2"]),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_words_are_split_as_the_model_learned_them(pre: str) -> None:
    text, words = SPLITS[pre]
    splitter = find_splitting(pre).pre_tokenizer()
    assert [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)] == words


def test_digits_are_tokens_of_their_own_where_the_model_has_it_so(tmp_path: Path) -> None:
    """transformers splits them as GPT-2 does, into ``123``."""
    apart, together = (read(save_byte_level(tmp_path / f"{pre}.gguf", pre)) for pre in ("smollm", "gpt-2"))
    assert apart.convert_ids_to_tokens(apart.encode("123")) == ["1", "2", "3"]
    assert together.convert_ids_to_tokens(together.encode("123")) == ["123"]


@pytest.mark.parametrize(
    ("pre", "expected"), [("llama-bpe", ["xqz"]), ("tekken", ["xqz"]), ("minicpm5", ["xqz"]), ("dbrx", ["x", "q", "z"])]
)
def test_a_word_that_no_merges_lead_to_is_a_token_in_some_vocabularies(
    pre: str, expected: list[str], tmp_path: Path
) -> None:
    tokenizer = read(save_byte_level(tmp_path / "m.gguf", pre, (("xqz", NORMAL),), add_bos_token=False))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("xqz")) == expected


@pytest.mark.parametrize(
    ("pre", "adds"),
    [("llama-bpe", True), ("tekken", True), ("smaug-bpe", False), ("minicpm5", False), ("qwen2", False)],
)
def test_the_first_token_where_the_file_leaves_it_open(pre: str, adds: bool, tmp_path: Path) -> None:
    assert (read(save_byte_level(tmp_path / "open.gguf", pre)).encode("a")[0] == 0) is adds
    for said in (True, False):
        path = save_byte_level(tmp_path / "said.gguf", pre, add_bos_token=said)
        assert (read(path).encode("a")[0] == 0) is said


def test_an_end_of_sequence_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = save_sentencepiece(tmp_path / "m.gguf", add_bos_token=False, add_eos_token=True)
    assert read(path).encode("the")[-1] == 2


@pytest.mark.parametrize("text", ["e\u0301", "o\u0308 fu\u0308r"])
def test_qwen_composes_characters(text: str, tmp_path: Path) -> None:
    qwen, other = (read(save_byte_level(tmp_path / f"{pre}.gguf", pre)) for pre in ("qwen2", "llama-bpe"))
    assert qwen.encode(text) == qwen.encode(composed(text))
    assert other.encode(text) != other.encode(composed(text))


def test_special_tokens_beyond_ascii_stay_whole(tmp_path: Path) -> None:
    """As DeepSeek's are, also in its distilled Qwen and Llama models."""
    begin, user = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"
    added = ((begin, CONTROL), (user, CONTROL), ("<think> tag", USER_DEFINED))
    path = save_byte_level(tmp_path / "m.gguf", "deepseek-r1-qwen", added)
    with GgufFile.open(path) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        tokenizer: Any = read_tokenizer(file)
    assert len(tokenizer) == len(tokens)
    ids = tokenizer.encode(f"{begin}{user}the<think> tag")
    assert [tokens[i] for i in ids] == [begin, user, "the", "<think> tag"]
    assert tokenizer.decode(ids) == f"{begin}{user}the<think> tag"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<think> tag"


def test_a_vocabulary_without_a_space_prefix(tmp_path: Path) -> None:
    """transformers passes over the flag."""
    with_prefix = read(save_sentencepiece(tmp_path / "with.gguf"))
    without = read(save_sentencepiece(tmp_path / "without.gguf", add_space_prefix=False))
    assert with_prefix.convert_ids_to_tokens(with_prefix.encode("the"))[1] == f"{SPACE}the"
    assert without.convert_ids_to_tokens(without.encode("the"))[1] == "the"
    assert without.encode(" the") == with_prefix.encode("the")
    for tokenizer, text in ((with_prefix, "the"), (without, "the"), (without, " the")):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_characters_beyond_the_vocabulary_are_bytes(tmp_path: Path) -> None:
    tokenizer = read(save_sentencepiece(tmp_path / "m.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("🌍"))[2:] == ["<0xF0>", "<0x9F>", "<0x8C>", "<0x8D>"]
    assert tokenizer.decode(tokenizer.encode("🌍"), skip_special_tokens=True) == "🌍"


def test_sentencepiece_has_special_tokens_where_the_file_names_none(tmp_path: Path) -> None:
    tokens = b"".join(raw.string(token) for token in ("<unk>", "<s>", "</s>", "a"))
    scores = bytes(16)
    keys = [
        raw.key("tokenizer.ggml.model", raw.STRING, "llama"),
        raw.array("tokenizer.ggml.tokens", raw.STRING, tokens, 4),
        raw.array("tokenizer.ggml.scores", raw.FLOAT32, scores, 4),
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.gguf(keys))
    tokenizer = read(path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert ends(GgufFile.open(path)) == {2}
    assert tokenizer.encode("ba") == [1, 0, 3]  # what neither tokens nor bytes stand for is not left out


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_that_does_not_say_how_to_split_is_read_with_a_warning(
    pre: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = read(save_byte_level(tmp_path / "m.gguf", pre))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("123")) == ["123"]
    assert "does not say how" in caplog.text


def ends(file: GgufFile) -> set[int]:
    """The tokens that end an answer."""
    found: Any = read_special_tokens(file.metadata, len(file.metadata["tokenizer.ggml.tokens"]))["eos_token_id"]
    return set(found) if isinstance(found, list) else {found}


def test_every_token_that_ends_an_answer_is_named(tmp_path: Path) -> None:
    first = len(GgufFile.open(save_byte_level(tmp_path / "m.gguf")).metadata["tokenizer.ggml.tokens"])
    added = (("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<stop>", CONTROL), ("<more>", CONTROL))
    more = {"eos_token_id": first + 1, "eot_token_id": first + 2, "eom_token_id": first + 3}
    with GgufFile.open(save_byte_level(tmp_path / "all.gguf", "qwen2", added, **more)) as file:
        assert ends(file) == {0, first + 1, first + 2, first + 3}
    with GgufFile.open(save_byte_level(tmp_path / "eos.gguf", "qwen2", added, eos_token_id=first + 2)) as file:
        assert ends(file) == {0, first + 1, first + 2}
    with GgufFile.open(save_byte_level(tmp_path / "text.gguf", "qwen2", (("<|im_end|>", NORMAL),))) as file:
        assert ends(file) == {0}


HARMONY = ("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>")


@pytest.mark.parametrize("pair", HARMONY, ids=["gpt-oss", "solar"])
def test_what_closes_a_message_ends_no_turn_of_several(pair: tuple[str, str], tmp_path: Path) -> None:
    first = len(GgufFile.open(save_byte_level(tmp_path / "m.gguf")).metadata["tokenizer.ggml.tokens"])
    added = tuple((token, CONTROL) for token in ("<|end|>", *pair))
    more = {"eos_token_id": first + 1, "eot_token_id": first}
    with GgufFile.open(save_byte_level(tmp_path / "both.gguf", "gpt-4o", added, **more)) as file:
        assert ends(file) == {0, first + 1, first + 2}
    texts = (*added[:2], (pair[1], NORMAL))
    with GgufFile.open(save_byte_level(tmp_path / "one.gguf", "gpt-4o", texts, **more)) as file:
        assert ends(file) == {0, first, first + 1}


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_tag_of_gemma_ends_no_text_but_its_end_does(architecture: str, tmp_path: Path) -> None:
    """Files of chat models name the end of a turn alone."""
    tokens = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<end_of_turn>", CONTROL)]
    tokens += [("</s>", USER_DEFINED), ("a", NORMAL)]
    path = save_tokens(tmp_path / "m.gguf", architecture, tokens, eos_token_id=3, bos_token_id=2, pad_token_id=0)
    with GgufFile.open(path) as file:
        assert ends(file) == {1, 3}


def test_a_control_token_of_the_same_name_ends_a_text(tmp_path: Path) -> None:
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|im_end|>", CONTROL)]
    with GgufFile.open(save_tokens(tmp_path / "m.gguf", "llama", tokens, eos_token_id=3)) as file:
        assert ends(file) == {2, 3}


def tokenizer_keys(**replaced: bytes | None) -> list[bytes]:
    """The keys of a byte-level tokenizer of three tokens; ``None`` leaves one out."""
    prefix = "tokenizer.ggml."
    tokens = [raw.string(token) for token in ("a", "b", "ab")]
    keys: dict[str, bytes | None] = {
        "model": raw.key(f"{prefix}model", raw.STRING, "gpt2"),
        "pre": raw.key(f"{prefix}pre", raw.STRING, "gpt-2"),
        "tokens": raw.array(f"{prefix}tokens", raw.STRING, b"".join(tokens), 3),
        "token_type": raw.array(f"{prefix}token_type", raw.UINT32, b"\1\0\0\0" * 3, 3),
        "merges": raw.array(f"{prefix}merges", raw.STRING, raw.string("a b"), 1),
        "eos_token_id": raw.key(f"{prefix}eos_token_id", raw.UINT32, 2),
    }
    return [key for key in (keys | replaced).values() if key is not None]


def named(name: str, kind: int, value: Any) -> bytes:
    return raw.key(f"tokenizer.ggml.{name}", kind, value)


def strings(name: str, *texts: str) -> bytes:
    return raw.array(f"tokenizer.ggml.{name}", raw.STRING, b"".join(map(raw.string, texts)), len(texts))


DAMAGED = {
    "no model": (tokenizer_keys(model=None), "holds no tokenizer"),
    "none": (tokenizer_keys(model=named("model", raw.STRING, "none")), "holds no tokenizer"),
    "no tokens": (tokenizer_keys(tokens=None), "holds no tokenizer"),
    "empty": (tokenizer_keys(tokens=strings("tokens")), "tokens is not a list of texts"),
    "numbers": (tokenizer_keys(tokens=named("tokens", raw.UINT32, 7)), "tokens is not a list of texts"),
    "twice": (tokenizer_keys(tokens=strings("tokens", "a", "b", "a")), "a token twice"),
    "types": (tokenizer_keys(token_type=raw.array("tokenizer.ggml.token_type", raw.UINT8, b"\1", 1)), "token_type"),
    "no merges": (tokenizer_keys(merges=None), "no merges"),
    "merge of one": (tokenizer_keys(merges=strings("merges", "ab")), "not of two tokens"),
    "merge of others": (tokenizer_keys(merges=strings("merges", "a c")), "damaged .*out of vocabulary"),
    "end": (tokenizer_keys(eos_token_id=named("eos_token_id", raw.UINT32, 3)), "eos_token_id is '3', .* 3 tokens"),
    "end a text": (tokenizer_keys(eos_token_id=named("eos_token_id", raw.STRING, "ab")), "eos_token_id is 'ab'"),
    "model a number": (tokenizer_keys(model=named("model", raw.UINT32, 1)), "model is not a text"),
    "flag": (tokenizer_keys(flag=named("add_bos_token", raw.UINT32, 1)), "add_bos_token is neither true nor false"),
    "template": (tokenizer_keys(t=raw.key("tokenizer.chat_template", raw.UINT32, 1)), "chat template is not a text"),
    "no scores": (tokenizer_keys(model=named("model", raw.STRING, "llama"), merges=None), "neither merges nor scores"),
}


@pytest.mark.parametrize(("keys", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_tokenizer_is_refused_in_one_line(keys: list[bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.gguf(keys))
    with pytest.raises(ModelLoadError, match=message) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", "plamo2"])
def test_other_kinds_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.gguf(tokenizer_keys(model=named("model", raw.STRING, kind))))
    with pytest.raises(UnsupportedModelError, match=f"kind '{kind}'"):
        read(path)


def test_long_names_are_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for name in ("model", "pre"):
        path.write_bytes(raw.gguf(tokenizer_keys(**{name: named(name, raw.STRING, "a\n" * 999)})))
        with pytest.raises(UnsupportedModelError) as refused:
            read(path)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 300 + len(str(path))


def test_unknown_splitting_rules_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'viking'"):
        read(save_byte_level(tmp_path / "m.gguf", "viking"))


def test_bytes_changed_at_random_give_a_tokenizer_or_an_error(tmp_path: Path) -> None:
    generator, outcomes = random.Random(0), set()
    for save in (save_byte_level, save_sentencepiece):
        content = save(tmp_path / "m.gguf", added=(*ADDED, ("odd", BYTE))).read_bytes()
        for _ in range(150):
            changed = bytearray(content)
            for _ in range(generator.randint(1, 6)):
                changed[generator.randrange(len(changed))] = generator.choice((0, 1, 32, 255, generator.randrange(256)))
            (tmp_path / "changed.gguf").write_bytes(changed)
            try:
                tokenizer = read(tmp_path / "changed.gguf")
            except (ModelLoadError, UnsupportedModelError):
                outcomes.add("refused")
                continue
            assert isinstance(tokenizer.decode(tokenizer.encode("the fox 12 <|user|>")), str)
            outcomes.add("read")
    assert outcomes == {"refused", "read"}
