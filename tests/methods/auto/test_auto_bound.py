"""The bound of ``auto``'s drafter on a simulated clock: plans, rounds played by an adversary, and what it learns."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.auto import after_plain_rounds
from selfspec.decoding.draft import Draft, LayerDraft, NoDraft, Proposal, RunRound, TokenDraft
from selfspec.decoding.drafter import Feedback, Prefill
from selfspec.methods.auto.drafting import AutoDrafter, LayerChoice
from selfspec.methods.auto.known import Experience, KnownTokens
from selfspec.methods.auto.layer_drafts import LateWeights
from selfspec.methods.auto.preparation import Assignment
from selfspec.methods.auto.together import plan_together
from selfspec.model.kept import KeptSet
from selfspec.planning.acceptance_tables import (
    CONFIDENCE,
    MATCH_LENGTH,
    PROBABILITY,
    AcceptanceRate,
    Feature,
    Lookup,
    LookupToAppend,
    LookupToConfirm,
)
from selfspec.planning.allowance import CREDIT, CREDITED, Backoff
from selfspec.planning.plans import PADDING
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.precision import Precision
from selfspec.sampling import acceptance
from selfspec.sampling.acceptance import TokenTree
from selfspec.types import PhaseSeconds

STEP = 0.01
VOCABULARY = 1000
"""Tokens, more than any adversary writes."""
VERIFY = RowCosts((1, 2, 4, 8, 16, 32), tuple(STEP * factor for factor in (1.0, 1.05, 1.2, 1.5, 2.1, 3.3)))
DRAFT = RowCosts((1, 2, 8), (0.35 * STEP, 0.37 * STEP, 0.6 * STEP))
LAYERS = Assignment(KeptSet.full(8), Precision.of(4))
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
RUN = "run"


class Clock:
    """Simulated seconds, of which every interval that is measured takes some."""

    def __init__(self, interval: float) -> None:
        self.now = 0.0
        self._interval = interval
        self._runs = False

    def __call__(self) -> float:
        self.now += self._interval if self._runs else 0.0
        self._runs = not self._runs
        return self.now


@dataclass
class Played:
    """What one sequence drafted in a round."""

    tokens: list[int]
    confidences: list[float] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)  # rows of each
    guessed: int = 0
    probes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adversary:
    """Decides what happens.

    Attributes:
        accepts: how many draft tokens of a round are accepted, by the number that were drafted.
        confidence: of the next draft token.
        confirms: whether a guess is what the draft drafts.
        token: a token of the text; few different ones, so that it repeats itself.
    """

    accepts: Callable[[int], int]
    confidence: Callable[[], float] = lambda: 0.95
    confirms: Callable[[], bool] = lambda: False
    token: Callable[[], int] = lambda: 1


def drafted_by(draft: Draft, adversary: Adversary) -> Played:
    """Drafts as ``decoding`` does, with an adversary for a model."""
    match draft:
        case NoDraft():
            return Played([])
        case TokenDraft(token_ids=token_ids):
            return Played(list(token_ids), probes=draft.probes)
        case LayerDraft() as layers:
            return drafted_by_layers(layers, adversary)
    raise AssertionError(draft)


def drafted_by_layers(draft: LayerDraft, adversary: Adversary) -> Played:
    played, stopped = Played([]), False
    assert draft.stop is not None
    assert draft.guess is not None
    while len(played.tokens) < draft.limit and not stopped:
        guesses = list(draft.guess(played.tokens))[: draft.limit - len(played.tokens) - 1]
        played.forwards.append(1 + len(guesses))
        for row in range(1 + len(guesses)):
            confirmed = row < len(guesses) and adversary.confirms()
            played.tokens.append(guesses[row] if confirmed else adversary.token())
            played.confidences.append(adversary.confidence())
            played.guessed += row > 0
            stopped = draft.stop.stops(played.confidences[-1])
            if stopped or not confirmed:
                break
    assert draft.append is not None
    played.tokens += draft.append(played.tokens, played.confidences)
    return played


def seconds_of(played: Sequence[Played]) -> PhaseSeconds:
    """Seconds of a round of several sequences, each one's share: forwards of drafts run side by side."""
    rows = sum(1 + len(each.tokens) + len(each.probes) for each in played)
    longest = max(len(each.forwards) for each in played)
    drafting = sum(
        DRAFT(sum(each.forwards[index] for each in played if index < len(each.forwards))) for index in range(longest)
    )
    return PhaseSeconds(draft=drafting / len(played), verify=VERIFY(rows) / len(played))


