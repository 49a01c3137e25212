"""Structured output: schemas and grammars compiled for a tokenizer, and masks of the tokens that may follow a text."""

import copy
import threading
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.constraint import Constraint, definition, parser_limits
from selfspec.errors import InvalidParameterError, MissingPackageError, explaining, first_line
from selfspec.model import transfer
from selfspec.runtimes.changes import Allowed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_MASKS = 64
"""Number of masks that are cached: a verification uses those of its draft again.

Rows of a round differ in their last tokens, so that no more of them than that are compared one by one.
"""

MOST_COMPILED = 32
"""Compiled grammars that are kept; the one that was not used for longest goes first."""


class GrammarMask(LogitsProcessor):
    """Forbids every token after which the output could not become a text of the grammar.

    When the text is complete, end-of-sequence tokens are allowed; when nothing may follow it, only they are.

    The mask of a row is a function of the tokens before it, so drafts and target use the same mask, and the output is
    that of autoregressive decoding. The matcher is shared between rows: for another row it is rolled back to where the
    tokens differ. A drafted path that the grammar does not allow has probability zero at its first such token; scores
    after it are never used and stay as they are. The matcher runs on the host, so every row waits for the tokens
    before it.

    Args:
        matcher: of the grammar, after no tokens.
        prompt_length: tokens of the prompt, which is not part of the text.
        eos_ids: the tokens that end the text, at least one.
        vocab_size: number of tokens that the model scores.
        kind: the parameter that the grammar is of, for errors.

    Raises:
        InvalidParameterError: no token of the vocabulary can begin a text of the grammar.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        prompt_length: int,
        eos_ids: Collection[int],
        vocab_size: int,
        kind: str = "json_schema",
    ) -> None:
        self._matcher, self._kind = matcher, kind
        self.vocab_size, self._prompt_length = vocab_size, prompt_length
        self._eos_ids = frozenset(eos_ids)
        self._only_eos: Allowed = np.packbits(np.isin(np.arange(vocab_size), list(eos_ids)), bitorder="little")
        self._consumed: list[int] = []
        self._tokens = torch.empty(0, dtype=torch.long)  # begins with those consumed, on the device of the outputs
        self._masks: dict[int, Allowed] = {0: self._find_allowed()}

    def copy(self, prompt_length: int) -> "GrammarMask":
        """The mask of another request, after no tokens; of one that has masked nothing yet."""
        assert not self._consumed
        other = copy.copy(self)
        other._matcher, other._prompt_length = self._matcher.deep_copy(), prompt_length
        other._consumed, other._tokens, other._masks = [], self._tokens.new_empty(0), dict(self._masks)
        return other

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Masks the scores ``[1, vocab]`` of one row, given its tokens ``[1, length]``.

        Raises:
            InvalidParameterError: llguidance's limits are exceeded, or no token can continue the text.
        """
        output = input_ids[0, self._prompt_length :]
        same = self._count_same(output)
        allowed = self._allowed_after(same, output[same:].tolist())
        if allowed is not self._only_eos:  # the matcher has consumed what the output begins with
            self._keep(output, same)
        if allowed is None:
            return scores
        forbidden = torch.from_numpy(np.unpackbits(allowed, count=self.vocab_size, bitorder="little") == 0)
        return scores.masked_fill(transfer.send(forbidden, scores.device), -torch.inf)

    def allowed_after(self, output: Sequence[int], path: Sequence[int]) -> Allowed | None:
        """The tokens that may follow an output and drafted tokens after it; ``None`` if these are not allowed.

        Raises:
            InvalidParameterError: see ``__call__``.
        """
        same = max(0, min(len(output), len(self._consumed)) - KEPT_MASKS)
        same = same if output[:same] == self._consumed[:same] else 0
        self._tokens = self._tokens[:0]
        return self._allowed_after(same, [*output[same:], *path])

    def forced_after(self, output: Sequence[int]) -> Sequence[int]:
        """Tokens that spell what the grammar forces after an output, as the tokenizer would."""
        if self.allowed_after(output, ()) is None or len(self._consumed) < len(output):  # or it has ended
            return ()
        return self._matcher.compute_ff_tokens()

    def _allowed_after(self, same: int, rest: list[int]) -> Allowed | None:
        """The tokens that may follow the first ``same`` consumed ones and others; ``None`` if these are not allowed."""
        if not self._eos_ids.isdisjoint(rest):  # none is among those before: the matcher has consumed them
            return self._only_eos
        if not self._advance_to(same, rest):
            return None
        length = same + len(rest)
        if length not in self._masks:
            self._masks[length] = self._find_allowed()
            self._masks.pop(length - KEPT_MASKS, None)
        return self._masks[length]

    def _count_same(self, output: torch.Tensor) -> int:
        """How many tokens an output begins with that are consumed already, compared all together; 0 if not all are."""
        count = min(len(output), len(self._consumed)) - KEPT_MASKS
        if count <= 0 or self._tokens.device != output.device:
            return 0
        return count if torch.equal(self._tokens[:count], output[:count]) else 0

    def _advance_to(self, same: int, rest: list[int]) -> bool:
        """Moves the matcher to the end of an output; returns whether the grammar allows it.

        ``same`` tokens of the output are consumed, and the ``rest`` may be.
        """
        consumed, common = self._consumed, same
        for token_id, other in zip(rest, consumed[same : same + len(rest)], strict=False):
            if token_id != other:
                break
            common += 1
        if common < len(consumed):
            self._matcher.rollback(len(consumed) - common)
            self._masks = {length: mask for length, mask in self._masks.items() if length <= common}
            del consumed[common:]
        new = rest[common - same :]
        consumed += new[: self._matcher.try_consume_tokens(new)]
        self._check_limits()
        return len(consumed) == same + len(rest)

    def _keep(self, output: torch.Tensor, begin: int) -> None:
        """Copies the tokens that were consumed from an index on, or all of them where there is no room for more."""
        count = len(self._consumed)
        if count > len(self._tokens) or self._tokens.device != output.device:
            self._tokens, begin = output.new_empty(2 * count), 0
        self._tokens[begin:count] = output[begin:count]

    def _find_allowed(self) -> Allowed:
        """The tokens that may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed: Allowed = bits[: -(-self.vocab_size // 8)].copy()
        allowed[-1] &= 0xFF >> -self.vocab_size % 8  # the tokenizer may have more tokens than the model scores
        self._check_limits()
        if not allowed.any():
            raise InvalidParameterError(
                f"{self._kind} allows no token of this tokenizer after {len(self._consumed)} tokens; change it"
            )
        return allowed

    def _check_limits(self) -> None:
        if self._matcher.is_error():
            reason = first_line(ValueError(self._matcher.get_error()))
            raise InvalidParameterError(
                f"{self._kind} is too complex to follow after {len(self._consumed)} tokens: {reason}; simplify it"
            )


class Grammars:
    """Makes the masks of requests from their constraints. May be used from several threads.

    Args:
        tokenizer: of the model; ``None`` without one.
        vocab_size: number of tokens that the model scores.
        eos_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(each for each in eos_ids if each < vocab_size)
        self._reading = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled = lru_cache(MOST_COMPILED)(self._compile)

    def mask(self, constraint: Constraint, prompt_length: int) -> GrammarMask:
        """The mask of a new request.

        Args:
            constraint: what the output has to be.
            prompt_length: tokens of the prompt.

        Raises:
            InvalidParameterError: the constraint cannot be compiled, or not for this tokenizer; the message says why.
            MissingPackageError: llguidance is not installed.
        """
        return self._compiled(constraint).copy(prompt_length)

    def _compile(self, constraint: Constraint) -> GrammarMask:
        """The mask of no request, from which those of requests are copied."""
        kind = constraint.kind
        with self._reading:
            vocabulary = self._vocabulary = self._vocabulary or self._read_vocabulary(kind)
        from llguidance import LLMatcher

        with explaining(InvalidParameterError, f"{kind} cannot be compiled", ValueError, RecursionError):
            grammar = definition(constraint)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            reason = first_line(ValueError(matcher.get_error()))
            raise InvalidParameterError(f"{kind} cannot be compiled: {reason}")
        return GrammarMask(matcher, 0, self._eos_ids, self._vocab_size, kind)

    def _read_vocabulary(self, kind: str) -> "LLTokenizer":
        if self._tokenizer is None:
            raise InvalidParameterError(f"{kind} needs a tokenizer; give the engine one")
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise InvalidParameterError(
                f"{kind} needs a fast tokenizer, not {type(self._tokenizer).__name__}; load it as one"
            )
        if not self._eos_ids:
            raise InvalidParameterError(f"{kind} needs a model with an end-of-sequence token, which ends the text")
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingPackageError(
                f"{kind} needs the package llguidance; install it by `pip install 'selfspec[structured]'`"
            ) from error
        with explaining(InvalidParameterError, f"{kind} cannot be used with this tokenizer", ValueError):
            entries = max(self._vocab_size, 1 + max(self._tokenizer.get_vocab().values()))
            return from_tokenizer(self._tokenizer, n_vocab=entries, eos_token=self._eos_ids)
