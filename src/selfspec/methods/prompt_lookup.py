"""Prompt lookup: finds the last tokens earlier in the text, and copies what followed them there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from selfspec.decoding.draft import Draft, NoDraft
from selfspec.decoding.drafter import Continuation, Drafter, Feedback, Prefill
from selfspec.errors import InvalidSettingError
from selfspec.methods.base import Method
from selfspec.methods.copying import Match, chain_draft, continuation
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting


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


@dataclass(frozen=True)
class PromptLookupSettings(MethodSettings):
    """Settings of ``prompt-lookup``, in the words of transformers."""

    num_tokens: int = setting(
        10, "draft tokens of a round (transformers: prompt_lookup_num_tokens)", minimum=1, maximum=256
    )
    max_matching_ngram_size: int = setting(
        3,
        "longest n-gram to look up; shorter ones follow if it is not found (Saxena: 3, transformers: 2)",
        minimum=1,
        maximum=64,
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
        return _PromptLookup(index, self.settings)


class _PromptLookup(Drafter):
    def __init__(self, index: NgramIndex, settings: PromptLookupSettings) -> None:
        self._index = index
        self._settings = settings

    def plan(self) -> Draft:
        """Drafts what followed the longest match, if that is long enough."""
        found = self.continue_after(())
        long_enough = found.match_length >= self._settings.min_matching_ngram_size
        return chain_draft(found.token_ids) if long_enough else NoDraft()

    def continue_after(self, drafted: Sequence[int]) -> Continuation:
        """What followed the longest match of the last tokens; nothing without a match."""
        match = self._index.match_after(drafted)
        if not match.length:
            return Continuation()
        copied = continuation(self._index.tokens, match.end, self._settings.num_tokens, drafted)
        return Continuation(tuple(copied), match.length)

    def learn(self, feedback: Feedback) -> None:
        """Adds the new tokens to the index."""
        self._index.extend(feedback.acceptance.token_ids)

    observe = learn
