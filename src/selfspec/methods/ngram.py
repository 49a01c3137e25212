"""Drafts copied from where the last tokens occurred before: ``prompt-lookup`` and ``suffix``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from selfspec.decoding.draft import Draft, NoDraft, TokenDraft
from selfspec.decoding.drafter import Continuation, Drafter, Feedback, Prefill
from selfspec.errors import InvalidSettingError
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting
from selfspec.sampling.tree import TokenTree


class Match(NamedTuple):
    """The longest suffix of a text, or of a text and drafted tokens after it, that occurs in the text before."""

    length: int  # in tokens; 0 if none occurs
    end: int  # the position in the text after the occurrence


def continuation(tokens: Sequence[int], start: int, count: int, drafted: Sequence[int] = ()) -> list[int]:
    """The tokens that followed an earlier occurrence of the text's suffix.

    If the text ends before ``count`` tokens are copied, the copy repeats: the text is then likely to be periodic, with
    the distance of the suffix to its earlier occurrence as the period.
    """
    piece = [*tokens[start : start + count], *drafted][:count]
    repeats = -(-count // len(piece))
    return (piece * repeats)[:count]


def chain_draft(tokens: Sequence[int]) -> Draft:
    """A draft of successive tokens; ``NoDraft`` for an empty sequence."""
    return TokenDraft(tuple(tokens), TokenTree.chain(len(tokens))) if tokens else NoDraft()


_ROOT = 0
_UPDATED = 64
"""Most suffixes whose last occurrence is updated at each token; periodic text has more of them."""


class SuffixAutomaton:
    """All substrings of a growing text (Blumer et al. 1985), built online in amortised constant time per token.

    A state represents the substrings that end at the same positions. Its link leads to their longest suffix that also
    ends elsewhere. So the state of the whole text links to its longest suffix that has occurred before, which is the
    match of SAM decoding (Hu et al. 2024, section 3).

    ``match_end`` is the position after the match's last earlier occurrence; for one of more than 64 other repeated
    suffixes it is the position after any earlier occurrence.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.match_length = 0
        self.match_end = 0
        self._whole = _ROOT
        # By state: the next state for each token, the link, the length of its longest substring, its last end.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            self._append(token)

    def match_after(self, drafted: Sequence[int]) -> Match:
        """The longest suffix of the text and drafted tokens that occurs in the text."""
        if not drafted:
            return Match(self.match_length, self.match_end)
        state, length = self._link[self._whole], self.match_length
        for token in drafted:
            while state > _ROOT and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return Match(length, self._end[state])

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        length = len(self.tokens)
        whole = self._add_state({}, _ROOT, length, length)
        state = self._whole
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = whole
            state = self._link[state]
        if state >= 0:
            self._link[whole] = self._suffix_state(state, token)
        self._whole = whole
        self._note_match()

    def _suffix_state(self, state: int, token: int) -> int:
        """The state whose longest substring is that of ``state`` followed by ``token``, split off if necessary."""
        target, length = self._next[state][token], self._length[state] + 1
        if self._length[target] == length:
            return target
        split = self._add_state(dict(self._next[target]), self._link[target], length, self._end[target])
        self._link[target] = split
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add_state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def _note_match(self) -> None:
        """Stores the match, then updates the last occurrence of the text's suffixes."""
        state = self._link[self._whole]
        self.match_length, self.match_end = self._length[state], self._end[state]
        for _ in range(_UPDATED):
            if state == _ROOT:
                break
            self._end[state] = len(self.tokens)
            state = self._link[state]


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


class _CopyDrafter(Drafter):
    """Drafts what followed the longest match of the last tokens.

    ``shortest`` is the shortest match to draft from; ``length`` gives the tokens to copy after a match of a length.
    """

    def __init__(self, text: NgramIndex | SuffixAutomaton, shortest: int, length: Callable[[int], int]) -> None:
        self._text = text
        self._shortest = shortest
        self._length = length

    def plan(self) -> Draft:
        found = self.continue_after(())
        return chain_draft(found.token_ids) if found.match_length >= self._shortest else NoDraft()

    def continue_after(self, drafted: Sequence[int]) -> Continuation:
        """What followed the longest match of the last tokens; nothing without a match."""
        match = self._text.match_after(drafted)
        if not match.length:
            return Continuation()
        copied = continuation(self._text.tokens, match.end, self._length(match.length), drafted)
        return Continuation(tuple(copied), match.length)

    def learn(self, feedback: Feedback) -> None:
        self._text.extend(feedback.acceptance.token_ids)

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
    settings_before_others: ClassVar[Mapping[str, Any]] = {"min_matching_ngram_size": 3}
    settings: PromptLookupSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        index = NgramIndex(self.settings.max_matching_ngram_size, (*prefill.prompt_ids, prefill.first_token))
        return _CopyDrafter(index, self.settings.min_matching_ngram_size, lambda _: self.settings.num_tokens)


@dataclass(frozen=True)
class SuffixSettings(MethodSettings):
    """Settings of ``suffix``."""

    max_spec_factor: float = setting(1.0, "draft tokens per token of the match (alpha)", minimum=0.0, maximum=64.0)
    max_draft_length: int = setting(32, "longest draft", minimum=1, maximum=256)
    min_match_length: int = setting(1, "shortest match to draft from, in tokens", minimum=1)


@register
class Suffix(Method):
    """Drafts by a suffix automaton over prompt and output; the longer the match, the longer the draft.

    The match is that of SAM decoding's dynamic automaton. The draft length is SuffixDecoding's: ``max_spec_factor``
    times the match length, at least 1. The draft is a chain.

    SAM decoding also has a static automaton over a corpus, and falls back to a draft model on short matches.
    SuffixDecoding builds trees weighted by frequency, also over earlier requests.
    """

    name = "suffix"
    summary = "copies what followed the longest repeated suffix, longer drafts for longer matches"
    source = "SAM decoding (Hu et al. 2024), draft length of SuffixDecoding (Oliaro et al. 2024)"
    Settings = SuffixSettings
    settings_before_others: ClassVar[Mapping[str, Any]] = {"min_match_length": 4}
    settings: SuffixSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        automaton = SuffixAutomaton((*prefill.prompt_ids, prefill.first_token))
        return _CopyDrafter(automaton, self.settings.min_match_length, self._length)

    def _length(self, match_length: int) -> int:
        return min(self.settings.max_draft_length, max(1, int(self.settings.max_spec_factor * match_length)))
