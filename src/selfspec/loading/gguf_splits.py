"""How byte-level vocabularies of GGUF files split text into words, by the name that a file has for it.

Merges never cross a word, so that other words give other tokens than the model was trained on. A file only has a name
(``tokenizer.ggml.pre``); the rules that it stands for are those of the models' own tokenizers.
"""

import logging
from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

from selfspec.loading.gguf_header import short
from selfspec.loading.gguf_settings import refused

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splitting:
    """The rules of a kind of vocabulary.

    Attributes:
        patterns: regular expressions that split a text, one after the other; each match is a word, and so is each rest.
        ignore_merges: a word that is a token is that token, whether or not merges lead to it.
        adds_bos: texts begin with the beginning-of-sequence token, unless the file says otherwise.
        composes: characters that are combinations are composed first (Unicode's NFC).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The rules as a pre-tokenizer that ends in bytes."""
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done with a text before it is split."""
        return normalizers.NFC() if self.composes else None


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str, letter: str = r"\p{L}", no_symbols: str = r"\p{L}\p{N}") -> str:
    return rf"{_CONTRACTIONS}|{_LEAD}{letter}+|{digits}| ?[^\s{no_symbols}]+[\r\n]*|{_SPACES}"


def _cased_words(ending: str, digits: str) -> str:
    """Words end where a capital letter follows a small one."""
    words = rf"{_LEAD}{_UPPER}*{_LOWER}+{ending}|{_LEAD}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_IDEOGRAPHS = "[一-龥ࠀ-一가-퟿]+"

_GPT2 = Splitting((r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",))
_GPT2_DIGITS = replace(_GPT2, patterns=(_DIGIT, *_GPT2.patterns))
_GPT_NEOX = replace(_GPT2, composes=True)
_CL100K = Splitting((_words(_THREE_DIGITS),))
_LLAMA3 = replace(_CL100K, ignore_merges=True)
_LLAMA3_BOS = replace(_LLAMA3, adds_bos=True)
_MINICPM5 = Splitting((_THREE_DIGITS, _words(r"\p{N}+")), ignore_merges=True)
_ONE_DIGIT = Splitting((_words(_DIGIT),))
_QWEN2 = replace(_ONE_DIGIT, composes=True)
_QWEN35 = Splitting((_words(_DIGIT, r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"),), composes=True)
_TEKKEN = Splitting((_cased_words("", _DIGIT),), ignore_merges=True, adds_bos=True)
_O200K = Splitting((_cased_words(f"{_CONTRACTIONS}?", _THREE_DIGITS),))
_YOUTU = Splitting(
    (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _cased_words(f"{_CONTRACTIONS}?", _DIGIT),
    ),
    ignore_merges=True,
)
_DEEPSEEK_CODER = Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, _DIGIT))
_DEEPSEEK_LLM = Splitting(
    (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _IDEOGRAPHS, _DIGIT)
)
_DEEPSEEK3 = Splitting(
    (
        _THREE_DIGITS,
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_EXAONE_MOE = Splitting(
    (
        rf"{_CONTRACTIONS}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_JAIS2 = Splitting(
    (
        rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|{_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
        + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"\s",
    )
)
_LAGUNA = Splitting((r"[^\n]+|\n+", *_ONE_DIGIT.patterns))
_TINY_AYA = Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", *_O200K.patterns))
_AFMOE = Splitting(
    (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        _DEEPSEEK3.patterns[-1],
    )
)
_FALCON = Splitting((r"[\p{P}$+<=>^~|`]+", *_GPT2.patterns, "[0-9]{3}"))
_BLOOM = Splitting((r" ?[^(\s|.,!?…。，、।۔،)]+",))
_SEED_CODER = Splitting(
    (rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
)

SPLITTINGS: tuple[tuple[Splitting, tuple[str, ...]], ...] = (
    (_GPT2, ("gpt-2", "phi-2", "jais", "mellum", "gigachat", "trillion", "a.x-4.0", "exaone4", "granite-docling")),
    (_GPT2_DIGITS, ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (_GPT_NEOX, ("olmo", "mpt")),
    (_FALCON, ("falcon",)),
    (_BLOOM, ("bloom",)),
    (_CL100K, ("dbrx", "chatglm-bpe")),
    (_LLAMA3, ("smaug-bpe", "glm4", "glm5")),
    (_LLAMA3_BOS, ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")),
    (_MINICPM5, ("minicpm5",)),
    (
        _ONE_DIGIT,
        (
            "deepseek-r1-qwen",
            "stablelm2",
            "megrez",
            "kormo",
            "hunyuan",
            "grok-2",
            "solar-open",
            "bailingmoe",
            "bailingmoe2",
        ),
    ),
    (_QWEN2, ("qwen2",)),
    (_QWEN35, ("qwen35",)),
    (_TEKKEN, ("tekken",)),
    (_O200K, ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (_TINY_AYA, ("tiny_aya", "cohere2moe")),
    (_JAIS2, ("jais-2",)),
    (_EXAONE_MOE, ("exaone-moe",)),
    (_LAGUNA, ("laguna",)),
    (_AFMOE, ("afmoe",)),
    (_YOUTU, ("youtu",)),
    (_DEEPSEEK_CODER, ("deepseek-coder",)),
    (_DEEPSEEK_LLM, ("deepseek-llm",)),
    (_DEEPSEEK3, ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (_SEED_CODER, ("seed-coder",)),
)
"""The rules that names stand for."""

_SPLITTINGS = {name: splitting for splitting, names in SPLITTINGS for name in names}


def find_splitting(name: str) -> Splitting:
    """The rules by the name in a file. Old files have no name; then they are GPT-2's, with a warning in the log.

    Raises:
        UnsupportedModelError: nothing is known by this name.
    """
    if name in ("", "default"):
        _LOGGER.warning(
            "the file does not say how its model splits text into words; take a newer one if answers are odd"
        )
        return _GPT2
    if name not in _SPLITTINGS:
        raise refused(
            f"the pre-tokenizer '{short(name)}' is not supported: it is not known how its model splits text into words"
        )
    return _SPLITTINGS[name]
