"""``auto``: picks the fastest drafting strategy in every round; the default."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from selfspec.decoding.draft import Draft
from selfspec.decoding.drafter import Drafter, Needs, Prefill
from selfspec.errors import StateError
from selfspec.methods.auto.drafting import AutoDrafter
from selfspec.methods.auto.known import Experience
from selfspec.methods.auto.layer_drafts import MTP, LateWeights, LayerChoice, find_head
from selfspec.methods.auto.long_texts import LongTexts
from selfspec.methods.auto.mask_embeddings import MaskEmbeddingsOfModel
from selfspec.methods.auto.preparation import (
    Assignment,
    AutoSettings,
    Preparation,
    TriedAssignment,
    allowed_bytes,
    expect,
    prepare,
    promises_enough,
    start_over,
    warn_of_memory,
)
from selfspec.methods.auto.together import plan_together
from selfspec.methods.base import Method
from selfspec.methods.mtp import MtpSettings, needs_of
from selfspec.methods.registry import register
from selfspec.methods.state import LearnedState
from selfspec.planning.acceptance_tables import (
    CONFIDENCE,
    LOW_BIT_CONFIDENCE,
    MATCH_LENGTH,
    PROBABILITY,
    AcceptanceRate,
)
from selfspec.planning.allowance import AnswerLengths, HostTime
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.measuring import estimate_row_costs, measure_row_costs
from selfspec.runtimes.costs.rows import MOST_PROBES, MOST_SIBLINGS, RowCosts
from selfspec.runtimes.mtp_head import MtpHead
from selfspec.runtimes.target import Target

_KINDS = ("greedy", "sampled")
_LAYER_DRAFT = "layer_draft"
_NEW = "agreed"
"""What states of earlier versions lack."""


class _Doubt(NamedTuple):
    """Standard deviations of the logarithms of costs (``LiveCosts``)."""

    load: float
    shape: float


_MEASURED, _ESTIMATED = _Doubt(0.3, 0.08), _Doubt(1.0, 0.25)

_FASTER, _SURE = 0.7, 0.1
"""Share of a measured step's time below which steps show that the machine was busy then, and most doubt in that."""


