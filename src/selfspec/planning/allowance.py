"""The time of a request: what drafting may still lose, what a second is worth, what rounds take beside forwards.

A request alone has an ``Allowance``, its ``Pace``, ``Trust``, ``RoundOverhead``, ``PlanningTime`` and ``Backoff``, and
all requests their ``AnswerLengths``. Batches have a ``SharedAllowance`` and ``HostTime``, and rounds a ``SharedRound``.
"""

import threading
from collections.abc import Sequence
from itertools import zip_longest

from selfspec.planning.sharing import SharedStep
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable

_WEIGHT = 0.1
_FADING = 0.95
_LEAST_SPREAD = 1e-6
_FIRST_ROUNDS = 2.0
"""Rounds of plain decoding with which the pace of a request begins."""
_FIRST_TOKENS = 6.0
"""Tokens that came as expected, with which trust begins."""
_MOST_TRUST = 1.2


CREDIT = 1.6
"""Steps of plain decoding that a request may lose before anything was saved.

One forward of the slowest draft that can pay takes most of a step. With a smaller credit a request whose draft is good
would wait for it: at 0.6 steps a sampled text of 128 tokens was decoded plainly for its first 44.
"""

MOST_CREDIT, _SHARE_OF_PROMPT = 4.0, 0.01
"""Steps that it may lose after a long prompt, and the share of the prompt's time that those beyond ``CREDIT`` take."""

UNKNOWN = 0.4
"""Doubt in the costs from which on nothing is drafted: a round or two of plain decoding say what a step takes."""

_FADE = 0.02
"""Share of a draft's own record that is forgotten with each token that came without one."""

SHARED_DELTA = 0.005
"""Share of plain decoding's time that a batch may lose by looking for drafts, beside the credit."""

_KEPT = 0.98
"""Share of what a batch has saved beyond the credit that is still there a step later."""

CREDITED = 48
"""Steps of plain decoding that the credit is for; of later ones a request may lose a share."""

_SHORTEST, _LONGEST = 16, 64
"""Tokens for which nothing is planned, the first time and at most; where that was in vain, next time twice as many."""

_FIRST_LENGTH = 256.0
"""Tokens that the first answer is expected to have."""

_ANSWERS_FADING = 0.9
"""Share that is kept of what was counted, with each answer."""


class Allowance:
    """Keeps the time of a request within that of plain decoding, a few steps, and a share of what is longer.

    A conservative bandit (Wu et al. 2016) with plain decoding as its baseline: a round may be run only if the bound
    holds even where none of its draft tokens is accepted. So drafts are paid out of the time that earlier rounds have
    saved, and out of a small share of plain decoding's own time. After a long prompt there is more credit, up to
    ``MOST_CREDIT`` steps: a hundredth of the time that reading it took.

    With ``P`` the time that plain decoding takes for the tokens so far and ``A`` the time that was spent, the bound is
    ``A <= B(P) = P + credit + delta max(0, P - 48 steps)``. A round commits at least one token, so it holds after a
    round of ``t`` seconds if ``A + t <= B(P + step)`` held before it. ``credit`` counts steps of plain decoding: 1.6 of
    them and 2 % of the rest are 3 % of 64 tokens, and less of more.
    """

    def __init__(self, delta: float, credit: float, prompt_seconds: float = 0.0) -> None:
        self._delta = delta
        self._credit = credit
        self._more = _SHARE_OF_PROMPT * prompt_seconds
        self._plain = 0.0
        self._spent = 0.0

    def longest(self, step: float) -> float:
        """Most seconds of the next round, verification included, if a plain step takes ``step``.

        A round without a draft is always allowed.
        """
        plain = self._plain + step
        later = max(0.0, plain - CREDITED * step)
        credit = self._credit * step + min(self._more, (MOST_CREDIT - CREDIT) * step)
        return plain + credit + self._delta * later - self._spent

    def regained(self, step: float) -> float:
        """Seconds that a round of plain decoding gives back, if a step takes ``step``; planning it has to take less."""
        return self._delta * step

    def note(self, tokens: int, seconds: float, step: float) -> None:
        """Counts a round by the tokens that it committed and its seconds."""
        self._plain += tokens * step
        self._spent += seconds


def stake(longest: float, step: float) -> float:
    """Most seconds of a round where a request may lose ``longest - step``: half of that beside a step.

    A first draft that went wrong would else take all, and a request whose drafts are good would have to wait.
    """
    return step + (longest - step) / 2


