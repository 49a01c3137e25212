"""SWIFT: searches a set of skipped sublayers during generation, and drafts token trees with the best one so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfspec.decoding.draft import ConfidenceThreshold, Draft, LayerDraft, TreeWidths
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill, Probe
from selfspec.methods.payoff import Record, draft_cost, expected_speedup
from selfspec.methods.registry import register
from selfspec.methods.selecting import Selected, SelectingDrafter, SelectingMethod, SelectingSettings, with_kept_set
from selfspec.methods.settings import fraction, setting
from selfspec.methods.skipping import sublayer_ratio
from selfspec.methods.state import LearnedState
from selfspec.methods.swift_search import SwiftSearch, SwiftSearchSettings
from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

MOST_CANDIDATES = 10

_FIRST_PART = 4
"""A candidate that cannot be the best after this part of its tokens is not tried on the others."""

_AUTHORS_MORE_TOKENS = 2
"""Output tokens, the pending one included, that the authors' code waits for after those that it compares."""

_RATIO, _LARGE_RATIO, _LARGE_MODEL = 0.45, 0.5, 30_000_000_000
"""Skip ratios of appendix B.2, for models of up to 13 billion parameters and from 34 billion on."""

_SURER_THAN = (0.95, 0.8, 0.5)
_PAPER_WIDTHS = (1, 3, 5, MOST_CANDIDATES)
_AUTHORS_GREEDY_WIDTHS = (3, 5, 8, MOST_CANDIDATES)


@dataclass(frozen=True)
class SwiftSettings(SwiftSearchSettings, SelectingSettings):
    """Settings of ``swift``: of its search, of the weights that draft, and of its drafts."""

    context_window: int = setting(32, "output tokens on which candidates are scored (γ)", minimum=1)
    window: str = setting(
        "fixed",
        "which output tokens these are: the first γ (fixed, equation 3), those from the second on (authors, of their "
        "code, once there are two more), or the last γ (sliding, ours)",
        choices=("fixed", "authors", "sliding"),
    )
    accumulation: str = setting(
        "best",
        "what drafts before a request has γ output tokens: the best set so far (authors' code), or, while the search "
        "lasts, the first set (uniform, section 4.1.1)",
        choices=("best", "uniform"),
    )
    max_draft_length: int = setting(25, "longest draft (N_D)", minimum=1, maximum=64)
    confidence_threshold: float = fraction(0.8, "stop drafting after a token less confident than this (ε)")
    dynamic_verification: bool = setting(True, "verify 1 to 10 candidates at a position, by its confidence")
    tree_widths: str = setting(
        "paper",
        "numbers of candidates: paper, or authors (of their code, more in greedy decoding)",
        choices=("paper", "authors"),
    )
    max_siblings: int | None = setting(
        32, "most candidates beside a draft's path; none sets no limit (the paper)", minimum=0
    )


def candidate_count(confidence: float) -> int:
    """1 to 10 candidates to verify at a draft position, by its confidence (section 4.2, dynamic verification)."""
    return _width(confidence, _PAPER_WIDTHS)


def authors_greedy_count(confidence: float) -> int:
    """``candidate_count`` of the authors' code in greedy decoding, 3 to 10. In sampling it is the paper's."""
    return _width(confidence, _AUTHORS_GREEDY_WIDTHS)


def _width(confidence: float, widths: tuple[int, ...]) -> int:
    return widths[sum(confidence <= bound for bound in _SURER_THAN)]


def matchness(
    probe: Probe, kept: KeptSet, window: int, end: int | None = None, precision: Precision | None = None
) -> float:
    """The share of ``window`` (γ) successive tokens that a kept set predicts, in one forward (equations 3 and 4).

    The window ends at ``end`` tokens of prompt and output; by default with the pending token.
    """
    predicted = probe.score(kept, window, end, precision).argmax(-1)
    end = probe.committed + 1 if end is None else end
    return int((predicted == probe.token_ids[end - window : end]).sum()) / window


def matchness_if_above(
    probe: Probe, kept: KeptSet, window: int, best: float, end: int, precision: Precision | None = None
) -> float:
    """``matchness`` where it can be above the best one, and else that of the window's first quarter.

    The result is above ``best`` exactly where the matchness is; most candidates cost a quarter of the rows.
    """
    first = window // _FIRST_PART
    if first:
        start = matchness(probe, kept, first, end - (window - first), precision)
        if start * first + (window - first) <= best * window:
            return start
    return matchness(probe, kept, window, end, precision)


