"""``auto`` at work on one request: plans the round that is worth most, and learns from what came of it."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from selfspec.decoding.draft import Draft, LayerDraft, MtpDraft, NoDraft, RunDraft, RunRound, TokenDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.methods.auto.known import Experience, KnownTokens
from selfspec.methods.auto.layer_drafts import LayerChoice, LayerDrafts
from selfspec.methods.auto.long_texts import LongTexts
from selfspec.methods.auto.mask_embeddings import MaskEmbeddings
from selfspec.methods.auto.planned import PlannedRound
from selfspec.planning.allowance import (
    CREDIT,
    UNKNOWN,
    Allowance,
    AnswerLengths,
    Backoff,
    Pace,
    PlanningTime,
    RoundOverhead,
    Trust,
    faded,
    stake,
)
from selfspec.planning.plans import FilledRows, Known, Plan, fill_rows, plain
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable
from selfspec.runtimes.mtp_head import MtpText
from selfspec.runtimes.seen_text import AttentionShares
from selfspec.types import PhaseSeconds

_MOST_FOLLOWED = 16
"""Tokens of a run after which layers are thought of again."""

_LONGEST_RUN = 128
"""Tokens after which a run ends, so that the next one is planned by what its rounds took."""

_FEW_STEPS, _FEWEST_STEPS = 16, 128
"""Rounds of more rows after which one has a single row: where known tokens promise little, and in any case.