def feedback_of(draft: Draft, played: Played, adversary: Adversary, seconds: PhaseSeconds) -> Feedback:
    count = len(played.tokens)
    accepted = adversary.accepts(count)
    committed = (*played.tokens[:accepted], adversary.token())
    token_ids, tree = torch.tensor(played.tokens, dtype=torch.long), TokenTree.chain(count)
    confidences = tuple(played.confidences)
    proposal = Proposal(
        token_ids,
        tree,
        confidences=confidences,
        guessed=played.guessed,
        forwards=tuple(played.forwards),
        probes=played.probes,
    )
    outcome = acceptance.Acceptance(tuple(range(accepted + 1)), committed)
    guesses = torch.tensor([adversary.token() for _ in played.probes]), torch.tensor([0.9] * len(played.probes))
    probed = Logits(torch.zeros(len(played.probes), VOCABULARY), *guesses) if played.probes else None
    return Feedback(draft, proposal, outcome, lambda: torch.empty(0), {}, seconds, probed)


class Moment(NamedTuple):
    """The end of a round: tokens and seconds so far, the seconds that were counted, and what drafted the round."""

    written: int
    seconds: float
    counted: float
    parts: list[str]


def play_run(
    drafters: Sequence[AutoDrafter],
    drafts: Sequence[Draft],
    adversaries: Sequence[Adversary],
    overhead: float,
    most: int,
    clock: Clock | None = None,
    began: float = 0.0,
) -> Iterator[tuple[list[int], float]]:
    """Plays at most ``most`` rounds of all as one run; gives tokens and seconds of each, and lets drafters learn.

    What the clock counts from ``began`` on while they plan is a part of their time, beside ``overhead`` in each round
    but the first, which is planned before the run and learned from after it, on the clock.
    """
    clock = clock or Clock(0.0)
    rounds: list[list[RunRound]] = [[] for _ in drafters]
    total, planned = 0.0, [draft for draft in drafts if isinstance(draft, NoDraft | TokenDraft)]
    planning = clock.now - began
    while len(planned) == len(drafters):
        own = [drafted_by(*each) for each in zip(planned, adversaries, strict=True)]
        seconds = VERIFY(sum(1 + len(each.tokens) + len(each.probes) for each in own))
        for index, (draft, played, adversary) in enumerate(zip(planned, own, adversaries, strict=True)):
            accepted = adversary.accepts(len(played.tokens))
            committed = (*played.tokens[:accepted], adversary.token())
            guess = ((adversary.token(), 0.9),) if accepted in played.probes else ()
            done = RunRound(draft, tuple(played.tokens), committed, played.probes, guess, seconds=seconds)
            rounds[index].append(done)
        total += seconds
        planned_within = len(rounds[0]) > 1
        yield [len(each[-1].token_ids) for each in rounds], seconds + planned_within * len(drafters) * overhead
        if len(rounds[0]) == most:
            break
        follows = [draft.follow for draft in planned if draft.follow is not None]
        before = clock.now
        laters = [follow(each[-1]) for follow, each in zip(follows, rounds, strict=True)]
        found = [later() if callable(later) else later for later in laters]
        planning += clock.now - before
        planned = [draft for draft in found if draft is not None]
    for drafter, draft, played_rounds in zip(drafters, drafts, rounds, strict=True):
        token_ids = tuple(token for each in played_rounds for token in each.token_ids)
        outcome = acceptance.Acceptance(tuple(range(len(token_ids))), token_ids)
        empty = Proposal(torch.empty(0, dtype=torch.long), TokenTree.chain(0))
        share = 1 / len(drafters)
        took = PhaseSeconds(select=overhead * (len(played_rounds) - 1) + share * planning, verify=share * total)
        drafter.learn(Feedback(draft, empty, outcome, lambda: torch.empty(0), {}, took, None, tuple(played_rounds)))


