"""Prompt lookup: the longest n-gram at the end of the text is looked up further up in it."""

from collections.abc import Iterable
from dataclasses import dataclass

from selfspec.decoding.draft import Draft, NoDraft
from selfspec.methods.base import Drafter, Feedback, Method, Prefill
from selfspec.methods.copying import chain_draft, continuation
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting


class NgramIndex:
    """Where each n-gram of a growing text stood last, so that a look-up takes no longer in a long text.

    Only n-grams that something follows are in it, so that the end of the text does not find itself.

    Args:
        max_size: longest n-grams to keep, in tokens.
        tokens: the text so far.
    """

    def __init__(self, max_size: int, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._max_size = max_size
        self._behind: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text; each costs the same, however long the text is."""
        text, behind = self.tokens, self._behind
        for token in tokens:
            position = len(text)
            before = tuple(text[-self._max_size :])
            for start in range(len(before)):
                behind[before[start:]] = position
            text.append(token)

    def find(self) -> int | None:
        """The position behind the latest earlier occurrence of the longest n-gram that the text ends with."""
        ending = tuple(self.tokens[-self._max_size :])
        found = (self._behind.get(ending[start:]) for start in range(len(ending)))
        return next((position for position in found if position is not None), None)


@dataclass(frozen=True)
class PromptLookupSettings(MethodSettings):
    """Settings of ``prompt-lookup``, in the words of transformers."""

    num_tokens: int = setting(
        10, "draft tokens of a round (transformers: prompt_lookup_num_tokens)", minimum=1, maximum=256
    )
    max_matching_ngram_size: int = setting(
        3,
        "longest n-gram to look up; shorter ones are tried after it (Saxena: 3, transformers: 2)",
        minimum=1,
        maximum=64,
    )


@register
class PromptLookup(Method):
    """Copies what followed the last tokens where they stood before, in the prompt or in the output.

    Where an n-gram stood several times its latest occurrence counts; the original takes the first.
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
