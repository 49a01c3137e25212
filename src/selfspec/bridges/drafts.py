"""The drafts of an engine that shows its texts before every round, and nothing else."""

import time
from collections.abc import Callable, Sequence

from selfspec.bridges.bridge_options import BridgeOptions
from selfspec.bridges.earlier_texts import EarlierTexts
from selfspec.bridges.text_drafter import TextDrafter, TokenIds
from selfspec.planning.acceptance_tables import MATCH_LENGTH, AcceptanceRate
from selfspec.planning.allowance import UNKNOWN, Allowance
from selfspec.planning.sharing import SharedStep
from selfspec.runtimes.costs.live import LiveCosts

_LOAD_DOUBT = 3.0
"""Doubt in the seconds of a row before the first rounds: costs may be given as multiples of it."""


class Drafts:
    """Drafts for all texts of an engine.

    The engine shows the texts of a round. One that goes on where a text of the last round ended, by at least one token
    and at most one more than were drafted, is that text: what it accepted is what came. Any other is a new text, and a
    text that is not shown has ended. The time between two rounds is what a forward of their rows costs, unless a new
    text was read in it.

    Attributes:
        drafted: draft tokens so far.
        accepted: those that the engine accepted.
        rounds: how often drafts were asked for.
    """

    def __init__(self, options: BridgeOptions, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafted = self.accepted = self.rounds = 0
        self._options, self._clock = options, clock
        self._acceptance = AcceptanceRate(MATCH_LENGTH)
        self._earlier = EarlierTexts(options.memory_tokens)
        self._texts: list[TextDrafter] = []
        self._asked = 0.0
        self.use_costs(options)

    def use_costs(self, options: BridgeOptions) -> None:
        """Starts from the costs of other options; to be called between texts."""
        self.costs = LiveCosts(options.costs, load_doubt=_LOAD_DOUBT, shape_doubt=options.shape_doubt)

    def forget(self) -> None:
        """Forgets the texts, those that go on too; what was learned of acceptance and costs stays."""
        self._texts = []
        self._earlier = EarlierTexts(self._options.memory_tokens)

    def draft(self, texts: Sequence[TokenIds], most: Sequence[int], *, timed: bool = True) -> list[list[int]]:
        """The draft tokens of the next round.

        Args:
            texts: token ids of each sequence, the last token too, ``[length]``; none of them empty.
            most: draft tokens that the engine takes of each.
            timed: whether nothing but a forward of these texts' rows was done since the last call.

        Returns:
            For each text at most as many tokens as asked; none where no draft pays.
        """
        now, rows = self._clock(), sum(1 + len(text.drafted) for text in self._texts)
        known = dict(enumerate(self._texts))
        going_on = [self._take(known, place, token_ids) for place, token_ids in enumerate(texts)]
        if timed and rows and going_on and None not in going_on:
            self.costs.note([rows], max(now - self._asked, 1e-9))
        for ended in known.values():
            self._earlier.keep(ended.to_keep)
        self._texts = [text or self._begin(token_ids) for text, token_ids in zip(going_on, texts, strict=True)]
        drafts = self._plan([min(limit, self._options.max_draft_tokens) for limit in most]) if texts else []
        self.rounds += 1
        self.drafted += sum(map(len, drafts))
        self._asked = now
        return drafts

    def _plan(self, most: Sequence[int]) -> list[list[int]]:
        """Verifies the likeliest known tokens of all texts, as many as pay together; none while a step is not known."""
        step = SharedStep(len(self._texts), self.costs)
        spare = [text.spare(step.share) for text in self._texts]
        known = self.costs.doubt_of(step.count) <= UNKNOWN
        worth = [
            text.offer(limit if known and left > 0 else 0)
            for text, limit, left in zip(self._texts, most, spare, strict=True)
        ]
        lengths, each = step.lengths(worth, spare, step.values_unknown())
        return [
            text.take(length, step.share + length * each, step.share)
            for text, length in zip(self._texts, lengths, strict=True)
        ]

    def _take(self, known: dict[int, TextDrafter], place: int, token_ids: TokenIds) -> TextDrafter | None:
        """The known text that goes on with these tokens, most likely the one at its place; it is removed."""
        for key in [place] * (place in known) + [key for key in known if key != place]:
            if known[key].goes_on(token_ids):
                text = known.pop(key)
                self.accepted += text.read(token_ids)
                return text
        return None

    def _begin(self, token_ids: TokenIds) -> TextDrafter:
        earlier = self._earlier.automaton if self._options.memory_tokens else None
        allowance = Allowance(self._options.delta, self._options.credit)
        return TextDrafter(token_ids, self._acceptance, allowance, earlier)