class Pace:
    """Tokens a second of a request's latest rounds, plain decoding's at least; it begins with that."""

    def __init__(self) -> None:
        self._tokens = self._steps = 0.0

    def rate(self, step: float) -> float:
        """What a second is worth, in tokens, if a plain step takes ``step`` seconds."""
        return self.over_plain / step

    @property
    def over_plain(self) -> float:
        """The pace over that of plain decoding, 1 at least."""
        return max(1.0, (_FIRST_ROUNDS + self._tokens) / (_FIRST_ROUNDS + self._steps))

    def note(self, tokens: int, seconds: float, step: float) -> None:
        """Counts a round by the tokens that it committed and its seconds."""
        self._tokens = _FADING * self._tokens + tokens
        self._steps = _FADING * self._steps + seconds / step


class Trust:
    """The share of the tokens beyond each round's first that a kind of draft brings, of those that were expected.

    Expectations are scored as drafts are: where rounds bring less than they promise, what they promise counts less.
    """

    def __init__(self) -> None:
        self._expected = self._brought = 0.0

    @property
    def value(self) -> float:
        """The share; above 1 where drafts bring more."""
        return min(_MOST_TRUST, (_FIRST_TOKENS + self._brought) / (_FIRST_TOKENS + self._expected))

    def note(self, expected: float, brought: float) -> None:
        """Counts a round by the tokens beyond its first: those that were expected, and those that came.

        Of a longer draft each token says less, since one wrong token ends it: a round counts as the root of its tokens.
        """
        weight = (1 + expected) ** -0.5
        self._expected = _FADING * self._expected + weight * expected
        self._brought = _FADING * self._brought + weight * brought

    def fade(self, share: float) -> None:
        """Forgets a share of what was counted."""
        self._expected *= 1 - share
        self._brought *= 1 - share


class RoundOverhead:
    """Seconds outside forwards: of a step of plain decoding, and of a round with drafts, fitted linearly to its rows.

    The latest ones count most. A round with drafts takes at least what a step takes, and rows beyond the first cost
    nothing until there was a round with more. Outliers are clipped to twice the prediction.
    """

    def __init__(self) -> None:
        self.step = self.first = self.each = 0.0
        self._count = self._rows = self._seconds = 0.0
        self._squares = self._products = 0.0

    def note_steps(self, steps: int, seconds: float) -> None:
        """Counts steps of plain decoding, or rounds of a run, and their seconds outside forwards."""
        seconds /= steps
        self.step += _WEIGHT * (min(seconds, 2 * self.step) - self.step) if self.step else seconds

    def note(self, rows: int, seconds: float) -> None:
        """Counts a round with drafts by the rows of its verification and its seconds outside forwards."""
        more = rows - 1
        if self._count:
            seconds = min(seconds, 2 * (self.first + more * self.each) + more * self.first)
        self._count = _FADING * self._count + 1
        self._rows = _FADING * self._rows + more
        self._seconds = _FADING * self._seconds + seconds
        self._squares = _FADING * self._squares + more * more
        self._products = _FADING * self._products + more * seconds
        spread = self._squares * self._count - self._rows**2
        slope = (self._products * self._count - self._rows * self._seconds) / spread if spread > _LEAST_SPREAD else 0.0
        self.each = max(0.0, slope)
        self.first = max(0.0, (self._seconds - self.each * self._rows) / self._count)

    def added_to(self, forwards: Sequence[float], planning: float) -> CostTable:
        """Seconds of rounds by their rows, from those of their verifications; drafts take ``planning`` seconds too."""
        least, each, start = self.step, self.each, self.first - self.each
        table = [seconds + planning + max(least, start + each * rows) for rows, seconds in enumerate(forwards)]
        table[1] = forwards[1] + least
        return table

    def added_in_runs(self, forwards: Sequence[float], planning: float) -> CostTable:
        """The same of the rounds of a run: all are planned, and take as long as steps beside that."""
        return [seconds + self.step + planning for seconds in forwards]


class PlanningTime:
    """Mean seconds of planning a round and of learning from it. Outliers are clipped to twice the mean."""

    def __init__(self) -> None:
        self.mean = 0.0

    def note(self, seconds: float) -> None:
        """Counts a round."""
        self.mean += _WEIGHT * (min(seconds, 2 * self.mean) - self.mean) if self.mean else seconds


