"""A round that several requests play together: what a draft must promise to pay in it, and what it cost all of them."""

from collections.abc import Sequence
from itertools import zip_longest

from selfspec.methods.auto.plans import MOST_DRAFTED
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable

MOST_GUESSES = 7
"""Most guesses in a forward of a layer draft: with the pending token the 8 rows up to which its cost is measured."""

_MORE_A_REQUEST = 0.015
"""Share by which a round with drafts is taken to cost more, for each other request that waits for it.

They wait for what the host does about a draft, a tenth of a millisecond or two; and drafts that were chosen as the
likeliest are accepted less often than estimated.
"""


def with_caution(verify: CostTable, requests: int) -> CostTable:
    """What rounds of a request cost by their rows, where others wait for its drafts.

    Args:
        verify: without the others' waiting.
        requests: that play the round together.
    """
    if requests == 1:
        return verify
    more = 1 + _MORE_A_REQUEST * (requests - 1)
    return [*verify[:2], *(more * seconds for seconds in verify[2:])]


def least_acceptance(verify: CostTable) -> float:
    """Acceptance of the first draft token below which no draft can pay, whatever it takes to draft.

    ``k`` tokens that are accepted with at most this probability each commit at most ``k`` times as many.

    Args:
        verify: what each request pays for its rows of the target's forward.
    """
    return min((verify[1 + drafted] / verify[1] - 1) / drafted for drafted in range(1, MOST_DRAFTED + 1))


def least_acceptance_of_layers(verify: CostTable, draft: CostTable) -> float:
    """The same for a layer draft, each of whose forwards gives a token and confirms all guesses at best.

    Args:
        verify: what each request pays for its rows of the target's forward.
        draft: what each pays for its rows of the draft's forward, where all requests draft.
    """
    cheapest = min(draft[rows] / rows for rows in range(1, MOST_GUESSES + 2))
    return least_acceptance(verify) + cheapest / verify[1]


class SharedRound:
    """Puts together what the requests of a round say of it, for the costs to follow.

    Args:
        requests: how many play it.
        verify: costs of the target's forward; learns.
    """

    def __init__(self, requests: int, verify: LiveCosts) -> None:
        self._missing = self._requests = requests
        self._verify = verify
        self._rows = 0
        self._forwards: dict[LiveCosts, list[Sequence[int]]] = {}

    def hear(
        self,
        rows: int,
        verify_seconds: float,
        draft_seconds: float = 0.0,
        forwards: Sequence[int] = (),
        draft: LiveCosts | None = None,
    ) -> None:
        """Takes what one request has to say; the last one moves the costs.

        Args:
            rows: of its verification.
            verify_seconds: its share of the verification.
            draft_seconds: its share of the drafts.
            forwards: rows of each forward of its layer draft.
            draft: costs of that draft's forward; learns.
        """
        self._missing -= 1
        self._rows += rows
        if draft is not None and forwards:
            self._forwards.setdefault(draft, []).append(forwards)
        if self._missing:
            return
        self._verify.note_rows([self._rows], self._requests * verify_seconds)
        if len(self._forwards) == 1:  # times of different drafts are not told apart
            ((costs, many),) = self._forwards.items()
            together = [sum(each) for each in zip_longest(*many, fillvalue=0)]
            costs.note_rows(together, self._requests * draft_seconds)
