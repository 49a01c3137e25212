"""JSON schemas compiled for a tokenizer, each of them once."""

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.errors import InvalidParameterError, MissingPackageError, first_line
from selfspec.sampling.grammar import GrammarMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 64
"""Compiled schemas that are kept; the one that was not used for longest goes first."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""What may stand between the tokens of JSON. Without a bound, a model may write spaces until its output is full."""


class Grammars:
    """Makes the masks of requests from JSON schemas. May be used from several threads.

    Args:
        tokenizer: of the model; ``None`` without one.
        vocab_size: number of tokens that the model scores.
        eos_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def mask(self, schema: str, prompt_length: int) -> GrammarMask:
        """The mask of a new request.

        Args:
            schema: a JSON schema, as JSON.
            prompt_length: tokens of the prompt.

        Raises:
            InvalidParameterError: the schema cannot be compiled, or not for this tokenizer; the message says why.
            MissingPackageError: llguidance is not installed.
        """
        with self._lock:
            matcher = self._compiled_matcher(schema).deep_copy()
        return GrammarMask(matcher, prompt_length, self._eos_ids, self._vocab_size)

    def compile(self, schema: str) -> None:
        """Compiles a schema ahead of its first mask, which may take long; raises as ``mask`` does."""
        with self._lock:
            self._compiled_matcher(schema)

    def _compiled_matcher(self, schema: str) -> "LLMatcher":
        matcher = self._compiled.pop(schema, None) or self._compile(schema)
        self._compiled[schema] = matcher
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)
        return matcher

    def _compile(self, schema: str) -> "LLMatcher":
        vocabulary = self._vocabulary = self._vocabulary or self._read_vocabulary()
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
        except ValueError as error:
            raise InvalidParameterError(f"json_schema cannot be compiled: {first_line(error)}") from error
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            reason = first_line(ValueError(matcher.get_error()))
            raise InvalidParameterError(f"json_schema cannot be compiled: {reason}")
        return matcher

    def _read_vocabulary(self) -> "LLTokenizer":
        if self._tokenizer is None:
            raise InvalidParameterError("json_schema needs a tokenizer; give the engine one")
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise InvalidParameterError(
                f"json_schema needs a fast tokenizer, not {type(self._tokenizer).__name__}; load it as one"
            )
        if not self._eos_ids:
            raise InvalidParameterError("json_schema needs a model with an end-of-sequence token, which ends the text")
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingPackageError(
                "json_schema needs the package llguidance; install it by `pip install 'selfspec[structured]'`"
            ) from error
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except ValueError as error:
            raise InvalidParameterError(
                f"json_schema cannot be used with this tokenizer: {first_line(error)}"
            ) from error
