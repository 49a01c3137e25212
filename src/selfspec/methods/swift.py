"""SWIFT: searches the set of skipped sublayers while it generates, and drafts token trees with the best so far."""

import math
from dataclasses import dataclass

from selfspec.decoding.draft import Draft, LayerDraft
from selfspec.decoding.probe import Probe
from selfspec.decoding.stopping import ConfidenceThreshold, TreeWidths
from selfspec.methods.base import Drafter, Feedback, Method, Needs, Prefill
from selfspec.methods.layer_search import skipped_by
from selfspec.methods.registry import register
from selfspec.methods.settings import setting
from selfspec.methods.state import LearnedState
from selfspec.methods.swift_search import SwiftSearch, SwiftSearchSettings
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

MOST_CANDIDATES = 10

_SURER_THAN = (0.95, 0.8, 0.5)
_PAPER_WIDTHS = (1, 3, 5, MOST_CANDIDATES)
_AUTHORS_GREEDY_WIDTHS = (3, 5, 8, MOST_CANDIDATES)


@dataclass(frozen=True)
class SwiftSettings(SwiftSearchSettings):
    """Settings of ``swift``: those of its search, then those of its drafts."""

    context_window: int = setting(
        32, "output tokens that a candidate has to predict (γ), and that have to be there before", minimum=1
    )
    window: str = setting(
        "fixed",
        "tokens that candidates predict: fixed, the first γ of the request's output (equation 3), or sliding, the last "
        "γ (ours)",
        choices=("fixed", "sliding"),
    )
    max_draft_length: int = setting(25, "longest draft (N_D)", minimum=1, maximum=64)
    confidence_threshold: float = setting(
        0.8, "stop drafting behind a token less confident than this (ε); 0 never stops", minimum=0.0, maximum=1.0
    )
    dynamic_verification: bool = setting(
        True, "verify up to 10, 5, 3, 1 candidates where the confidence is up to 0.5, 0.8, 0.95, 1"
    )
    tree_widths: str = setting(
        "paper",
        "candidates by confidence: paper, or authors, whose code verifies 10, 8, 5, 3 in greedy decoding",
        choices=("paper", "authors"),
    )
    max_siblings: int = setting(
        32, "most candidates of a draft beside its path; each takes a cache slot (the paper has no bound)", minimum=0
    )


def candidate_count(confidence: float) -> int:
    """How many candidates to verify at a draft position (section 4.2, dynamic verification).

    Args:
        confidence: the draft's largest probability there, 0 to 1.
    """
    return _width(confidence, _PAPER_WIDTHS)


def authors_greedy_count(confidence: float) -> int:
    """``candidate_count`` of the authors' code in greedy decoding; in sampling it has the paper's.

    Args:
        confidence: the draft's largest probability there, 0 to 1.
    """
    return _width(confidence, _AUTHORS_GREEDY_WIDTHS)


def _width(confidence: float, widths: tuple[int, ...]) -> int:
    return widths[sum(confidence <= bound for bound in _SURER_THAN)]


def matchness(probe: Probe, kept: KeptSet, window: int, end: int | None = None) -> float:
    """The share of ``window`` successive tokens that a kept set predicts, in one forward (equations 3 and 4).

    Args:
        probe: of the request.
        kept: the candidate.
        window: how many tokens (γ).
        end: length of prompt and output up to the window's end; if not given, all of it, the pending token included.
    """
    predicted = probe.score(kept, window, end).argmax(-1)
    end = probe.committed + 1 if end is None else end
    return int((predicted == probe.token_ids[end - window : end]).sum()) / window


