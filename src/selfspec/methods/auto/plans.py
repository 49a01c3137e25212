"""What to draft next: the round that promises most tokens a second, among those that may be played."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from selfspec.runtimes.costs.rows import CostTable

MOST_DRAFTED = 32
"""Most draft tokens of a round."""

MOST_GUESSES = 7
"""Most guesses in a forward of a layer draft: with the pending token the 8 rows up to which its cost is measured."""

_EPSILON = 1e-9

_MORE_A_REQUEST = 0.015
"""Share by which a round with drafts is taken to cost more, for each other request that waits for it.

They wait for the host's work on a draft, a tenth of a millisecond or two; and drafts that were chosen as the likeliest
are accepted less often than estimated.
"""


class Plan(NamedTuple):
    """A round: plain, of copied tokens, or of a layer draft, and what it promises."""

    length: int  # draft tokens; of a layer draft at most
    tokens_per_second: float
    forward_seconds: float = 0.0  # of a layer draft: of a forward, for each token that it is expected to give


def plain(verify: CostTable) -> Plan:
    """A step of plain decoding."""
    return Plan(0, 1 / verify[1])


def best_copy(survival: Sequence[float], verify: CostTable, longest: float) -> Plan | None:
    """The best number of copied tokens to verify in a round of at most ``longest`` seconds; ``None`` if none fits.

    ``survival`` is by number of tokens the probability that all of them are accepted, never rising.
    """
    best, length, expected = 0.0, 0, 1.0
    for count, probability in enumerate(survival[:MOST_DRAFTED], start=1):
        expected += probability
        seconds = verify[count + 1]
        if seconds > longest + _EPSILON:
            break
        if expected > best * seconds:
            best, length = expected / seconds, count
    return Plan(length, best) if length else None


def best_layers(
    acceptance: float, draft: CostTable, verify: CostTable, longest: float, guessed: Sequence[float] = ()
) -> Plan | None:
    """The best layer draft if each token is accepted with the same probability.

    ``acceptance`` is that of each token whose predecessors were accepted. The round may take ``longest`` seconds; the
    plan's length is all that fits, as confidence ends a draft earlier. A forward of the draft may be given guesses,
    which need no forward of their own if confirmed: ``guessed`` is by their number the probability that all are.
    """
    guesses, each = best_guesses(draft, guessed)
    length = _most_that_fits(draft[1 + guesses], verify, longest)
    best, expected, probability = 0.0, 1.0, 1.0
    for drafted in range(1, length + 1):
        probability *= acceptance
        if probability < best * each:
            break  # its forward alone costs more than it brings, and so it is with all that follow
        expected += probability
        best = max(best, expected / (drafted * each + verify[drafted + 1]))
    return Plan(length, best, each) if length else None


def _most_that_fits(forward: float, verify: CostTable, longest: float) -> int:
    """Most tokens that can be drafted, a forward each, and verified in ``longest`` seconds; by bisection."""
    fits, fits_not = 0, MOST_DRAFTED + 1
    drafted = MOST_DRAFTED
    while fits_not - fits > 1:
        if drafted * forward + verify[drafted + 1] > longest + _EPSILON:
            fits_not = drafted
        else:
            fits = drafted
        drafted = (fits + fits_not) // 2
    return fits


def best_guesses(draft: CostTable, guessed: Sequence[float]) -> tuple[int, float]:
    """The number of guesses in a draft's forward that makes drafting cheapest, and the seconds per drafted token.

    ``guessed`` is by number of guesses the probability that the draft confirms all of them.
    """
    best, each, expected = 0, draft[1], 1.0
    for count, probability in enumerate(guessed, start=1):
        expected += probability
        if (seconds := draft[1 + count] / expected) < each:
            best, each = count, seconds
    return best, each


class WorthwhileDraft:
    """Stops a layer draft where one more token is expected to cost more time than it is worth.

    A token is worth the time in which the round's rate gives one. The next token counts with the probability that all
    before it are accepted, by their confidences (``calibrated``), and that it is accepted itself (``next_acceptance``).
    ``rate`` is in tokens a second.
    """

    def __init__(
        self,
        rate: float,
        next_acceptance: float,
        calibrated: Callable[[float], float],
        forward_seconds: float,
        verify: CostTable,
    ) -> None:
        self._rate = rate
        self._next = next_acceptance
        self._calibrated = calibrated
        self._forward = forward_seconds
        self._verify = verify
        self._survival = 1.0
        self._drafted = 0

    @property
    def threshold(self) -> float:
        """The confidence below which it stops now, if acceptance were what the confidence says."""
        return min(1.0, self._cost(self._drafted + 1) * self._rate / max(self._survival * self._next, _EPSILON))

    def stops(self, confidence: float) -> bool:
        """Whether the token just drafted is the last one."""
        self._drafted += 1
        self._survival *= self._calibrated(confidence)
        return self._survival * self._next < self._rate * self._cost(self._drafted)

    def _cost(self, drafted: int) -> float:
        """Seconds of one more token after ``drafted`` ones: its forward, and its row of the verification."""
        return self._forward + self._verify[drafted + 2] - self._verify[drafted + 1]


def with_caution(verify: CostTable, requests: int) -> CostTable:
    """What rounds of a request cost by their rows, where the others of a batch wait for its drafts."""
    if requests == 1:
        return verify
    more = 1 + _MORE_A_REQUEST * (requests - 1)
    return [*verify[:2], *(more * seconds for seconds in verify[2:])]


def least_acceptance(verify: CostTable) -> float:
    """Acceptance of the first draft token below which no draft can pay, whatever it takes to draft.

    ``k`` tokens that are accepted with at most this probability each commit at most ``k`` times as many.
    """
    return min((verify[1 + drafted] / verify[1] - 1) / drafted for drafted in range(1, MOST_DRAFTED + 1))


def least_acceptance_of_layers(verify: CostTable, draft: CostTable) -> float:
    """The same for a layer draft, each of whose forwards gives a token and confirms all guesses at best."""
    cheapest = min(draft[rows] / rows for rows in range(1, MOST_GUESSES + 2))
    return least_acceptance(verify) + cheapest / verify[1]
