"""Long texts: costs where attention is a good part of a step, and layer drafts that attend to a part of the text."""

import math
import threading
from dataclasses import dataclass, replace

from selfspec.methods.auto.known import Experience
from selfspec.methods.auto.layer_drafts import DraftPolicies, LayerChoice
from selfspec.methods.auto.preparation import Assignment
from selfspec.model.kept import KeptSet
from selfspec.planning.acceptance_tables import LOW_BIT_CONFIDENCE, AcceptanceRate
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.measuring import add_attention, attention_share
from selfspec.runtimes.costs.rows import ROW_COUNTS, RowCosts
from selfspec.runtimes.seen_text import Reach
from selfspec.runtimes.target import Target

REACH = Reach()
"""What drafts on long texts attend to."""

_LEAST_SHARE = 0.3
"""Of a step's time beside attention that attention to what drafts do not see takes, from which on a text is long."""

_DOUBT, _SHAPE_DOUBT = 0.35, 0.15
"""Standard deviations of the logarithms of estimated costs (``LiveCosts``)."""


@dataclass(frozen=True)
class LongText:
    """What is known of texts about as long as a request's: costs of the target's forward, what drafts, acceptance."""

    verify: LiveCosts
    layers: LayerChoice
    experience: Experience


class LongTexts:
    """Costs and layer drafts of long texts, by their length to half a doubling. May be used by several threads.

    A layer draft that there is for other texts, as of low-bit weights, drafts here, too; else the whole model does.

    Args:
        target: the model.
        verify: costs of its forward over other texts.
        layers: what drafts over these, if anything; no head of the checkpoint.
        experience: acceptance in these.
    """

    def __init__(self, target: Target, verify: LiveCosts, layers: LayerChoice | None, experience: Experience) -> None:
        self._target, self._verify, self._layers = target, verify, layers
        share = attention_share(target, 1) if target.attention_shares(1) is not None else 0.0
        self._least = REACH.slots + _LEAST_SHARE / share if share else math.inf  # tokens
        self._experience = experience
        if layers is None:
            self._experience = replace(experience, confident=AcceptanceRate(LOW_BIT_CONFIDENCE))
        self._known: dict[int, LongText] = {}
        self._lock = threading.Lock()

    def of(self, length: int) -> LongText | None:
        """What is known of texts of ``length`` tokens; ``None`` where they are not long, or kernels cannot do it."""
        if length < self._least:
            return None
        with self._lock:
            octave = round(2 * math.log2(length))
            if octave not in self._known:
                self._known[octave] = self._expect(round(2 ** (octave / 2)))
            return self._known[octave]

    def _expect(self, length: int) -> LongText:
        """Estimates, by what forwards over other texts take."""
        others, layers = self._verify, self._layers
        rows = RowCosts(ROW_COUNTS, tuple(map(others, ROW_COUNTS)))
        verify = LiveCosts(
            add_attention(self._target, rows, length, rows),
            load_doubt=_DOUBT,
            shape_doubt=_SHAPE_DOUBT,
            recorded=others.recorded,
        )
        kept = KeptSet.full(self._target.sublayer_count)
        assignment = Assignment(kept, reach=REACH)
        drafting = rows
        if layers is not None and isinstance(layers.drafts, Assignment):
            assignment = replace(layers.drafts, reach=REACH)
            drafting = RowCosts(ROW_COUNTS, tuple(map(layers.costs, ROW_COUNTS)))
        drafting = add_attention(self._target, drafting, REACH.slots, rows)
        costs = LiveCosts(drafting, verify, load_doubt=_DOUBT, shape_doubt=_SHAPE_DOUBT)
        if layers is None:
            return LongText(verify, LayerChoice(assignment, costs), self._experience)
        choice = replace(layers, drafts=assignment, costs=costs, policies=DraftPolicies())
        return LongText(verify, choice, self._experience)