@register
class Swift(Method):
    """SWIFT (Xia et al. 2025), sections 4.1 and 4.2.

    Until a request has written γ tokens the best set so far drafts it (context accumulation). From then on every round
    begins with an optimisation step: a candidate set, random or proposed by a Gaussian process, predicts γ tokens, and
    the best one seen drafts. The search goes on over all requests until it ends (``SwiftSearch``), and with
    ``recheck_interval`` begins anew where its set is no good any more.

    The γ tokens are ``y_1 … y_γ`` of equation 3, the first after the prompt, the same for all candidates of a request.
    (The authors' code has ``y_2 … y_(γ+1)``.) With ``window=sliding`` (ours) they are the last γ, so that a search
    follows a long output, but each candidate is scored on another text. Checks of ``recheck_interval`` use the same
    window; a fixed one scores the same set alike as long as the request lasts.

    Ours: at most ``max_siblings`` candidates beside the path, the first ones. Their number depends on the confidences
    alone, never on a drafted token, so that sampling stays exact.
    """

    name = "swift"
    summary = "searches the skipped sublayers while generating, drafts token trees as far as the draft is confident"
    source = "SWIFT (Xia et al. 2025)"
    learns = True
    Settings = SwiftSettings
    settings: SwiftSettings

    def __init__(self, target: Target, settings: SwiftSettings) -> None:
        super().__init__(target, settings)
        self.search = SwiftSearch(target.layer_count, settings)

    @property
    def needs(self) -> Needs:
        """Slots for the candidates of a tree and, never at the same time, for the tokens that a set predicts."""
        settings = self.settings
        # All positions but the last are more confident than the threshold, or just as confident, which is too rare.
        before_last = self._widths(samples=False)(math.nextafter(settings.confidence_threshold, 1.0)) - 1
        siblings = (settings.max_draft_length - 1) * before_last + MOST_CANDIDATES - 1
        return Needs(
            sibling_rows=min(settings.max_siblings, siblings) if settings.dynamic_verification else 0,
            probe_rows=settings.context_window if settings.max_optimization_steps else 0,
        )

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _SwiftDrafter(self, prefill)

    def draft(self, samples: bool) -> LayerDraft:
        """Drafts with the best set so far.

        Args:
            samples: whether the request draws its tokens, for ``tree_widths=authors``.
        """
        settings = self.settings
        threshold = settings.confidence_threshold
        return LayerDraft(
            self.search.kept,
            limit=settings.max_draft_length,
            stop=ConfidenceThreshold(threshold) if threshold > 0 else None,
            widths=self._widths(samples) if settings.dynamic_verification else None,
        )

    def _widths(self, samples: bool) -> TreeWidths:
        authors = self.settings.tree_widths == "authors" and not samples
        return authors_greedy_count if authors else candidate_count

    def state(self) -> LearnedState:
        """The search so far."""
        return self.search.state()

    def restore(self, state: LearnedState) -> None:
        """Takes up a search.

        Raises:
            StateError: it is no search of this skip ratio over this many layers.
        """
        self.search.restore(state)


class _SwiftDrafter(Drafter):
    def __init__(self, method: Swift, prefill: Prefill) -> None:
        self._method = method
        self._probe = prefill.probe
        self._prompt_length = len(prefill.prompt_ids)

    def plan(self) -> Draft:
        """Takes a step of the search, once there is enough output to score candidates on, and drafts with the best."""
        window, search = self._method.settings.context_window, self._method.search
        written = self._probe.committed + 1 - self._prompt_length
        if written >= window and (candidate := search.next_candidate()) is not None:
            kept = KeptSet.skipping(skipped_by(candidate), self._method.target.sublayer_count)
            search.observe(candidate, self._matchness(kept))
        elif written >= window and search.check_is_due():
            search.note_check(self._matchness(search.kept))
        return self._method.draft(self._probe.samples)

    def _matchness(self, kept: KeptSet) -> float:
        settings = self._method.settings
        end = self._prompt_length + settings.context_window if settings.window == "fixed" else None
        return matchness(self._probe, kept, settings.context_window, end)

    def learn(self, feedback: Feedback) -> None:
        self._method.search.note_round(feedback.drafted, feedback.accepted)