def play(
    tokens: int,
    adversaries: Sequence[Adversary],
    delta: float,
    overhead: float = 0.0,
    run: int = 1,
    clock: Clock | None = None,
    verify: LiveCosts | None = None,
) -> Iterator[Moment]:
    """Plays rounds until every sequence has ``tokens`` tokens.

    Args:
        tokens: that each sequence writes.
        adversaries: one for each sequence.
        delta: share of plain decoding's time that may be lost.
        overhead: seconds of planning and learning in a round of a sequence.
        run: most rounds of one sequence that follow each other in one call.
        clock: which time passes on; one of its own if not given.
        verify: what verifications are taken to cost; what they do if not given.
    """
    experience = Experience(*(AcceptanceRate(feature) for feature in (MATCH_LENGTH, PROBABILITY, CONFIDENCE)))
    verify, layers, clock = (
        verify or LiveCosts(VERIFY),
        LayerChoice(LAYERS, LiveCosts(DRAFT)),
        clock or Clock(overhead / 2),
    )
    drafters = [
        AutoDrafter(Prefill(PROMPT, 3, probe=None), experience, verify, layers, delta, clock)  # type: ignore[arg-type]
        for _ in adversaries
    ]
    written = [0] * len(drafters)
    while min(written) < tokens:
        began = clock.now
        drafts = plan_together(drafters, after_plain_rounds())
        if run > 1 and all(isinstance(draft, NoDraft | TokenDraft) and draft.follow is not None for draft in drafts):
            for counts, seconds in play_run(drafters, drafts, adversaries, overhead, run, clock, began):
                written = [before + count for before, count in zip(written, counts, strict=True)]
                clock.now += seconds
                yield Moment(sum(written), clock.now, 0.0, [RUN])
            continue
        played = [drafted_by(*each) for each in zip(drafts, adversaries, strict=True)]
        shares = seconds_of(played)
        clock.now += len(drafters) * (shares.draft + shares.verify)
        for index, (drafter, draft, own, adversary) in enumerate(
            zip(drafters, drafts, played, adversaries, strict=True)
        ):
            feedback = feedback_of(draft, own, adversary, shares)
            drafter.learn(feedback)
            written[index] += len(feedback.acceptance.token_ids)
        plain = sum(written) * VERIFY(len(drafters)) / len(drafters)
        saved = [drafter._allowance._plain - drafter._allowance._spent for drafter in drafters]
        counted = plain - sum(saved)
        parts = [draft.name for draft in drafts if draft.name is not None]
        yield Moment(sum(written), clock.now, counted, parts)


def most(written: int, delta: float, step: float, overhead: float = 0.0, count: int = 1) -> float:
    """Seconds that an output may take; where little is written, beside the overhead of planning."""
    few = count * (CREDIT * step + overhead) + written * overhead
    later = max(0, written - count * CREDITED)
    return written * step + few + delta * later * step + count * overhead + 1e-9


def from_data(data: st.DataObject) -> Adversary:
    """An adversary whose every decision hypothesis makes."""
    return Adversary(
        accepts=lambda drafted: data.draw(st.integers(0, drafted)) if drafted else 0,
        confidence=lambda: data.draw(st.sampled_from([0.05, 0.5, 0.97, 0.999])),
        confirms=lambda: data.draw(st.booleans()),
        token=lambda: data.draw(st.integers(1, 4)),
    )