What more rows cost is known only beside it. On a machine whose speed changes they could else seem free for ever.
"""

_LITTLE = 0.2
"""Tokens beyond the first."""

_READ_SHARE, _READ_A_SECOND, _LEAST_READ = 0.01, 4e5, 1024
"""Share of the time of a prompt and its answer that reading the prompt for lookup may take, tokens that a second reads,
and tokens that are read in any case."""


class AutoDrafter(Drafter):
    """Drafts one request.

    It updates the acceptance of all requests and the costs of the target's forward (``verify``) and of the layer draft,
    or those of ``long_texts`` from where its text is long. The clock times planning and learning, which are part of the
    time spent.
    """

    def __init__(
        self,
        prefill: Prefill,
        experience: Experience,
        verify: LiveCosts,
        layers: LayerChoice | None,
        delta: float,
        clock: Callable[[], float] = time.perf_counter,
        mask_embeddings: MaskEmbeddings | None = None,
        lengths: AnswerLengths | None = None,
        long_texts: LongTexts | None = None,
    ) -> None:
        self.verify_costs = verify
        self._known = KnownTokens(prefill, experience, mask_embeddings or MaskEmbeddings())
        self._layers = LayerDrafts(layers, prefill, experience.confident, self._known.lookup, clock)
        self._long_texts, self._length = long_texts, len(prefill.prompt_ids)
        self._longer_from = math.inf if long_texts is None else long_texts.least
        self._allowance = Allowance(delta, CREDIT, prefill.seconds)
        self._overhead, self._pace = RoundOverhead(), Pace()
        self._planning, self._planning_of_runs = PlanningTime(), PlanningTime()
        self._backoff = Backoff()
        self._saved_by_known = 0.0  # seconds
        self._trust: dict[str, Trust] = defaultdict(Trust)
        self._room, self._lengths = prefill.room, lengths or AnswerLengths()
        self._mean_length, self._prompt_seconds = self._lengths.begin(), prefill.seconds
        self._reading = self._to_pay = 0.0  # seconds of looking through text that no round has counted yet
        self._clock = clock
        self._planned = 0.0
        self._round: PlannedRound | None = None
        self._offered: Known | None = None  # in a batch
        self._taken: PlannedRound | None = None
        self._without_layers = 0  # tokens that are written before a batch thinks of layers again
        self._followed = 0  # tokens of the run that was learned from already
        self._unplanned = 0  # rounds of the run in which nothing was planned
        self._fills: Sequence[int] = ()
        self._runs = True  # whether rounds have followed each other in one call, as far as is known

    def plan(self) -> Draft:
        """What drafts the next round of this request alone."""
        self.follow_length()
        backs_off = self._backoff.on
        if backs_off and (before := self._round) is not None and before.backs_off and before.shared is None:
            return self._plan_as_before(before)
        if not backs_off:
            self._catch_up_alone()
        began = self._clock()
        (forwards, fills), certain = self.verify_costs.filled_up(), self.verify_costs.doubt <= UNKNOWN
        follow, runs = self._follow if certain else None, self._runs and certain
        known = self._overhead.added_in_runs(forwards, self._planning_mean) if runs else ()
        if runs and self.layer_costs is None:  # no round is alone
            verify: CostTable = [0.0, forwards[1] + self._overhead.step, *known[2:]]
        else:
            verify = self._overhead.added_to(forwards, self._planning.mean)
        known = known or verify
        layers_follow = follow is not None and self.mtp_text is not None
        self._round = planned = PlannedRound(1, 1, verify, known, follow, None, backs_off, layers_follow, verify[1])
        self._fills, self._followed, self._unplanned = fills, 0, 0
        planned.fills = self._filled_now
        longest = self.longest(verify[1])
        is_plain = backs_off or not certain or self._is_held_back(planned, longest)
        draft = planned.plain(held_back=True) if is_plain else self._best(planned, longest)
        if planned.gain:
            self._choose_mask_embedding(planned)
        self._planned = self._clock() - began - planned.preparing
        return draft

    def _step_is_due(self, promised: float = math.inf) -> bool:
        """Whether a round has to have a single row, whatever a draft promises, or where it is that many tokens more."""
        return self.verify_costs.without_step >= (_FEW_STEPS if promised < _LITTLE else _FEWEST_STEPS)

    @property
    def _filled_now(self) -> Sequence[int]:
        """By the rows of a verification those that it is filled up to; as they are where a step is due."""
        return () if self._step_is_due() else self._fills

    def _plan_as_before(self, before: PlannedRound) -> NoDraft | TokenDraft:
        """A step of plain decoding after one for which nothing was planned either."""
        began = self._clock()
        before.preparing, before.fills, self._followed, self._unplanned = 0.0, self._filled_now, 0, 0
        draft = before.plain(held_back=True)
        self._planned = self._clock() - began
        return draft

    def follow_length(self) -> None:
        """Counts by the costs of longer texts, and drafts as there, if the text has become so long."""
        if self._long_texts is not None and self._length >= self._longer_from:
            text = self._long_texts.of(self._length)
            self.verify_costs, self._longer_from = text.verify, text.end
            self._layers.change(text.layers, text.confident)

    def longest(self, step: float) -> float:
        """Most seconds of the next round, if a plain step, or its share, takes ``step``."""
        return self._allowance.longest(step)

    def begin(self, planned: PlannedRound) -> None:
        """Begins a round in a batch, or several of a run, whose tokens are then offered and taken."""
        self._backoff.end()
        self._catch_up()
        planned.preparing, planned.reading = self._reading, self._to_pay
        self._reading = self._to_pay = 0.0
        self._round, self._followed = planned, 0

    def offer(self) -> Known:
        """In a batch: the known tokens, and how likely they are as far as that can be trusted."""
        self._offered = known = self._known.likeliest()
        trust = self._trust[known.name].value
        return Known(known.name, known.token_ids, [min(1.0, trust * each) for each in known.survival])

    def take(self, length: int, seconds: float, step: float) -> NoDraft | TokenDraft:
        """Drafts some of the tokens that it offered; it pays some seconds of the round, and ``step`` of a plain one."""
        planned, known = self._round, self._offered
        assert planned is not None
        planned.seconds, planned.step, self._taken = seconds, step, planned
        if not length:
            return planned.plain()
        assert known is not None
        return planned.take(FilledRows(known, Plan(length, 1 + sum(known.survival[:length]), seconds)))

    def or_layers(self, drafting: int) -> Draft | None:
        """A layer draft, if it is worth more than what was taken; ``drafting`` requests share its forwards."""
        assert self._taken is not None
        assert self._taken.seconds is not None
        self._round = planned = replace(self._taken, drafting=drafting)
        longest = self.longest(planned.step)
        planned.fastest = self._layers.fastest(planned, longest)
        known = Plan(planned.rows - 1, planned.expected, self._taken.seconds)
        worth = known.worth(planned.rate, self._trust[planned.name].value)
        draft = self._layers.draft(planned, longest, worth, self._expected_room)
        self._taken.preparing = planned.preparing
        if draft is None:
            self._without_layers = _MOST_FOLLOWED
        else:
            planned.seconds = None
        return draft

    def plan_nothing(self, planned: PlannedRound) -> None:
        """A round of plain decoding in a batch for whose requests no draft could pay; they share ``planned``."""
        self._round = planned

    def layers_may_gain(self, least: float) -> bool:
        """Whether layers promise at least this acceptance rate."""
        if self.layer_costs is None or self._without_layers > 0 or least > 1:
            return False
        self._catch_up()
        return self._layers.likelihood >= least

    @property
    def rounds_left(self) -> float:
        """Rounds of plain decoding after which it is expected to end, at its pace."""
        return max(1, self._expected_room) / self._pace.over_plain

    @property
    def _expected_room(self) -> int:
        """Tokens that the answer is expected to have still: as many as answers have, however many it has already."""
        return min(self._room, self._mean_length)

    @property
    def likelihood(self) -> float:
        """The probability that the next token is known, and never more than is ever counted on."""
        return self._known.likelihood

    @property
    def attention_shares(self) -> AttentionShares | None:
        """Where layer drafts attend to a part of the text."""
        return self._layers.attention_shares

    @property
    def layer_costs(self) -> LiveCosts | None:
        """Costs of the forward of the layer draft; ``None`` without one."""
        return self._layers.costs

    @property
    def watched(self) -> Collection[int]:
        """The target's states that the checkpoint's head reads, if it drafts."""
        return self._layers.watched

    followed = watched

    @property
    def mtp_text(self) -> MtpText | None:
        """What the checkpoint's head knows of the text, if it drafts in native runs."""
        return self._layers.text

    @property
    def mask_embedding(self) -> torch.Tensor | None:
        """The mask embedding of probes."""
        return self._known.mask_embeddings.chosen

    def _best(self, planned: PlannedRound, longest: float) -> NoDraft | TokenDraft | LayerDraft | MtpDraft:
        """What is worth most of all that takes at most ``longest`` seconds."""
        if self._step_is_due():
            return planned.plain()
        rows = planned.known
        planned.fastest = self._layers.fastest(planned, longest)
        planned.awaited = self._layers.awaited(planned)
        planned.gain = self._known.gain_of_probe(rows[3] - rows[2], planned.rate)
        filled, worth = self._filled_rows(planned, longest)
        draft = self._layers.draft(planned, longest, worth, self._expected_room)
        if draft is None:
            return self._take(planned, filled)
        self._backoff.end()
        return draft

    def _take(self, planned: PlannedRound, filled: FilledRows | None) -> NoDraft | TokenDraft:
        """Verifies known tokens; without any a step, in which time comes back for layers that are waited for."""
        if filled is not None:
            self._backoff.end()
            return planned.take(filled)
        if planned.awaited is not None:
            self._back_off(planned)
        return planned.plain(held_back=planned.awaited is not None)

    def _follow(self, played: RunRound) -> RunDraft | None:
        """Plans the next round of a run; ``None`` where layers, which cannot draft in a run, may be worth more.

        Nor are there more where the run, or the text, has become so long that other costs count.
        """
        planned = self._round
        assert planned is not None
        self.learn_of_run(played)
        if self._followed >= _LONGEST_RUN or self._length >= self._longer_from:
            return None
        planned.fills = self._filled_now
        if self._backoff.on:
            planned.backs_off = True
            return planned.plain(held_back=True)
        planned.backs_off = False
        planned.preparing += self._catch_up_alone()
        self._known.read_probe(played.probed)
        if not planned.layers_follow and planned.layers_are_worth > -math.inf and self._followed >= _MOST_FOLLOWED:
            return None
        longest = self.longest(planned.verify[1])
        if self._is_held_back(planned, longest):
            return planned.plain(held_back=True)
        if planned.layers_follow:
            draft = self._best(planned, longest)
            assert not isinstance(draft, LayerDraft)
            return draft
        filled, worth = self._filled_rows(planned, longest)
        return None if worth < planned.layers_are_worth else self._take(planned, filled)

    def _choose_mask_embedding(self, planned: PlannedRound) -> None:
        """Chooses the mask embedding of probes, and makes it now: later that would count as the verification's time."""
        embeddings = self._known.mask_embeddings
        embeddings.choose()
        if not embeddings.is_made:
            began = self._clock()
            embeddings.make()
            planned.preparing += self._clock() - began

    def _is_held_back(self, planned: PlannedRound, longest: float) -> bool:
        """Whether no draft fits in ``longest`` seconds; where planning keeps it so, nothing is planned for a while."""
        if longest > planned.known[2]:
            return False
        self._back_off(planned)
        return True

    def _back_off(self, planned: PlannedRound) -> None:
        """Plans nothing for a while, where planning takes more than comes back meanwhile."""
        if self._planning_mean > self._allowance.regained(planned.verify[1]):
            self._backoff.begin()

    @property
    def _planning_mean(self) -> float:
        """Seconds that planning a round takes; those of a round alone before there was a run."""
        return self._planning_of_runs.mean or self._planning.mean

    def _filled_rows(self, planned: PlannedRound, longest: float) -> tuple[FilledRows | None, float]:
        """The best rows without layers, and what they are worth; ``None`` for a step of plain decoding."""
        step, rate = planned.verify[1], planned.rate
        least = plain(planned.verify).worth(rate)
        if planned.awaited is not None:
            least = max(least, planned.awaited.plan.worth(rate))
        if self._saved_by_known < 0:
            longest -= planned.needed_by_layers
        if not planned.gain and not self._known.any:
            return None, least
        known = self._known.likeliest(beside=self._runs and planned.follow is not None)
        trust = self._trust[known.name].value
        filled = fill_rows(known, planned.known, self._pace.rate(step), stake(longest, step), planned.gain, trust)
        if self._step_is_due(filled.plan.tokens - 1):
            return None, least
        worth = filled.worth(rate, trust)
        return (filled, worth) if (filled.plan.length or filled.probed) and worth > least else (None, least)

    def learn(self, feedback: Feedback) -> None:
        """Scores what was drafted and what lookup would have given, and counts the time."""
        began, planned, committed = self._clock(), self._round, feedback.acceptance.token_ids
        assert planned is not None
        self._layers.learn(feedback)
        if not planned.verify:
            self._learn_of_steps(planned, feedback, began)
            return
        if feedback.run:
            self._learn_from_run(planned, feedback, began)
            return
        if planned.shared is None and isinstance(feedback.draft, RunDraft) and feedback.draft.follow is not None:
            self._runs = False  # it could have been followed
        drafting, confidences = planned.expected_drafting(feedback), feedback.proposal.confidences
        self._learn_of_tokens(planned, committed, confidences, feedback.accepted)
        if planned.guess is not None and confidences:
            self._layers.note_forwards(len(confidences), drafting / planned.costs[1])
        self._known.read_probe(() if feedback.probed_token is None else (feedback.probed_token,))
        # Seconds as costs are, not as they were in this round, so that one disturbed round does not end drafting.
        rows, seconds = 1 + len(feedback.proposal.rows), feedback.seconds
        is_step = rows == 1 or (planned.is_step and planned.guess is None)
        spent = planned.seconds_of(1 if is_step else rows) + planned.share_of_drafting(feedback, drafting)
        if planned.shared is None:
            self.verify_costs.count(rows)
            made = self._forwards(planned, feedback)
            beside = self._learn_costs([rows], seconds, made, feedback.proposal.seconds, is_step=is_step)
            took = self._planned + self._clock() - began
            if planned.backs_off:
                self._backoff.note_rounds(1, took)
                beside = self._backoff.round_seconds
            else:
                self._planning.note(took)
            spent += beside
        self._note_time(planned, len(committed), spent)
        if planned.shared is not None:
            made = self._forwards(planned, feedback)
            self._share(planned, feedback, began, [rows], seconds.draft, made)

    def _learn_of_steps(self, planned: PlannedRound, feedback: Feedback, began: float) -> None:
        """Counts steps of a batch in which no drafts were looked for."""
        token_ids = feedback.acceptance.token_ids
        self._count(len(token_ids))
        self._known.put_off(token_ids)
        self._share(planned, feedback, began, [1] * len(token_ids))

    def _share(
        self,
        planned: PlannedRound,
        feedback: Feedback,
        began: float,
        rows: Sequence[int],
        draft_seconds: float = 0.0,
        forwards: Sequence[int] = (),
    ) -> None:
        """Adds rows of verifications and their time to those of the batch; it learns since ``began``."""
        assert planned.shared is not None
        seconds = feedback.seconds
        planned.shared.note(
            *(rows, len(feedback.acceptance.token_ids), self._room, seconds.verify),
            *(draft_seconds, forwards, self.layer_costs),
            host_seconds=seconds.select + seconds.other + self._clock() - began - planned.preparing,
            reading=planned.reading,
            value=planned.value,
        )

    def _forwards(self, planned: PlannedRound, feedback: Feedback) -> Sequence[int]:
        """The rows of each forward of the layer draft whose time says what forwards cost."""
        if planned.guess is None:
            return ()
        return self._layers.timed(feedback.proposal.forwards)

    def _learn_costs(
        self,
        rows: Sequence[int],
        seconds: PhaseSeconds,
        forwards: Sequence[int],
        drafting: float | None = None,
        *,
        is_step: bool,
    ) -> float:
        """Learns what rounds of this request alone took; returns what each took beside what is planned for.

        Of the time of a draft, forwards took ``drafting`` where that is known, or this request's share where others
        drafted beside it. The rest is the host's: it is that of a round, however long the draft, and would make
        forwards dear that were learned of in short ones.
        """
        self.verify_costs.note(rows, seconds.verify)
        drafting = seconds.draft if drafting is None else min(drafting, seconds.draft)
        if forwards and self.layer_costs is not None:
            self.layer_costs.note(forwards, drafting)
        if not is_step:
            self._overhead.note(sum(rows), seconds.other + seconds.draft - drafting)
            return 0.0
        self._overhead.note_steps(len(rows), seconds.other)
        return self._planning.mean

    def _learn_of_rows(self, run: Sequence[RunRound]) -> None:
        """Learns what rounds of a run of this request alone took, apart for each number of rows."""
        times = defaultdict[int, list[float]](list)
        for each in run:
            times[each.rows].append(each.seconds)
        self.verify_costs.note_kinds([([rows] * len(each), sum(each)) for rows, each in sorted(times.items())])

    def learn_of_run(self, played: RunRound) -> None:
        """Learns from a round of a run that is under way."""
        planned, token_ids = self._round, played.token_ids
        assert planned is not None
        if planned.shared is None:
            self.verify_costs.count(played.rows)
        self._followed += len(token_ids)
        self._learn_of_tokens(planned, token_ids, played.confidences, played.accepted, played.siblings)
        if planned.backs_off:
            self._unplanned += 1
            seconds = planned.step + self._backoff.round_seconds
        else:
            seconds = planned.seconds_in_run(len(played.drafted))
        self._note_time(planned, len(token_ids), seconds)

    def _note_time(self, planned: PlannedRound, tokens: int, seconds: float) -> None:
        """Counts what a round took by what it wrote."""
        step = planned.step
        self._pace.note(tokens, seconds, step)
        self._allowance.note(tokens, seconds, step)
        if planned.is_known:
            self._saved_by_known += tokens * step - seconds

    def _learn_of_tokens(
        self,
        planned: PlannedRound,
        token_ids: Sequence[int],
        confidences: Sequence[float],
        accepted: int,
        siblings: Sequence[int] = (),
    ) -> None:
        """Scores by the tokens of a round what was known, and what was drafted, unless the request is held back."""
        if self._backoff.on:
            self._known.put_off(token_ids)
        elif planned.guess is None:
            self._known.extend(token_ids, siblings)
            self._forget(faded(len(token_ids)))
        else:
            self._known.extend(token_ids)
            self._layers.note(confidences, accepted)
        if planned.is_known:
            self._trust[planned.name].note(planned.expected - 1, len(token_ids) - 1)
        self._count(len(token_ids))

    def _count(self, tokens: int) -> None:
        """Counts tokens that were written."""
        self._room -= tokens
        self._length += tokens
        self._lengths.note(tokens)
        self._without_layers -= tokens
        self._backoff.pass_by(tokens)

    def _catch_up_alone(self) -> float:
        """``_catch_up`` of a request alone, which pays for it; returns the seconds."""
        self._catch_up()
        seconds = self._reading
        if self._to_pay:
            self._allowance.note(0, self._to_pay, 0.0)
        self._reading = self._to_pay = 0.0
        return seconds

    def _catch_up(self) -> None:
        """Looks through the prompt, and through tokens that were put off.

        Of a prompt as many tokens are read as take a small share of its own time, which is free, and of its answer's.
        """
        if self._known.prompt_is_unread:
            began, free = self._clock(), _READ_SHARE * self._prompt_seconds
            share = free + _READ_SHARE * self._expected_room * self.verify_costs(1)
            self._known.read_prompt(max(_LEAST_READ, int(share * _READ_A_SECOND)))
            took = self._clock() - began
            self._reading += took
            self._to_pay += max(0.0, took - free)
        if self._known.has_unread:
            began = self._clock()
            tokens = self._known.catch_up()
            self._forget(faded(tokens))
            seconds = self._clock() - began
            self._to_pay += self._backoff.reading(tokens, seconds)
            self._reading += seconds

    def _learn_from_run(self, planned: PlannedRound, feedback: Feedback, began: float) -> None:
        """Learns from the last round of a run, and from the time that all took."""
        self._runs = True
        if rest := feedback.acceptance.token_ids[self._followed :]:
            last = feedback.run[-1]
            self.learn_of_run(last if len(rest) == len(last.token_ids) else replace(last, token_ids=rest))
        self._known.read_probe(feedback.run[-1].probed)
        seconds, rows = feedback.seconds, [each.rows for each in feedback.run]
        if planned.shared is not None:
            self._share(planned, feedback, began, rows)
            return
        if self._unplanned == len(rows):
            self._backoff.note_rounds(len(rows), seconds.select + self._clock() - began - planned.preparing)
            return
        drafted = (1,) * sum(len(each.confidences) for each in feedback.run)
        if drafted:
            self._learn_costs(rows, seconds, self._layers.timed(drafted), is_step=True)
        else:
            self._learn_of_rows(feedback.run)
            self._overhead.note_steps(len(rows), seconds.other)
        selecting = seconds.select + self._clock() - began - planned.preparing
        backed_off = self._unplanned * self._backoff.round_seconds
        self._planning_of_runs.note(max(0.0, selecting - backed_off) / (len(rows) - self._unplanned))

    def _forget(self, share: float) -> None:
        """Forgets a share of what went wrong in this request, so that it is tried again some time."""
        self._layers.fade(share)
        self._known.fade(share)
        for trust in self._trust.values():
            trust.fade(share)

    def observe(self, feedback: Feedback) -> None:
        """Scores what lookup would have given in a round that another drafter of the request planned."""
        self._layers.learn(feedback)
        self._catch_up()
        token_ids = feedback.acceptance.token_ids
        self._known.extend(token_ids)
        self._count(len(token_ids))
