"""The drafts of one text: copies of what followed its last tokens before, as many as pay."""

from collections import defaultdict
from collections.abc import Sequence

from selfspec.decoding.suffixes import SuffixAutomaton
from selfspec.planning.acceptance import AcceptanceRate, Copies
from selfspec.planning.allowance import TRUST_FADE, UNKNOWN, Allowance, Pace, Trust, faded
from selfspec.planning.plans import with_caution
from selfspec.planning.rows import FilledRows, Known, fill_rows
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable


class TextDrafter:
    """Plans each round of a text as ``auto`` does, with known tokens only, and learns from the tokens that follow.

    Args:
        token_ids: the text so far.
        acceptance: of copies, over all texts.
        costs: of the engine's forward by its rows.
        allowance: of time that may be lost.
        earlier: texts that have ended.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        acceptance: AcceptanceRate,
        costs: LiveCosts,
        allowance: Allowance,
        earlier: SuffixAutomaton | None,
    ) -> None:
        self.drafted: list[int] = []
        self._copies = Copies(token_ids, acceptance.of_request(), earlier)
        self._costs = costs
        self._allowance, self._pace = allowance, Pace()
        self._trust: dict[str, Trust] = defaultdict(Trust)
        self._planned: FilledRows | None = None
        self._table: CostTable = ()

    def draft(self, most: int, texts: int = 1) -> list[int]:
        """The draft tokens of the next round, none where none pay.

        Args:
            most: tokens that the engine takes.
            texts: sequences that share the forward; each is taken to need as many rows.
        """
        self._table = table = with_caution(self._costs.now(texts), texts)
        self._planned, self.drafted = None, []
        longest = self._allowance.longest(table[1])
        match = self._copies.match_after()
        if most < 1 or not match.length or longest <= table[2] or self._costs.doubt > UNKNOWN:
            return []
        name = "earlier" if match.earlier else "copies"
        known = Known(name, self._copies.tokens(match, most), self._copies.survival(match, most))
        filled = fill_rows(known, table, self._pace.rate(table[1]), longest, 0.0, self._trust[name].value)
        if filled.plan.length:
            self._planned, self.drafted = filled, list(filled.token_ids)
        return self.drafted

    def read(self, token_ids: Sequence[int]) -> int:
        """Reads the tokens that the engine wrote since the last draft; returns how many drafts were among them."""
        count, accepted = len(token_ids), _common(self.drafted, token_ids)
        self._copies.extend(token_ids)
        for trust in self._trust.values():
            trust.fade(TRUST_FADE * faded(token_ids))
        if self._planned is not None:
            self._trust[self._planned.known.name].note(self._planned.plan.tokens - 1, accepted)
        seconds, step = self._table[1 + len(self.drafted)], self._table[1]
        self._pace.note(count, seconds, step)
        self._allowance.note(count, seconds, step)
        return accepted


def _common(drafted: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many of the draft tokens were accepted."""
    length = 0
    for draft, token in zip(drafted, token_ids, strict=False):
        if draft != token:
            break
        length += 1
    return length
