"""Suffix drafts: finds the longest suffix of the text that has occurred before, and copies what followed it there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from selfspec.decoding.draft import Draft, NoDraft
from selfspec.decoding.drafter import Continuation, Drafter, Feedback, Prefill
from selfspec.methods.base import Method
from selfspec.methods.copying import chain_draft, continuation
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting
from selfspec.methods.suffix_automaton import SuffixAutomaton


@dataclass(frozen=True)
class SuffixSettings(MethodSettings):
    """Settings of ``suffix``."""

    max_spec_factor: float = setting(
        1.0, "draft tokens per token of the match (SuffixDecoding's alpha)", minimum=0.0, maximum=64.0
    )
    max_draft_length: int = setting(32, "longest draft", minimum=1, maximum=256)
    min_match_length: int = setting(1, "shortest match to draft from, in tokens", minimum=1)


@register
class Suffix(Method):
    """Drafts by a suffix automaton over prompt and output; the longer the match, the longer the draft.

    The match is that of SAM decoding's dynamic automaton. The draft length is SuffixDecoding's: ``max_spec_factor``
    times the match length, at least 1. The draft is a chain.

    Known differences from the authors' code: SAM decoding also has a static automaton over a corpus, and falls back to
    a draft model on short matches. SuffixDecoding builds trees weighted by frequency, also over earlier requests.
    """

    name = "suffix"
    summary = "copies what followed the longest repeated suffix, longer drafts for longer matches"
    source = "SAM decoding (Hu et al. 2024), draft length of SuffixDecoding (Oliaro et al. 2024)"
    Settings = SuffixSettings
    settings_before_others: ClassVar[Mapping[str, Any]] = {"min_match_length": 4}
    settings: SuffixSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _Suffix(SuffixAutomaton((*prefill.prompt_ids, prefill.first_token)), self.settings)


class _Suffix(Drafter):
    def __init__(self, automaton: SuffixAutomaton, settings: SuffixSettings) -> None:
        self._automaton = automaton
        self._settings = settings

    def plan(self) -> Draft:
        """Drafts what followed the longest suffix that occurred before, if that is long enough."""
        found = self.continue_after(())
        return chain_draft(found.token_ids) if found.match_length >= self._settings.min_match_length else NoDraft()

    def continue_after(self, drafted: Sequence[int]) -> Continuation:
        """What followed the longest suffix that occurred before, up to a length in proportion to the match."""
        match, settings = self._automaton.match_after(drafted), self._settings
        if not match.length:
            return Continuation()
        count = min(settings.max_draft_length, max(1, int(settings.max_spec_factor * match.length)))
        copied = continuation(self._automaton.tokens, match.end, count, drafted)
        return Continuation(tuple(copied), match.length)

    def learn(self, feedback: Feedback) -> None:
        """Adds the new tokens to the automaton."""
        self._automaton.extend(feedback.acceptance.token_ids)

    observe = learn