@register
class Auto(Method):
    """Every round it takes what is worth most: plain decoding, known tokens, or a layer draft.

    Known tokens were found by prompt lookup, or chosen after a probe: a row of the last verification whose token was
    not known yet. What a forward costs by its number of rows is estimated, or measured ahead, and follows live rounds.
    How likely a draft token is accepted is learned: for lookup by the length of the match, for others by their
    probability. Every verified token scores lookup at no cost. A layer draft ends where nothing that can still be
    reached is worth its time.

    It is never slower than plain decoding by more than 1.6 steps and, beyond the first 48, a share ``delta``: a draft
    is paid out of time that the request has saved already (``Allowance``).
    """

    name = "auto"
    summary = "takes what promises most tokens a second, round by round"
    source = "conservative bandits (Wu et al. 2016) over the drafts of this library"
    Settings = AutoSettings
    settings: AutoSettings
    learns = True
    begins_at_once = True

    def __init__(self, target: Target, settings: AutoSettings) -> None:
        super().__init__(target, settings)
        self._head = find_head(target, allowed_bytes(target, settings))
        self._ready = _Ready(target, expect(target, settings), self._head)
        self._warned = False

    @property
    def needs(self) -> Needs:
        """Cache slots for siblings and probes beside the known tokens, and what the checkpoint's head reads."""
        probes = Needs(sibling_rows=MOST_PROBES + MOST_SIBLINGS)
        return probes if self._head is None else Needs.union([probes, needs_of(self._head, MtpSettings())])

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        ready = self._settled()
        if not self._warned:
            self._warned = True
            warn_of_memory(ready.preparation, self.settings)
        kind = "sampled" if prefill.probe.samples else "greedy"
        if self.target.ranks.count > 1:
            prefill = replace(prefill, seconds=self.target.ranks.lead([prefill.seconds])[0])
        return AutoDrafter(
            prefill,
            ready.experience[kind],
            ready.verify,
            ready.layers[kind],
            self.settings.delta,
            self.target.ranks.clock,
            ready.mask_embeddings.of_request(prefill.prompt_ids),
            ready.lengths,
            ready.long_texts.get(kind),
        )

    def plan(self, drafters: Sequence[Drafter]) -> list[Draft]:
        """What drafts the next round of several requests, whose rows share a forward."""
        assert all(isinstance(drafter, AutoDrafter) for drafter in drafters)
        return plan_together([each for each in drafters if isinstance(each, AutoDrafter)], self._ready.host)

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Measures costs and chooses the layer draft; uses the kept result if there is one."""
        prepared = prepare(self.target, self.settings, progress)
        costs = None
        if self._head is not None:
            _ = self._head.runner  # makes its low-bit weights, or does without them where memory is short
            costs = measure_row_costs(self._head.own, (0, 1), self._head.precision)
        self._ready = _Ready(self.target, prepared, self._head, costs, weights_made=True)
        self._warned = True

    def _settled(self) -> "_Ready":
        """What is known; where it was measured on a busy machine, estimates take its place, and acceptance stays."""
        ready = self._ready
        if ready.preparation.measured and ready.verify.factor < _FASTER and ready.verify.doubt < _SURE:
            learned, made = self.state(), ready.made
            preparation = start_over(self.target, self.settings, made)
            self._ready = ready = _Ready(self.target, preparation, self._head, weights_made=made is not None)
            self.restore(learned)
        return ready

    def state(self) -> LearnedState:
        """The acceptance of drafts, and the layer draft that it is of. What this machine costs is not part of it."""
        ready = self._ready
        learned = {kind: _to_lists(ready.experience[kind]) for kind in _KINDS}
        return LearnedState({_LAYER_DRAFT: ready.layer_draft, **learned})

    def restore(self, state: LearnedState) -> None:
        """Loads the acceptance of drafts; raises ``StateError`` if it is damaged.

        Another machine may draft with other layers or bits: then the acceptance of its own layer draft stays as it is,
        and that of lookup, which is the model's alone, is loaded.
        """
        ready = self._ready
        if set(state.values) != {_LAYER_DRAFT, *_KINDS}:
            raise StateError("this state has no acceptance of auto; give another file, or start without it")
        for kind in _KINDS:
            _restore(_fresh(ready.trial), state.values[kind])  # all of it is checked before any of it is loaded
        same_layers = state.values[_LAYER_DRAFT] == ready.layer_draft
        for kind in _KINDS:
            _restore(ready.experience[kind], state.values[kind], layers=same_layers)


class _Ready:
    """What is known of the model, with what live rounds add to it."""

    def __init__(
        self,
        target: Target,
        preparation: Preparation,
        head: MtpHead | None = None,
        head_costs: RowCosts | None = None,
        *,
        weights_made: bool = False,
    ) -> None:
        self.preparation, self.trial = preparation, preparation.layers
        trial = self.trial
        doubt = _MEASURED if preparation.measured else _ESTIMATED
        self.verify = LiveCosts(
            preparation.verify, load_doubt=doubt.load, shape_doubt=doubt.shape, recorded=lambda: target.recorded
        )
        self.host = HostTime()
        self.drafts: Assignment | MtpHead | None = None if trial is None else trial.assignment
        costs, weights = None if trial is None else trial.costs, LateWeights()
        if head is not None:
            head_costs = head_costs or estimate_row_costs(head.own, head.precision)
            if costs is None or head_costs(1) <= costs(1):  # one source drafts, and the head is the better one
                self.trial = trial = None
                self.drafts, costs, doubt = head, head_costs, _ESTIMATED
        if trial is not None:
            weights = LateWeights(target, trial.assignment.precision, made=weights_made)
            if promises_enough(trial, preparation.verify):
                weights.make_if_it_takes_no_time()
        self.layers: dict[str, LayerChoice | None] = dict.fromkeys(_KINDS)
        if self.drafts is not None and costs is not None:
            # Load slows layer drafts down as it slows verifications down. A draft that samples takes longer than a
            # greedy one: its scores are processed, and noise is drawn.
            for kind in _KINDS:
                own = LiveCosts(costs, self.verify, load_doubt=doubt.shape, shape_doubt=doubt.shape)
                self.layers[kind] = LayerChoice(self.drafts, own, weights)
        self.experience = {kind: _fresh(trial) for kind in _KINDS}
        self.long_texts = {
            kind: LongTexts(target, self.verify, self.layers[kind], self.experience[kind].confident)
            for kind in (() if isinstance(self.drafts, MtpHead) else _KINDS)
        }
        self.mask_embeddings = MaskEmbeddingsOfModel(target)
        self.lengths = AnswerLengths()

    @property
    def made(self) -> TriedAssignment | None:
        """The layer draft whose low-bit weights are made; ``None`` where there are none."""
        layers = self.layers[_KINDS[0]]
        has_low_bit = self.trial is not None and self.trial.assignment.precision is not None
        return self.trial if has_low_bit and layers is not None and layers.weights.ready else None

    @property
    def layer_draft(self) -> str | None:
        """Identifies the layer draft in a state file; ``None`` without one."""
        if isinstance(self.drafts, MtpHead):
            return MTP
        return None if self.drafts is None else repr(self.drafts)


def _fresh(trial: TriedAssignment | None) -> Experience:
    """What is expected of drafts before the first request."""
    is_low_bit = trial is not None and trial.assignment.is_low_bit
    confident = AcceptanceRate(LOW_BIT_CONFIDENCE if is_low_bit else CONFIDENCE)
    for confidence, agrees in () if trial is None else trial.confidences:
        confident.note(agrees, confidence)
    return Experience(AcceptanceRate(MATCH_LENGTH), AcceptanceRate(PROBABILITY), confident)


def _to_lists(experience: Experience) -> dict[str, list[list[float]]]:
    return {field.name: getattr(experience, field.name).to_lists() for field in fields(Experience)}


def _restore(experience: Experience, values: Any, *, layers: bool = True) -> None:
    names = [field.name for field in fields(Experience)]
    if not isinstance(values, dict) or {_NEW, *values} != set(names):
        raise StateError("this state has no acceptance of auto; give another file, or start without it")
    for name in values if layers else values.keys() - {"confident"}:
        getattr(experience, name).restore(values[name])
