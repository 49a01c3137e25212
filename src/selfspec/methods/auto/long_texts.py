"""Long texts: costs where attention is a good part of a step, and layer drafts that attend to a part of the text."""

import math
import threading
from dataclasses import dataclass, replace

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

_DOUBT, _SHAPE_DOUBT = 0.35, 0.3
"""Standard deviations of the logarithms of costs (``LiveCosts``) that are estimated by those over other texts: some
processors read keys and values as long as they multiply one row with them, others as long as many."""

_NEAR_DOUBT, _NEAR_SHAPE_DOUBT = 0.1, 0.05
"""The same where costs over texts of half or twice the length, and nearer ones, are known."""


@dataclass(frozen=True)
class LongText:
    """What is known of texts about as long as a request's.

    Attributes:
        verify: costs of the target's forward.
        layers: what drafts.
        confident: how its tokens are accepted, by their confidence.
        end: tokens from which on a text counts among longer ones.
    """

    verify: LiveCosts
    layers: LayerChoice
    confident: AcceptanceRate
    end: int


class LongTexts:
    """Costs and layer drafts of long texts, by their length to half a doubling. May be used by several threads.

    A layer draft that there is for other texts, as of low-bit weights, drafts here, too; else the whole model does.

    Args:
        target: the model.
        verify: costs of its forward over other texts.
        layers: what drafts over these, if anything; no head of the checkpoint.
        confident: how its tokens are accepted.

    Attributes:
        least: tokens from which on a text is long; infinite where kernels cannot do it.
    """

    def __init__(
        self, target: Target, verify: LiveCosts, layers: LayerChoice | None, confident: AcceptanceRate
    ) -> None:
        self._target, self._verify, self._layers = target, verify, layers
        share = attention_share(target, 1) if target.attention_shares(1) is not None else 0.0
        self.least = REACH.slots + _LEAST_SHARE / share if share else math.inf
        self._confident = AcceptanceRate(LOW_BIT_CONFIDENCE) if layers is None else confident
        self._known: dict[int, LongText] = {}
        self._lock = threading.Lock()

    def of(self, length: int) -> LongText:
        """What is known of texts of ``length`` tokens."""
        with self._lock:
            octave = round(2 * math.log2(length))
            if octave not in self._known:
                self._known[octave] = self._expect(octave)
            return self._known[octave]

    def _expect(self, octave: int) -> LongText:
        """Estimates, by what forwards over texts of the nearest length take, or those over other texts."""
        nearest = min(self._known, key=lambda known: abs(known - octave), default=octave)
        near = self._known[nearest] if abs(nearest - octave) in (1, 2) else None
        load_doubt, shape_doubt = (_DOUBT, _SHAPE_DOUBT) if near is None else (_NEAR_DOUBT, _NEAR_SHAPE_DOUBT)
        verifying, drafting = self._estimates(octave)
        if near is not None:
            before, _ = self._estimates(nearest)
            ratios = [now / then for now, then in zip(verifying.seconds, before.seconds, strict=True)]
            known = _costs_now(near.verify).seconds
            verifying = RowCosts(ROW_COUNTS, tuple(own * ratio for own, ratio in zip(known, ratios, strict=True)))
            drafting = _costs_now(near.layers.costs)
        verify = LiveCosts(verifying, load_doubt=load_doubt, shape_doubt=shape_doubt, recorded=self._verify.recorded)
        costs = LiveCosts(drafting, verify, load_doubt=load_doubt, shape_doubt=shape_doubt)
        end = math.ceil(2 ** ((octave + 0.5) / 2))
        return LongText(verify, self._choice(costs), self._confident, end)

    def _estimates(self, octave: int) -> tuple[RowCosts, RowCosts]:
        """What forwards of the target and of the draft take, by those over other texts."""
        own = drafting = _costs_now(self._verify)
        if self._layers is not None:
            drafting = _costs_now(self._layers.costs)
        length = round(2 ** (octave / 2))
        return add_attention(self._target, own, length, own), add_attention(self._target, drafting, REACH.slots, own)

    def _choice(self, costs: LiveCosts) -> LayerChoice:
        """The layers that draft over other texts, or all, with what they attend to here."""
        layers = self._layers
        if layers is None:
            return LayerChoice(Assignment(KeptSet.full(self._target.sublayer_count), reach=REACH), costs)
        assert isinstance(layers.drafts, Assignment)
        return replace(layers, drafts=replace(layers.drafts, reach=REACH), costs=costs, policies=DraftPolicies())


def _costs_now(costs: LiveCosts) -> RowCosts:
    return RowCosts(ROW_COUNTS, tuple(map(costs, ROW_COUNTS)))
