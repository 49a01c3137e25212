"""Makes a tokenizer of what a GGUF file says about its own: vocabulary, merges, special tokens, chat template.

transformers does so, too, but takes seconds for it, and is wrong about some vocabularies: it replaces splitting rules
that it does not know by GPT-2's (SmolLM2, Granite, Starcoder2), never uses tokens that Llama 3's merges do not lead to,
adds no beginning-of-sequence token for Llama 3 where the file leaves that open, cuts DeepSeek's special tokens into
pieces, and composes no characters for Qwen.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from selfspec.errors import ModelLoadError, SelfSpecError, first_line
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_header import short
from selfspec.loading.gguf_settings import refused
from selfspec.loading.gguf_splits import find_splitting

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_SENTENCEPIECE_DEFAULTS = {"bos": 1, "eos": 2, "unk": 0}
_MAX_MERGED = 128
"""Characters of a token that merges lead to; SentencePiece makes tokens of 16. The time is quadratic in it."""

_UNSTRIPPED = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""Special tokens of Phi-3 that do not swallow the spaces after them."""

_PHI = frozenset(("phi3", "phimoe"))
_GEMMA = frozenset(("gemma", "gemma2", "gemma3"))


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Makes the tokenizer of a file, with its special tokens and its chat template.

    Raises:
        ModelLoadError: the file has no tokenizer, or a damaged one.
        UnsupportedModelError: its kind or its splitting rules are not supported.
    """
    try:
        vocabulary = _Vocabulary(file)
        backend = vocabulary.build()
        return vocabulary.wrap(backend)
    except SelfSpecError:
        raise
    except Exception as error:  # tokenizers has no class of its own for what it refuses
        raise ModelLoadError(
            f"the tokenizer of '{file.path}' is damaged ({first_line(error)}); download the file again"
        ) from error


class _Vocabulary:
    """The tokens of a file, checked, and the tokenizer that they make."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._metadata: Mapping[str, Any] = file.metadata
        self._kind = self._text("model")
        if self._kind in ("", "none", "no_vocab") or f"{_PREFIX}tokens" not in self._metadata:
            raise ModelLoadError(
                f"'{file.path}' holds no tokenizer; convert the model with one, or load it by transformers and give it "
                "to selfspec.Engine, which takes token ids without a tokenizer"
            )
        self._tokens = self._strings("tokens")
        self._types = self._numbers("token_type")
        self._adds_bos = True
        """Unless the file says otherwise."""
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            self._refuse("it has a token twice")

    def build(self) -> Tokenizer:
        if self._kind == "gpt2":
            return self._byte_level()
        if self._kind == "llama":
            return self._old_gemma() if self._architecture in _GEMMA else self._sentencepiece()
        if self._kind == "gemma4":
            return self._gemma(self._ids, self._required_merges())
        raise refused(
            f"'{self._file.path}' has a tokenizer of the kind '{short(self._kind)}', which is not supported; those of "
            f"the kinds gpt2, llama and gemma4 are"
        )

    def wrap(self, backend: Tokenizer) -> PreTrainedTokenizerFast:
        """The tokenizer as transformers has it."""
        special = {f"{name}_token": self._special(name) for name in _SPECIAL}
        self._add_tokens(backend, {token for token in special.values() if token is not None})
        make: Any = PreTrainedTokenizerFast
        tokenizer: PreTrainedTokenizerFast = make(
            tokenizer_object=_Uncopied(backend),
            add_bos_token=self._flag("add_bos_token", self._adds_bos) and special["bos_token"] is not None,
            add_eos_token=self._flag("add_eos_token", False) and special["eos_token"] is not None,
            chat_template=self._chat_template(),
            **special,
        )
        return tokenizer

    def _byte_level(self) -> Tokenizer:
        splitting = find_splitting(self._text("pre"))
        self._adds_bos = splitting.adds_bos
        model = BPE(vocab=self._ids, merges=self._required_merges(), ignore_merges=splitting.ignore_merges)
        backend = Tokenizer(model)
        if (normalizer := splitting.normalizer()) is not None:
            backend.normalizer = normalizer
        backend.pre_tokenizer = splitting.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> Tokenizer:
        """Spaces are letters of the vocabulary, and bytes stand for characters that it does not have."""
        merges = self._merges() if f"{_PREFIX}merges" in self._metadata else self._merges_by_score()
        unknown = self._special("unk")
        backend = Tokenizer(BPE(vocab=self._ids, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown))
        prefix = self._flag("add_space_prefix", True)
        if self._architecture in _PHI:  # the prefix comes after every special token, not at the beginning alone
            steps = [normalizers.Prepend(_SPACE)] if prefix else []
            backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        else:
            scheme = "first" if prefix else "never"
            backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
        strip = [decoders.Strip(" ", left=1)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _old_gemma(self) -> Tokenizer:
        """Up to Gemma 3. Runs of spaces are stored as spaces, and scores do not order the merges."""
        tokens = [_SPACE * len(token) if token.isspace() and set(token) == {" "} else token for token in self._tokens]
        ids = {token: i for i, token in enumerate(tokens)}
        return self._gemma(ids, _derive_merges(ids, {token: -i for token, i in ids.items()}))

    def _gemma(self, ids: Mapping[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
        """As SentencePiece's without a prefix."""
        unknown = self._special("unk")
        backend = Tokenizer(BPE(vocab=dict(ids), merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown))
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
        return backend

    def _add_tokens(self, backend: Tokenizer, named: set[str]) -> None:
        """Makes tokens that are never cut into pieces: those of the file's two kinds, and the named special ones."""
        strips = self._architecture in _PHI and self._kind == "llama"
        control = [self._tokens[i] for i in np.flatnonzero(self._types == _CONTROL).tolist()]
        control += sorted(named - set(control), key=self._ids.__getitem__)
        defined = [self._tokens[i] for i in np.flatnonzero(self._types == _USER_DEFINED).tolist()]
        special = {token: strips and token not in _UNSTRIPPED for token in control if token}
        backend.add_special_tokens(
            [AddedToken(token, normalized=False, special=True, rstrip=rstrip) for token, rstrip in special.items()]
        )
        kept = [token for token in defined if token not in named and backend.token_to_id(token) is not None]
        backend.add_tokens([AddedToken(token, normalized=False, rstrip=strips) for token in kept if token])

    def _required_merges(self) -> list[tuple[str, str]]:
        if f"{_PREFIX}merges" not in self._metadata:
            self._refuse("it has no merges")
        return self._merges()

    def _merges(self) -> list[tuple[str, str]]:
        merges: list[Any] = [tuple(merge.split(" ")) for merge in self._strings("merges")]
        if any(len(merge) != 2 for merge in merges):
            self._refuse("one of its merges is not of two tokens")
        return merges

    def _merges_by_score(self) -> list[tuple[str, str]]:
        scores = self._numbers("scores")
        if not scores.size:
            self._refuse("it has neither merges nor scores")
        ids = {token: i for token, i in self._ids.items() if not self._types.size or self._types[i] == _NORMAL}
        return _derive_merges(ids, {token: float(scores[i]) for token, i in ids.items()})

    def _special(self, name: str) -> str | None:
        """The text of a special token; ``None`` if there is none."""
        found = self._id(_SPECIAL[name])
        if found is None and self._kind == "llama":
            found = _SENTENCEPIECE_DEFAULTS.get(name)
        return None if found is None else self._tokens[found]

    def _id(self, key: str) -> int | None:
        found = self._metadata.get(_PREFIX + key)
        if found is None:
            return None
        if type(found) is not int or not 0 <= found < len(self._tokens):
            self._refuse(f"{key} is {str(found)[:40]!r}, and there are {len(self._tokens):,} tokens")
        return found

    def _chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            self._refuse("its chat template is not a text")
        return template

    @property
    def _architecture(self) -> str:
        return str(self._metadata.get("general.architecture", ""))

    def _text(self, key: str) -> str:
        value = self._metadata.get(_PREFIX + key, "")
        return value if isinstance(value, str) else self._refuse(f"{key} is not a text")

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        return value if isinstance(value, bool) else self._refuse(f"{key} is neither true nor false")

    def _strings(self, key: str) -> Sequence[str]:
        value = self._metadata[_PREFIX + key]
        return value if isinstance(value, list) and value else self._refuse(f"{key} is not a list of texts")

    def _numbers(self, key: str) -> npt.NDArray[Any]:
        """One number a token; empty if the file has none."""
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return np.empty(0)
        if not isinstance(value, np.ndarray) or len(value) != len(self._tokens):
            self._refuse(f"{key} is not one number for each of {len(self._tokens):,} tokens")
        return value

    def _refuse(self, reason: str) -> Any:
        raise ModelLoadError(f"the tokenizer of '{self._file.path}' is damaged: {reason}; download the file again")


class _Uncopied:
    """Spares the second that transformers takes to copy the tokenizer that it is given."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._backend


def _derive_merges(ids: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that lead to each token from two others, the highest score first, then the longest left token."""
    return [
        (left, right)
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        if len(token) <= _MAX_MERGED
        for i in range(len(token) - 1, 0, -1)
        if (left := token[:i]) in ids and (right := token[i:]) in ids
    ]