class Backoff:
    """Rounds of plain decoding in which a request that is held back plans nothing.

    To plan a round and to learn from it takes a share of a step. Where that is more than the share of plain decoding's
    time that may be lost, a request that plans goes on losing, and could never draft again. So it backs off for some
    tokens, for more while that is in vain; they are looked through afterwards.
    """

    def __init__(self) -> None:
        self._left, self._next = 0, _SHORTEST
        self._rounds, self._tokens = PlanningTime(), PlanningTime()

    @property
    def on(self) -> bool:
        """Whether nothing is planned now."""
        return self._left > 0

    @property
    def round_seconds(self) -> float:
        """Seconds that the host takes in a round of plain decoding in which nothing is planned."""
        return self._rounds.mean

    def begin(self) -> None:
        """Begins one, as the request is held back."""
        self._left, self._next = self._next, min(2 * self._next, _LONGEST)

    def end(self) -> None:
        """Ends it, if there is one: the request may draft, so that the next one is short again."""
        self._left, self._next = 0, _SHORTEST

    def pass_by(self, tokens: int) -> None:
        """Counts tokens that were written."""
        self._left -= tokens

    def note_rounds(self, rounds: int, seconds: float) -> None:
        """Counts rounds in which nothing was planned, and the host's seconds in them."""
        self._rounds.note(seconds / rounds)

    def reading(self, tokens: int, seconds: float) -> float:
        """Counts tokens that were looked through afterwards; returns what that takes in the mean."""
        self._tokens.note(seconds / tokens)
        return tokens * self._tokens.mean


