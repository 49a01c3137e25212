"""Prompt lookup: finds the last tokens earlier in the text, and copies what followed them there."""

from collections.abc import Iterable
from dataclasses import dataclass

from selfspec.decoding.draft import Draft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.methods.base import Method
from selfspec.methods.copying import chain_draft, continuation
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting


class NgramIndex:
    """The position of the last occurrence of each n-gram of a growing text, found in constant time.

    Only n-grams with a following token are in it, so the end of the text does not find itself.

    Args:
        max_size: longest n-grams to index, in tokens.
        tokens: the text so far.
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

    def find(self) -> int | None:
        """The position after the last earlier occurrence of the longest n-gram that the text ends with."""
        ending = tuple(self.tokens[-self._max_size :])
        found = (self._after.get(ending[start:]) for start in range(len(ending)))
        return next((position for position in found if position is not None), None)


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
        index = NgramIndex(self.settings.max_matching_ngram_size, (*prefill.prompt_ids, prefill.first_token))
        return _PromptLookup(index, self.settings.num_tokens)


class _PromptLookup(Drafter):
    def __init__(self, index: NgramIndex, num_tokens: int) -> None:
        self._index = index
        self._num_tokens = num_tokens

    def plan(self) -> Draft:
        start = self._index.find()
        return NoDraft() if start is None else chain_draft(continuation(self._index.tokens, start, self._num_tokens))

    def learn(self, feedback: Feedback) -> None:
        self._index.extend(feedback.acceptance.token_ids)