@given(st.data(), st.floats(0.0, 0.1), st.floats(0.0, 1.0), st.integers(1, 20))
def test_an_adversary_cannot_break_the_bound(data: st.DataObject, delta: float, overhead: float, run: int) -> None:
    overhead *= delta * STEP
    for written, seconds, *_ in play(48, [from_data(data)], delta, overhead, run):
        assert seconds <= most(written, delta, STEP, overhead)


def accepts_while_it_explores(most: int) -> Callable[[int], int]:
    """Accepts draft tokens up to a total, and none after that."""
    left = [most]

    def accepts(drafted: int) -> int:
        accepted = min(left[0], drafted)
        left[0] -= accepted
        return accepted

    return accepts


def alternates(period: int) -> Callable[[int], int]:
    """Accepts all draft tokens of ``period`` rounds, none of the next ``period``, and so on."""
    rounds = [0]

    def accepts(drafted: int) -> int:
        rounds[0] += 1
        return 0 if rounds[0] // period % 2 else drafted

    return accepts


def few_tokens() -> Callable[[], int]:
    """A text that repeats itself for a while, and then does not."""
    written = [0]

    def token() -> int:
        written[0] += 1
        return written[0] % 3 if written[0] // 40 % 2 else written[0] * 7919 % 50

    return token