@register
class Swift(SelectingMethod):
    """SWIFT (Xia et al. 2025), sections 4.1 and 4.2.

    Until a request has γ output tokens, the best set so far drafts (context accumulation; section 4.1.1 says uniform
    skipping, ``accumulation=uniform``). After that every round
    begins with an optimisation step: a candidate set, random or from a Gaussian process, predicts γ tokens, and the
    best set so far drafts. The search goes on over all requests until it ends (``SwiftSearch``).

    The γ tokens are ``y_1 … y_γ`` of equation 3, the first after the prompt, the same for all candidates of a request.
    In the authors' code they are ``y_2 … y_(γ+1)``, and steps begin with γ + 3 tokens (``window=authors``). With
    ``window=sliding`` (ours) they are the last γ.

    Ours: at most ``max_siblings`` candidates beside the path, the first ones. Their number depends on the confidences
    alone and not on the drafted tokens, so sampling stays exact. With ``schedule=ours`` a round begins with a step only
    where that pays, and candidates that cannot be the best after a quarter of their tokens are not tried on the others.
    """

    name = "swift"
    summary = "searches the skipped sublayers during generation, drafts token trees by confidence"
    source = "SWIFT (Xia et al. 2025)"
    Settings = SwiftSettings
    settings: SwiftSettings

    def __init__(self, target: Target, settings: SwiftSettings) -> None:
        super().__init__(target, settings)
        ratio = sublayer_ratio(target, settings.skip_ratio, settings.fixed_ends)
        if settings.skip_ratio is None and settings.ratio_rule == "paper":
            ratio = _LARGE_RATIO if target.parameter_count >= _LARGE_MODEL else _RATIO
        self.search = SwiftSearch(target.layer_count, replace(settings, skip_ratio=ratio))

    @property
    def needs(self) -> Needs:
        """Cache slots for the candidates of a tree and, at other times, for the tokens that a candidate predicts."""
        settings = self.settings
        # All positions but the last have a confidence above the threshold, or equal to it, which is too rare to count.
        before_last = self._widths(samples=False)(math.nextafter(settings.confidence_threshold, 1.0)) - 1
        siblings = (settings.max_draft_length - 1) * before_last + MOST_CANDIDATES - 1
        if settings.max_siblings is not None:
            siblings = min(settings.max_siblings, siblings)
        return Needs(
            sibling_rows=siblings if settings.dynamic_verification else 0,
            probe_rows=settings.context_window if settings.max_optimization_steps else 0,
        )

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _SwiftDrafter(self, prefill)

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """The best set after the optimisation steps of all requests drafts for every one of them."""
        return with_kept_set(drafts, self.search.kept) if self.settings.share_kept_set else list(drafts)

    @property
    def last_choice(self) -> Selected:
        """The best set so far, and what came of it over all requests."""
        kept = self.search.kept
        with self._lock:
            if self._choice is None or self._choice.selection != kept:
                self._choice = self.choice_of(kept)
            return self._choice

    def choice_of(self, selection: KeptSet) -> Selected:
        """Drafts with a kept set."""
        return Selected(selection, self.draft(selection, samples=False), self.new_record(selection))

    def draft(self, kept: KeptSet, samples: bool) -> LayerDraft:
        """Drafts with a kept set, for a request that samples its tokens or not (``tree_widths=authors``)."""
        settings = self.settings
        threshold = settings.confidence_threshold
        return LayerDraft(
            kept,
            limit=settings.max_draft_length,
            stop=ConfidenceThreshold(threshold) if threshold > 0 else None,
            widths=self._widths(samples) if settings.dynamic_verification else None,
        )

    def _widths(self, samples: bool) -> TreeWidths:
        authors = self.settings.tree_widths == "authors" and not samples
        return authors_greedy_count if authors else candidate_count

    def gain(self) -> float | None:
        """Share of the time that the next step of the search is expected to save; ``None`` if nothing is known."""
        improvement, best = self.search.expected_improvement(), self.search.matchness
        if improvement is None or best is None:
            return None
        longest = self.settings.max_draft_length
        cost = draft_cost(self.search.kept, self.draft_precision, self.target.dtype)
        now, then = (expected_speedup(rate, cost, longest) for rate in (best, min(1.0, best + improvement)))
        return 1 - max(1.0, now) / max(1.0, then)

    def state(self) -> LearnedState:
        """The state of the search."""
        return self.search.state()

    def restore(self, state: LearnedState) -> None:
        """Loads the state of a search of the same skip ratio over as many layers."""
        self.search.restore(state)


class _SwiftDrafter(SelectingDrafter):
    method: Swift

    def __init__(self, method: Swift, prefill: Prefill) -> None:
        super().__init__(method, prefill)
        settings = method.settings
        self._prompt_length = len(prefill.prompt_ids)
        authors = settings.window == "authors"
        # The last of the first tokens that candidates are scored on, as a number of output tokens.
        self._window_end = settings.context_window + authors
        self._fewest_tokens = self._window_end + _AUTHORS_MORE_TOKENS * authors

    @property
    def gain(self) -> float | None:
        return self.method.gain()

    @property
    def record(self) -> Record:
        """What came of the best set so far, over all requests."""
        return self.method.last_choice.record

    @property
    def _accumulates(self) -> bool:
        """Whether the output is too short to score candidates on it."""
        return self.probe.committed + 1 - self._prompt_length < self._fewest_tokens

    def draft(self) -> Draft:
        search, accumulation = self.method.search, self.method.settings.accumulation
        first = accumulation == "uniform" and self._accumulates and not search.finished
        return self.method.draft(search.start if first else search.kept, self.probe.samples)

    def select(self) -> None:
        """One step of the search, or the check of a search that has ended if it is due; after γ output tokens."""
        method, search = self.method, self.method.search
        if self._accumulates:
            return
        if search.check_is_due():
            search.note_check(self._matchness(search.kept, None))
        elif self.pays():
            best = search.matchness if method.ours else None
            if (candidate := search.next_candidate()) is not None:
                kept = KeptSet.skipping(search.skipped_by(candidate), method.target.sublayer_count)
                with method.payoff.selection():
                    search.observe(candidate, self._matchness(kept, best))

    def _matchness(self, kept: KeptSet, best: float | None) -> float:
        """The score of a set; of one that cannot be above the best score, only roughly."""
        settings, precision = self.method.settings, self.method.draft_precision
        window = settings.context_window
        last = self.probe.committed + 1
        end = last if settings.window == "sliding" else self._prompt_length + self._window_end
        if best is None:
            return matchness(self.probe, kept, window, end, precision)
        return matchness_if_above(self.probe, kept, window, best, end, precision)

    def keep(self, feedback: Feedback) -> None:
        self.method.search.note_round(feedback.drafted, feedback.accepted)
