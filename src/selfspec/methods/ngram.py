"""Drafts copied from where the last tokens occurred before: ``prompt-lookup`` and ``suffix``."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from selfspec.decoding.draft import Draft, Follow, NoDraft, RunRound, TokenDraft
from selfspec.decoding.drafter import Continuation, Drafter, Feedback, Prefill
from selfspec.decoding.suffixes import KnownText, Match, continuation
from selfspec.errors import InvalidSettingError
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting
from selfspec.sampling.acceptance import TokenTree

_PART = 8192
"""Tokens of a prompt that are read at a time, while all other requests wait."""


def chain_draft(tokens: Sequence[int], follow: Follow | None = None) -> NoDraft | TokenDraft:
    """A draft of successive tokens; ``NoDraft`` for an empty sequence."""
    return TokenDraft(tuple(tokens), TokenTree.chain(len(tokens)), follow=follow) if tokens else NoDraft(follow)


class NgramIndex:
    """The position of the last occurrence of each n-gram of a growing text, found in constant time.

    Only n-grams with a following token are in it, so the end of the text does not find itself.
    """

    def __init__(self, max_size: int, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._max_size = max_size
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text, each in constant time."""
        text, after = self.tokens, self._after
        for token in tokens:
            position = len(text)
            before = tuple(text[-self._max_size :])
            for start in range(len(before)):
                after[before[start:]] = position
            text.append(token)

    def match_after(self, drafted: Sequence[int] = ()) -> Match:
        """The last occurrence in the text of the longest n-gram that the text and drafted tokens end with."""
        ending = (*self.tokens[-self._max_size :], *drafted)[-self._max_size :]
        for start in range(len(ending)):
            if (position := self._after.get(ending[start:])) is not None:
                return Match(len(ending) - start, position)
        return Match(0, 0)

    def copy(self, match: Match, count: int, drafted: Sequence[int] = ()) -> list[int]:
        """The ``count`` tokens after a match of the text and drafted tokens."""
        return continuation(self.tokens, match.end, count, drafted)


class _CopyDrafter(Drafter):
    """Drafts what followed the longest match of the last tokens.

    ``text`` is empty, and the prompt is read into it in parts, one with each round; until then nothing is drafted.
    ``shortest`` is the shortest match to draft from; ``length`` gives the tokens to copy after a match of a length.
    """

    def __init__(
        self, text: NgramIndex | KnownText, prefill: Prefill, shortest: int, length: Callable[[int], int]
    ) -> None:
        self._text = text
        self._shortest = shortest
        self._length = length
        self._followed = 0  # tokens of a run that are in the text already
        self._unread: list[int] = []
        self._extend((*prefill.prompt_ids, prefill.first_token))

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to those that are to be read, and reads a part."""
        self._unread += token_ids
        part, self._unread = self._unread[:_PART], self._unread[_PART:]
        self._text.extend(part)

    def plan(self) -> Draft:
        self._followed = 0
        return self._draft()

    def _draft(self) -> NoDraft | TokenDraft:
        found = self.continue_after(())
        return chain_draft(found.token_ids if found.match_length >= self._shortest else (), self._follow)

    def _follow(self, played: RunRound) -> NoDraft | TokenDraft:
        self._extend(played.token_ids)
        self._followed += len(played.token_ids)
        return self._draft()

    def continue_after(self, drafted: Sequence[int]) -> Continuation:
        """What followed the longest match of the last tokens; nothing without a match."""
        if self._unread:
            return Continuation()
        match = self._text.match_after(drafted)
        if not match.length:
            return Continuation()
        copied = self._text.copy(match, self._length(match.length), drafted)
        return Continuation(tuple(copied), match.length)

    def learn(self, feedback: Feedback) -> None:
        self._extend(feedback.acceptance.token_ids[self._followed :])
        self._followed = 0

    observe = learn


@dataclass(frozen=True)
class PromptLookupSettings(MethodSettings):
    """Settings of ``prompt-lookup``, in the words of transformers."""

    num_tokens: int = setting(10, "draft tokens of a round", minimum=1, maximum=256)
    max_matching_ngram_size: int = setting(
        3, "longest n-gram to look up (Saxena: 3, transformers: 2)", minimum=1, maximum=64
    )
    min_matching_ngram_size: int = setting(1, "shortest n-gram to draft from", minimum=1, maximum=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise InvalidSettingError(
                f"min_matching_ngram_size {self.min_matching_ngram_size} is more than max_matching_ngram_size "
                f"{self.max_matching_ngram_size}; raise the latter"
            )


@register
class PromptLookup(Method):
    """Copies what followed the last tokens at an earlier occurrence, in the prompt or in the output.

    If there are several occurrences it takes the last one; the original takes the first.
    """

    name = "prompt-lookup"
    summary = "copies what followed the last few tokens earlier in the text"
    source = "prompt lookup decoding (Saxena 2023)"
    Settings = PromptLookupSettings
    settings: PromptLookupSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        index = NgramIndex(self.settings.max_matching_ngram_size)
        return _CopyDrafter(index, prefill, self.settings.min_matching_ngram_size, lambda _: self.settings.num_tokens)


@dataclass(frozen=True)
class SuffixSettings(MethodSettings):
    """Settings of ``suffix``."""

    max_spec_factor: float = setting(1.0, "draft tokens per token of the match (alpha)", minimum=0.0, maximum=64.0)
    max_draft_length: int = setting(32, "longest draft", minimum=1, maximum=256)
    min_match_length: int = setting(1, "shortest match to draft from, in tokens", minimum=1)


@register
class Suffix(Method):
    """Drafts by a suffix automaton over prompt and output; the longer the match, the longer the draft.

    The match is that of SAM decoding's dynamic automaton, and of its static one over the texts of earlier requests,
    where an engine keeps them. The draft length is SuffixDecoding's: ``max_spec_factor`` times the match length, at
    least 1. The draft is a chain.

    SAM decoding also falls back to a draft model on short matches. SuffixDecoding builds trees weighted by frequency.
    """

    name = "suffix"
    summary = "copies what followed the longest repeated suffix, longer drafts for longer matches"
    source = "SAM decoding (Hu et al. 2024), draft length of SuffixDecoding (Oliaro et al. 2024)"
    Settings = SuffixSettings
    settings: SuffixSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _CopyDrafter(KnownText((), prefill.earlier), prefill, self.settings.min_match_length, self._length)

    def _length(self, match_length: int) -> int:
        return min(self.settings.max_draft_length, max(1, int(self.settings.max_spec_factor * match_length)))