POLICIES: dict[str, Callable[[], Callable[[int], int]]] = {
    "nothing": lambda: lambda drafted: 0,
    "everything": lambda: lambda drafted: drafted,
    "120 tokens, then nothing": lambda: accepts_while_it_explores(120),
    "every other round": lambda: alternates(1),
    "8 rounds, then none of 8": lambda: alternates(8),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("overhead", [0.0, 0.01 * STEP])
@pytest.mark.parametrize("confidence", [0.4, 0.999])
@pytest.mark.parametrize("run", [1, 12])
def test_long_texts_stay_within_the_bound(
    policy: Callable[[], Callable[[int], int]], overhead: float, confidence: float, run: int
) -> None:
    adversary = Adversary(policy(), confidence=lambda: confidence, confirms=lambda: True, token=few_tokens())
    kinds: set[str] = set()
    for written, seconds, _, parts in play(600, [adversary], 0.02, overhead, run):
        assert seconds <= most(written, 0.02, STEP, overhead)
        kinds.update(parts)
    assert kinds - {"plain"}, "nothing was drafted"
    assert (RUN in kinds) == (run > 1)


@pytest.mark.parametrize("run", [1, 600])
@pytest.mark.parametrize("second", [0.93, 0.99])
def test_rows_that_seem_free_are_found_out(second: float, run: int) -> None:
    """The second row costs a twentieth; drafts that are hardly ever right, or padding, would hide that for ever."""
    believed = RowCosts(VERIFY.rows, (STEP, second * STEP, *VERIFY.seconds[2:]))
    verify, drawn = LiveCosts(believed, load_doubt=0.02, shape_doubt=0.03), random.Random(1)
    adversary = Adversary(lambda drafted: 0, token=lambda: drawn.randrange(20))
    played = list(play(3000, [adversary], 0.02, run=run, verify=verify))
    third = 2 * len(played) // 3
    seconds, written = (getattr(played[-1], name) - getattr(played[third], name) for name in ("seconds", "written"))
    assert seconds <= 1.03 * written * STEP
    assert verify(2) > 1.02 * verify(1)


@pytest.mark.parametrize("run", [1, 10])
def test_rows_that_seem_free_are_found_out_by_short_answers(run: int) -> None:
    """No answer has as many rounds as may pass without one of a single row."""
    believed = RowCosts(VERIFY.rows, (STEP, 0.85 * STEP, *VERIFY.seconds[2:]))
    verify, drawn = LiveCosts(believed, load_doubt=0.02, shape_doubt=0.01), random.Random(1)
    adversary = Adversary(
        lambda drafted: int(drawn.random() < 0.05) if drafted else 0,
        confidence=lambda: 0.05,
        token=lambda: drawn.randrange(8),
    )
    for _ in range(60):
        list(play(10, [adversary], 0.02, run=run, verify=verify))
    assert verify(2) > 1.01 * verify(1)


def test_tokens_of_rounds_that_others_planned_count() -> None:
    adversary, draft = Adversary(lambda drafted: 0), NoDraft()
    experience = Experience(*(AcceptanceRate(feature) for feature in (MATCH_LENGTH, PROBABILITY, CONFIDENCE)))
    drafter = AutoDrafter(Prefill(PROMPT, 3, probe=None), experience, LiveCosts(VERIFY), None, 0.02)  # type: ignore[arg-type]
    room, length = drafter._room, drafter._length
    drafter.observe(feedback_of(draft, Played([]), adversary, seconds_of([Played([])])))
    assert (drafter._room, drafter._length) == (room - 1, length + 1)


def test_text_of_which_nothing_is_accepted_is_within_three_percent_after_64_tokens() -> None:
    for written, seconds, *_ in play(400, [Adversary(lambda drafted: 0, token=few_tokens())], 0.02):
        assert written < 64 or seconds <= 1.03 * written * STEP


PLANNING = 0.07 * STEP
"""Seconds to plan a round, much more than the share of a step that may be lost; a tenth of it to read a token later."""


def dear_planning(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock on which time passes whenever a round is planned, or tokens are looked through that were put off."""
    clock, is_held_back, catch_up = Clock(0.0), AutoDrafter._is_held_back, KnownTokens.catch_up

    def planned(self: AutoDrafter, *arguments: Any) -> bool:
        clock.now += PLANNING
        return is_held_back(self, *arguments)

    def read(self: KnownTokens) -> int:
        clock.now += 0.1 * PLANNING * len(self._unread)
        return catch_up(self)

    monkeypatch.setattr(AutoDrafter, "_is_held_back", planned)
    monkeypatch.setattr(KnownTokens, "catch_up", read)
    return clock


BEYOND = 8 * PLANNING
"""Seconds lost beyond the bound: a first run's planning, which says what it takes, and what follows backing off."""


@pytest.mark.parametrize("run", [1, 12])
def test_planning_that_is_dear_ends_where_nothing_may_be_drafted(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    adversary = Adversary(lambda drafted: 0, confidence=lambda: 0.9, token=few_tokens())
    clock = dear_planning(monkeypatch)
    drafted = 0
    for written, seconds, _, parts in play(1000, [adversary], 0.02, 0.0, run, clock):
        assert seconds <= most(written, 0.02, STEP) + BEYOND
        drafted += parts != ["plain"]
    assert drafted
    assert clock.now > 1000 * STEP, "it never tried"


def test_costs_are_neither_looked_up_nor_learned_while_a_request_backs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What little time comes back would go into that."""
    looked_up, noted = [0], [0]

    def counted(method: str, times: list[int]) -> None:
        found = getattr(LiveCosts, method)

        def call(self: LiveCosts, *arguments: Any) -> Any:
            times[0] += 1
            return found(self, *arguments)

        monkeypatch.setattr(LiveCosts, method, call)

    counted("filled_up", looked_up)
    counted("note", noted)
    adversary = Adversary(lambda drafted: 0, confidence=lambda: 0.9, token=few_tokens())
    moments = [*play(1000, [adversary], 0.02, 0.0, 4, dear_planning(monkeypatch))]
    assert 0 < looked_up[0] < len(moments) / 4
    assert 0 < noted[0] < len(moments) / 4


@pytest.mark.parametrize("dear", [False, True])
def test_a_request_backs_off_only_where_planning_takes_more_than_comes_back(
    monkeypatch: pytest.MonkeyPatch, dear: bool
) -> None:
    adversary = Adversary(lambda drafted: 0, confidence=lambda: 0.9, token=few_tokens())
    begin, times, held_back = Backoff.begin, [0], [0]

    def begun(self: Backoff) -> None:
        times[0] += 1
        begin(self)

    monkeypatch.setattr(Backoff, "begin", begun)
    clock = dear_planning(monkeypatch) if dear else None
    is_held_back = AutoDrafter._is_held_back

    def asked(self: AutoDrafter, *arguments: Any) -> bool:
        found = is_held_back(self, *arguments)
        held_back[0] += found
        return found

    monkeypatch.setattr(AutoDrafter, "_is_held_back", asked)
    assert [*play(600, [adversary], 0.02, 0.0 if dear else 0.019 * STEP, 1, clock)]
    assert held_back[0] > 0
    assert (times[0] > 0) == dear


@pytest.mark.parametrize("run", [1, 12])
def test_a_request_that_was_held_back_drafts_again(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    """Nothing is right for 200 tokens, then everything is."""
    written = [0]

    def token() -> int:
        written[0] += 1
        return written[0] % 3

    adversary = Adversary(lambda drafted: drafted if written[0] > 200 else 0, confirms=lambda: True, token=token)
    moments = list(play(500, [adversary], 0.02, 0.0, run, dear_planning(monkeypatch)))
    at = next(index for index, moment in enumerate(moments) if moment.written > 200)
    gained = [after.written - before.written for before, after in itertools.pairwise(moments)]
    assert max(gained[:at]) == 1
    assert max(gained[at:]) > 4
    assert moments[-1].seconds < 0.85 * moments[-1].written * STEP


def test_a_draft_that_is_right_is_much_faster() -> None:
    for run in (1, 12):
        adversary = Adversary(lambda drafted: drafted, confirms=lambda: True)
        *_, (written, seconds, *_) = play(400, [adversary], 0.02, 1e-4, run)
        assert seconds < 0.5 * written * STEP


def test_layers_draft_though_known_tokens_are_always_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup are tried again as soon as a little time comes back; the layers, which need more, need it saved up."""
    monkeypatch.setitem(globals(), "VERIFY", RowCosts((1, 2, 32), (STEP, 1.1 * STEP, 4.1 * STEP)))
    drafted, source = [0], random.Random(0)

    def confidence() -> float:
        drafted[0] += 1
        return 0.95

    def accepts(_: int) -> int:
        by_layers, drafted[0] = drafted[0], 0
        return next((place for place in range(by_layers) if source.random() > 0.9), by_layers)

    kinds: list[str] = []
    for moment in play(300, [Adversary(accepts, confidence, token=few_tokens())], 0.02):
        kinds += moment.parts
        assert moment.seconds <= most(moment.written, 0.02, STEP)
    assert kinds.count("lookup") > 2
    assert kinds.count(LAYERS.name) > 50
    assert moment.seconds < 0.96 * moment.written * STEP


DIP = RowCosts((1, 2, 3, 4, 32), tuple(STEP * each for each in (1.0, 0.8, 2.0, 2.2, 5.0)))


@pytest.mark.parametrize("run", [1, 12])
def test_rows_are_filled_up_where_more_take_less_time(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    """Nothing is known and nothing is right: steps have two rows, and take what these take."""
    monkeypatch.setitem(globals(), "VERIFY", DIP)
    monkeypatch.setitem(globals(), "DRAFT", RowCosts((1, 2), (2 * STEP, 2 * STEP)))
    moments = list(play(100, [Adversary(lambda _: 0, token=different())], 0.02, run=run))
    assert moments[-1].written == len(moments)
    assert moments[-1].seconds < (0.82 * moments[-1].written + CREDIT) * STEP


def test_a_layer_draft_is_filled_up_where_more_rows_take_less_time() -> None:
    """Two drafted tokens are verified in four rows."""
    lookup = Lookup((1, 2, 3), AcceptanceRate(MATCH_LENGTH).of_request())
    costs, fills = LiveCosts(RowCosts((1, 2, 3, 4, 32), (1.0, 1.1, 1.3, 1.1, 4.0))).filled_up()
    confirm = LookupToConfirm(lookup, DRAFT.table(), 0.0)
    append = LookupToAppend(lookup, confirm, lambda _: 0.9, costs, 1.0, 9.0, lambda rows: fills[rows])
    assert list(append([7, 8], [0.9, 0.9])) == [PADDING]
    assert list(append([7, 8, 9], [0.9, 0.9, 0.9])) == []


def test_layers_draft_after_a_lucky_lookup_as_before() -> None:
    """Time is worth the pace of what is to come, not that of the copy: no plain steps until that is forgotten."""
    rounds, tokens = itertools.count(), itertools.count(100)

    def accepts(drafted: int) -> int:
        if not next(rounds):
            return drafted
        return min(drafted, 5) if drafted > 1 else 0  # guesses are wrong

    adversary = Adversary(accepts, confidence=lambda: 0.8, token=lambda: next(tokens))
    moments = list(play(200, [adversary], 0.02))
    first, *later = [part for moment in moments for part in moment.parts]
    assert first == "lookup"
    assert moments[0].written > 5
    assert {*later} == {LAYERS.name}


@given(st.data(), st.integers(2, 4), st.floats(0.0, 0.1), st.floats(0.0, 1.0), st.integers(1, 8))
def test_several_sequences_together_stay_within_the_bound(
    data: st.DataObject, count: int, delta: float, overhead: float, run: int
) -> None:
    step = VERIFY(count) / count
    overhead *= delta * step
    longest = 0.0
    before = 0.0
    for written, seconds, *_ in play(24, [from_data(data) for _ in range(count)], delta, overhead, run):
        longest, before = max(longest, seconds - before), seconds
        assert seconds <= most(written, delta, step, overhead, count) + longest


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("run", [1, 6])
def test_long_texts_of_several_sequences_stay_within_the_bound(
    policy: Callable[[], Callable[[int], int]], run: int
) -> None:
    adversaries = [
        Adversary(policy(), confidence=lambda: 0.9, confirms=lambda: True, token=few_tokens()),
        Adversary(lambda drafted: 0, token=lambda: 7),
        Adversary(lambda drafted: drafted // 2, token=few_tokens()),
    ]
    step, longest, before = VERIFY(3) / 3, 0.0, 0.0
    kinds: set[Any] = set()
    for written, seconds, _, parts in play(300, adversaries, 0.02, run=run):
        longest, before = max(longest, seconds - before), seconds
        assert seconds <= most(written, 0.02, step, count=3) + longest
        kinds.update(parts)
    assert kinds - {"plain"}


def test_guesses_cost_no_more_than_they_may() -> None:
    lookup = Lookup((*PROMPT, 3), AcceptanceRate(Feature((), (0.99,))).of_request())
    free = LookupToConfirm(lookup, DRAFT.table(), 1.0)
    assert len(free(())) == 7
    row = DRAFT(8) - DRAFT(1)
    assert free.seconds == pytest.approx(row)
    limited = LookupToConfirm(lookup, DRAFT.table(), 1.5 * row)
    assert [len(limited(())) for _ in range(3)] == [7, 0, 0]


def test_a_short_draft_is_played_though_long_ones_bring_more() -> None:
    """It wins over a plain step, and only what it saves lets later ones be longer."""
    experience = Experience(*(AcceptanceRate(feature) for feature in (MATCH_LENGTH, PROBABILITY, CONFIDENCE)))
    for _ in range(400):
        experience.confident.note(True, 0.999)
    layers = LayerChoice(LAYERS, LiveCosts(RowCosts((1, 8), (0.55 * STEP, 0.8 * STEP))))
    verify = LiveCosts(RowCosts((1, 2, 64), (STEP, 1.1 * STEP, 1.2 * STEP)))
    drafter = AutoDrafter(Prefill((1, 2, 3), 4, probe=None), experience, verify, layers, 0.02)  # type: ignore[arg-type]
    one, many = 1.999 / 1.65, 30 / (1.2 + 32 * 0.55)
    assert 1 < one < many
    draft = drafter.plan()
    assert isinstance(draft, LayerDraft)
    assert draft.limit == 1


class Reading(Clock):
    """A clock on which reading a token of a prompt takes 2.5 microseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(0.0)
        read = Lookup.read

        def timed(lookup: Lookup, token_ids: Sequence[int]) -> None:
            self.now += 2.5e-6 * len(token_ids)
            read(lookup, token_ids)

        monkeypatch.setattr(Lookup, "read", timed)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0.01 * 64 * STEP), (20.0, 30_001 * 2.5e-6)])
def test_a_long_prompt_is_read_for_lookup_in_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: float
) -> None:
    """On the clock, and not before a round is planned; what takes little beside the prompt's own time is free."""
    clock = Reading(monkeypatch)
    experience = Experience(*(AcceptanceRate(feature) for feature in (MATCH_LENGTH, PROBABILITY, CONFIDENCE)))
    prompt = tuple(range(30_000))
    prefill = Prefill(prompt, 7, probe=None, room=64, seconds=seconds)  # type: ignore[arg-type]
    drafter = AutoDrafter(prefill, experience, LiveCosts(VERIFY), None, 0.02, clock)
    assert clock.now == 0.0
    drafter.plan()
    assert clock.now == pytest.approx(expected, rel=0.01)
    assert drafter._known.lookup._text._own.tokens[-2:] == [29_999, 7]
    assert drafter._allowance._spent == pytest.approx(0.0 if seconds else clock.now)
    assert drafter._planned == pytest.approx(0.0), "it is no planning, as it happens once"


def test_making_weights_is_no_planning() -> None:
    """It takes fifty steps in a round that begins a run; the next round drafts."""
    clock = Clock(0.0)

    class Slow(LateWeights):
        def __init__(self) -> None:
            super().__init__()
            self.ready = False

        def make_if_it_pays(self, saving: float, tokens: int) -> bool:
            clock.now += 50 * STEP
            self.ready = True
            return True

    experience = Experience(*(AcceptanceRate(feature) for feature in (MATCH_LENGTH, PROBABILITY, CONFIDENCE)))
    layers, prefill = LayerChoice(LAYERS, LiveCosts(DRAFT), Slow()), Prefill((1, 2, 3), 4, probe=None, room=99)  # type: ignore[arg-type]
    drafter = AutoDrafter(prefill, experience, LiveCosts(VERIFY), layers, 0.02, clock)
    draft = drafter.plan()
    assert isinstance(draft, NoDraft | TokenDraft)
    assert layers.weights.ready
    played = list(play_run([drafter], [draft], [Adversary(lambda _: 0, token=different())], 0.0, 1, clock))
    assert len(played) == 1
    assert not isinstance(drafter.plan(), NoDraft)


def different() -> Callable[[], int]:
    """A text that never repeats itself."""
    written = iter(range(100, 10**6))
    return lambda: next(written)


def test_who_drafts_on_alone_pays_for_it_alone() -> None:
    """Two of three sequences stop after a token; the time of the third one's other forwards is its own."""
    adversaries = [Adversary(lambda drafted: drafted, lambda: 0.3, token=different()) for _ in range(2)]
    adversaries.append(Adversary(lambda drafted: drafted, lambda: 0.999, token=different()))
    moments = list(play(60, adversaries, 0.02))
    assert sum(moment.parts == 3 * [LAYERS.name] for moment in moments) > 1
    assert all(moment.counted >= moment.seconds - 1e-9 for moment in moments)