class AnswerLengths:
    """The mean length of the latest answers of all requests. May be used by several threads."""

    def __init__(self) -> None:
        self._answers, self._tokens = 1.0, _FIRST_LENGTH
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Counts a further answer; returns how many tokens those before it have had in the mean."""
        with self._lock:
            mean = self._tokens / self._answers
            self._answers, self._tokens = _ANSWERS_FADING * self._answers + 1, _ANSWERS_FADING * self._tokens
        return round(mean)

    def note(self, tokens: int) -> None:
        """Counts tokens that were written."""
        with self._lock:
            self._tokens += tokens


class SharedAllowance:
    """What looking for drafts in batches may still lose, in steps of plain decoding, by the number of requests.

    A round adds what its drafts saved, minus what it took more than a step, and a small share of a step. What was saved
    beyond the credit is forgotten with time. Where nothing is left, drafts are not looked for until half of the credit
    has come back. Nor are they before a first round of that number of requests, which says what plain decoding takes.
    It lasts over batches. A number of requests that was not there before begins with what the last one had left, so
    that a batch whose requests end one after the other loses the credit once.
    """

    def __init__(self) -> None:
        self._left: dict[int, float] = {}
        self._pausing: set[int] = set()
        self._last: int | None = None

    def allows(self, requests: int) -> bool:
        """Whether drafts are looked for in a batch of this many requests."""
        return self.knows(requests) and requests not in self._pausing

    def knows(self, requests: int) -> bool:
        """Whether this number of requests has run a round."""
        return requests in self._left

    def note(self, requests: int, steps: float, gained: float) -> None:
        """Counts rounds that plain decoding runs in ``steps`` steps, and the steps that drafts gained or lost."""
        left = self._begin(requests) + gained + SHARED_DELTA * steps
        if left > CREDIT:
            left = CREDIT + (left - CREDIT) * _KEPT**steps
        self._left[requests] = left
        if left <= 0:
            self._pausing.add(requests)
        elif left >= CREDIT / 2:
            self._pausing.discard(requests)
        self._last = requests

    def _begin(self, requests: int) -> float:
        """What this number of requests has left; where it is new, what the last one has, and it pauses as that does."""
        if (left := self._left.get(requests)) is not None:
            return left
        if self._last is None:
            return CREDIT
        if self._last in self._pausing:
            self._pausing.add(requests)
        return min(CREDIT, self._left[self._last])


class HostTime:
    """Seconds that rounds of a batch take beside forwards: with known tokens, with layers, and where none is sought.

    They are counted for each request of a batch, and apart for numbers of requests of as many binary digits: a part of
    them is the same for any number, so that a request of a large batch takes less than one of a small batch. What
    drafts take more is that of the nearest number with which there were any.

    Attributes:
        allowance: what drafts of batches may still lose.
        trust: in what their accepted tokens promise to save, in steps.
    """

    def __init__(self) -> None:
        self.allowance, self.trust = SharedAllowance(), Trust()
        self._known, self._layers, self._plain = (dict[int, PlanningTime]() for _ in range(3))  # by digits

    def of_plain(self, requests: int) -> float:
        """What a round takes in which no drafts are sought; 0 before there was one of about as many requests."""
        each = self._plain.get(requests.bit_length())
        return 0.0 if each is None else requests * each.mean

    def of_drafts(self, requests: int) -> float:
        """What a round with known tokens takes more."""
        return self._more(self._known, requests)

    def of_layers(self, requests: int) -> float:
        """What a round in which layers draft takes more."""
        return self._more(self._layers, requests)

    def note(self, requests: int, seconds: float, *, sought: bool = True, drafted: bool, layers: bool = False) -> None:
        """Counts a round; one in which drafts were sought in vain is of no kind."""
        if drafted or not sought:
            kind = self._plain if not drafted else self._layers if layers else self._known
            kind.setdefault(requests.bit_length(), PlanningTime()).note(seconds / requests)

    def _more(self, kind: dict[int, PlanningTime], requests: int) -> float:
        digits = requests.bit_length()
        nearest = min(kind.keys() & self._plain.keys(), key=lambda own: (abs(own - digits), own), default=None)
        if nearest is None:
            return 0.0
        return requests * max(0.0, kind[nearest].mean - self._plain[nearest].mean)


class SharedRound:
    """Collects the timings of a batch's requests and updates the costs of the target's forward once."""

    def __init__(self, step: SharedStep, verify: LiveCosts, host: HostTime, *, sought: bool = True) -> None:
        self._sought, self._step = sought, step
        self._missing = self._requests = step.count
        self._verify, self._host = verify, host
        self._rows: list[Sequence[int]] = []
        self._written = self._before = self._after = 0
        self._seconds = self._reading = self._promised = self._drafting = 0.0
        self._forwards: dict[LiveCosts, list[Sequence[int]]] = {}

    def note(
        self,
        rows: Sequence[int],
        tokens: int,
        room: int,
        verify_seconds: float,
        draft_seconds: float = 0.0,
        forwards: Sequence[int] = (),
        draft: LiveCosts | None = None,
        *,
        host_seconds: float = 0.0,
        reading: float = 0.0,
        value: float = 0.0,
    ) -> None:
        """Adds one request's rows in each verification and its shares of the time; the last one updates the costs.

        It wrote ``tokens`` and may write ``room`` more. ``forwards`` are the rows of each forward of its layer draft,
        whose costs are ``draft``; ``value`` are the seconds that each of its tokens beyond the first was to save.
        ``reading`` are seconds in which its text was looked through, once and not in each round.
        """
        self._missing -= 1
        self._rows.append(rows)
        self._written += tokens - len(rows)
        self._before, self._after = max(self._before, room + tokens), max(self._after, room)
        self._seconds += host_seconds
        self._reading += reading
        self._drafting += draft_seconds
        self._promised += value * (tokens - len(rows))
        if draft is not None and forwards:
            self._forwards.setdefault(draft, []).append(forwards)
        if not self._missing:
            self._conclude(verify_seconds, draft_seconds)

    def _conclude(self, verify_seconds: float, draft_seconds: float) -> None:
        """Updates the costs, given the last request's share of the time."""
        verified, made = _together(self._rows), bool(self._forwards)
        self._note_gain(verified)
        self._verify.note(verified, self._requests * verify_seconds)
        seconds, drafted = self._seconds / len(verified), max(verified) > self._requests
        self._host.note(self._requests, seconds, sought=self._sought, drafted=drafted, layers=made)
        if len(self._forwards) == 1:  # times of different drafts are not told apart
            ((costs, many),) = self._forwards.items()
            costs.note(_together(many), self._requests * draft_seconds)

    def _note_gain(self, verified: Sequence[int]) -> None:
        """Counts what the drafts gained, by what rows cost, not by what they took in these rounds.

        What counts as saved is what the request with most left has saved, not what each might: where drafts are right
        for some requests only, the others end no sooner. No more than the credit is lost at once: what takes longer is
        something else, as another process is, which would end the search for drafts for ever.
        """
        step, gained = self._verify(self._requests), 0.0
        if self._sought:
            rows = sum(max(0.0, self._verify(each) - step) for each in verified)
            ahead = max(0, self._before - self._after - len(verified))
            saved = self._step.saved(self._written, ahead)
            host = max(0.0, self._seconds - len(verified) * self._host.of_plain(self._requests))
            gained = max(saved - rows - self._drafting - host - self._reading, -CREDIT * step)
            self._host.trust.note(self._promised / step, saved / step)
        self._host.allowance.note(self._requests, len(verified), gained / step)


def _together(many: Sequence[Sequence[int]]) -> list[int]:
    """The rows of each forward that requests share, the first of which is the first of each."""
    return [sum(each) for each in zip_longest(*many, fillvalue=0)]


def faded(tokens: int) -> float:
    """The share of a record that is forgotten while tokens were written without a draft of that kind."""
    return 1 - (1 - _FADE) ** tokens
