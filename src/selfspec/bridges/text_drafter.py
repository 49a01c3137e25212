"""The drafts of one text: what followed its last tokens before."""

from collections import defaultdict
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfspec.decoding.suffixes import SuffixAutomaton, common
from selfspec.planning.acceptance_tables import AcceptanceRate, Lookup
from selfspec.planning.allowance import Allowance, Pace, Trust, faded
from selfspec.planning.plans import Known

TokenIds: TypeAlias = npt.NDArray[np.integer[Any]]
"""Token ids ``[length]`` of any integer dtype."""

_CONTEXT = 16
"""Tokens of a prompt's end that are kept with an ended text, to find its beginning by."""

_LONGEST = 2**15
"""Tokens of a prompt's end in which tokens are looked up."""

_NOTHING = Known("lookup", (), ())


class TextDrafter:
    """Offers known tokens for each round of a text, and learns from the tokens that follow.

    Args:
        token_ids: the text so far, as the engine shows it.
        acceptance: of prompt lookup, over all texts.
        allowance: of time that may be lost.
        earlier: texts that have ended.
    """

    def __init__(
        self,
        token_ids: TokenIds,
        acceptance: AcceptanceRate,
        allowance: Allowance,
        earlier: SuffixAutomaton | None,
    ) -> None:
        self.drafted: list[int] = []
        self._token_ids = token_ids.copy()
        self._prompt_length = len(token_ids) - 1  # the first token that the engine wrote follows the prompt
        self._lookup = Lookup(token_ids[-_LONGEST:].tolist(), acceptance.of_request(), earlier)
        self._allowance, self._pace = allowance, Pace()
        self._trust: dict[str, Trust] = defaultdict(Trust)
        self._offered = _NOTHING
        self._seconds = self._step = 0.0  # of the round that was planned last

    def spare(self, step: float) -> float:
        """Seconds that the next round may take beside a step of plain decoding, or the text's share of one."""
        return self._allowance.longest(step) - step

    def offer(self, most: int) -> list[float]:
        """Looks for known tokens, at most ``most``; returns what they are worth.

        By their number it is the probability that all are right, as far as that can be trusted, divided by the tokens
        that a step of the text writes: where these are many, a further one saves less of a step.
        """
        match = self._lookup.match_after()
        self._offered = _NOTHING
        if most < 1 or not match.length:
            return []
        name = "earlier" if match.earlier else "lookup"
        self._offered = Known(name, self._lookup.tokens(match, most), self._lookup.survival(match, most))
        trust, pace = self._trust[name].value, self._pace.rate(1.0)
        return [min(1.0, trust * each) / pace for each in self._offered.survival]

    def take(self, length: int, seconds: float, step: float) -> list[int]:
        """The draft tokens of the next round.

        Args:
            length: how many of those offered.
            seconds: of the round, or the text's share.
            step: the same of plain decoding.
        """
        self._seconds, self._step = seconds, step
        self.drafted = list(self._offered.token_ids[:length])
        return self.drafted

    @property
    def to_keep(self) -> list[int]:
        """What later texts may copy: the output, and the end of the prompt."""
        ids: list[int] = self._token_ids[max(0, self._prompt_length - _CONTEXT) :].tolist()
        return ids

    def goes_on(self, token_ids: TokenIds) -> bool:
        """Whether one more round can have made these tokens of the text."""
        length = len(self._token_ids)
        fits = 1 <= len(token_ids) - length <= 1 + len(self.drafted)
        return fits and bool(np.array_equal(token_ids[:length], self._token_ids))

    def read(self, token_ids: TokenIds) -> int:
        """Reads the text as it is after a round; returns how many draft tokens were accepted."""
        written: list[int] = token_ids[len(self._token_ids) :].tolist()
        self._token_ids = token_ids.copy()
        count, accepted = len(written), common(self.drafted, written)
        self._lookup.extend(written)
        for trust in self._trust.values():
            trust.fade(faded(len(written)))
        if self.drafted:
            self._trust[self._offered.name].note(sum(self._offered.survival[: len(self.drafted)]), accepted)
        self._pace.note(count, self._seconds, self._step)
        self._allowance.note(count, self._seconds, self._step)
        return accepted
