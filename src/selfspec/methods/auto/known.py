"""What ``auto`` knows of the coming tokens without a draft: prompt lookup, a probe's choice, what a grammar forces."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from selfspec.decoding.drafter import Prefill
from selfspec.methods.auto.mask_embeddings import MaskEmbeddings
from selfspec.planning.acceptance_tables import (
    AGREED,
    BESIDE,
    OTHERS,
    SPELLING,
    AcceptanceRate,
    Lookup,
    ProbedToken,
)
from selfspec.planning.plans import MOST_DRAFTED, Known, gain_of_probe
from selfspec.runtimes.chain import Probed
from selfspec.runtimes.costs.rows import MOST_SIBLINGS

LOOKUP, EARLIER, PROBED, FORCED = "lookup", "earlier", "probe", "grammar"

_NEW = 2.0
"""Probed tokens that were right and that lookup did not give, with which a request begins."""

_FADING = 0.95
"""Share that is kept of what was counted, with each probed token that was right."""

_WORTH_BESIDE = 0.5
"""Share of the tokens that siblings bring which their rows are not worth, about."""

LIKELIEST = 0.95
"""Acceptance rate that is never exceeded. If drafting would not pay at it, a batch does not look for any."""


@dataclass(frozen=True)
class Experience:
    """What all requests have seen of the acceptance of drafts."""

    lookup: AcceptanceRate
    """Of tokens that prompt lookup finds, by the length of the match."""
    probes: AcceptanceRate
    """Of what is chosen after a probe, by its probability."""
    confident: AcceptanceRate
    """Of tokens of a layer draft, by its confidence."""
    agreed: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(AGREED))
    """Of tokens that lookup finds and that were chosen after a probe, too, by the length of the match."""
    spelling: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(SPELLING))
    """Of tokens that spell what a grammar forces."""
    others: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(OTHERS))
    """Of the next likeliest tokens after a probe, by their probability."""
    beside: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(BESIDE))
    """Of rounds after a probe: whether one of these was accepted."""


class KnownTokens:
    """The tokens of one request that may be verified without a draft. Every token of the text scores them.

    The prompt is read when tokens are looked for: one of many tokens takes a while.

    Attributes:
        lookup: in the text, and in earlier ones.
        mask_embeddings: of its probes.
    """

    def __init__(self, prefill: Prefill, experience: Experience, mask_embeddings: MaskEmbeddings) -> None:
        self._prompt = (*prefill.prompt_ids, prefill.first_token)
        self.lookup = Lookup((), experience.lookup.of_request(), prefill.earlier)
        self.mask_embeddings = mask_embeddings
        self._probes = experience.probes.of_request()
        self._others, self._beside = experience.others.of_request(), experience.beside.of_request()
        self._agreed = experience.agreed.of_request()
        self._spelling = experience.spelling.of_request()
        self._find_forced, self._output = prefill.forced, [prefill.first_token]
        self._forced: Sequence[int] | None = None  # tokens that a grammar forces next; ``None`` until looked for
        self._probed = ProbedToken()
        self._right = self._novel = _NEW  # probed tokens that were right, and those of them that lookup did not give
        self._unread: list[int] = []  # tokens of plain rounds that were not looked up yet

    @property
    def any(self) -> bool:
        """Whether a token is known."""
        return self._probed.token is not None or bool(self.lookup.match_length) or bool(self._forced_next())

    @property
    def prompt_is_unread(self) -> bool:
        """Whether lookup finds nothing, as the prompt was not read."""
        return bool(self._prompt)

    def read_prompt(self, most: int) -> None:
        """Reads the last ``most`` tokens of the prompt, at least 1."""
        self.lookup.read(self._prompt[-most:])
        self._prompt = ()

    @property
    def has_unread(self) -> bool:
        """Whether tokens were put off."""
        return bool(self._unread)

    @property
    def likelihood(self) -> float:
        """The probability that the next token is known, at most ``LIKELIEST``."""
        if self._probed.token is not None or self._forced_next():
            return LIKELIEST
        return min(self.lookup.likelihood, LIKELIEST)

    def gain_of_probe(self, row: float, rate: float) -> float:
        """What a probe for the next round's first draft tokens is worth, in tokens (``planning.plans``).

        Tokens that are right where lookup gives the same are worth nothing: they are verified without a probe.
        """
        first = gain_of_probe(self._probes.outlook(), row, rate) * self._novel / self._right
        return first + _WORTH_BESIDE * self._beside.rate()

    def likeliest(self, *, beside: bool = False) -> Known:
        """The tokens that are likeliest to come next; with others for the place of the first where ``beside``."""
        known = self._likeliest_chain()
        if not beside or self._probed.token is None or known.name == FORCED or not known.survival:
            return known
        return replace(known, siblings=self._siblings(known.token_ids[0], known.survival[0]))

    def _siblings(self, first: int, chance: float) -> list[tuple[int, float]]:
        """Tokens that may come in place of one that is right with a probability, the likeliest first."""
        probed, match, left = self._probed, self.lookup.match_after(), 1 - chance
        found = {token_id: self._others.rate(confidence) for token_id, confidence in probed.others}
        if probed.token is not None:
            found[probed.token] = left * self._probes.rate(probed.confidence)
        if match.length:
            found[self.lookup.tokens(match, 1)[0]] = self.lookup.likelihood
        found.pop(first, None)
        scale = min(1.0, left / max(sum(found.values()), left))
        likeliest = sorted(found.items(), key=itemgetter(1), reverse=True)[:MOST_SIBLINGS]
        return [(token_id, scale * own) for token_id, own in likeliest]

    def _likeliest_chain(self) -> Known:
        if forced := self._forced_next():
            return self._after_forced(forced)
        probed, match = self._probed, self.lookup.match_after()
        survival = self.lookup.survival(match, MOST_DRAFTED)
        found = self.lookup.tokens(match, MOST_DRAFTED) if match.length else []
        chance = self._probes.rate(probed.confidence) if probed.token is not None else 0.0
        name = EARLIER if match.earlier else LOOKUP
        if probed.token is not None and found[:1] != [probed.token] and chance > (survival or [0.0])[0]:
            after = self.lookup.match_after([probed.token])
            following = self.lookup.survival(after, MOST_DRAFTED - 1)
            tokens = self.lookup.tokens(after, MOST_DRAFTED - 1, [probed.token]) if after.length else []
            return Known(PROBED, [probed.token, *tokens], [chance, *(chance * each for each in following)])
        if probed.token is not None and found[:1] == [probed.token]:
            both = self._agreed.rate(match.length)
            return Known(name, found, [both / survival[0] * each for each in survival] or [both])
        return Known(name, found, survival)

    def _forced_next(self) -> Sequence[int]:
        """Tokens that spell what a grammar forces next; the model may spell it otherwise."""
        if self._forced is None:
            self._forced = () if self._find_forced is None else self._find_forced(self._output)
        return self._forced

    def _after_forced(self, forced: Sequence[int]) -> Known:
        """These tokens, and those that lookup finds after them."""
        rate, forced = self._spelling.rate(), forced[:MOST_DRAFTED]
        likely = [rate**count for count in range(1, 1 + len(forced))]
        after, room = self.lookup.match_after(forced), MOST_DRAFTED - len(forced)
        following = self.lookup.survival(after, room) if room else []
        tokens = self.lookup.tokens(after, room, forced) if following else []
        return Known(FORCED, [*forced, *tokens], [*likely, *(likely[-1] * each for each in following)])

    def _score_forced(self, committed: Sequence[int]) -> None:
        for forced, token_id in zip(self._forced or (), committed, strict=False):
            self._spelling.note(forced == token_id)
            if forced != token_id:
                break
        if self._find_forced is not None:
            self._forced = None
            self._output += committed

    def extend(self, token_ids: Sequence[int], siblings: Sequence[int] = ()) -> None:
        """Appends the tokens of a round to the text, and scores by them what was known; ``siblings`` were verified."""
        self._score_probe(token_ids, siblings)
        self._score_forced(token_ids)
        self.lookup.extend(token_ids)

    def put_off(self, token_ids: Sequence[int]) -> None:
        """The same for a round for which nothing was planned; ``catch_up`` looks them up."""
        self._score_probe(token_ids, ())
        self._score_forced(token_ids)
        self._unread += token_ids

    def catch_up(self) -> int:
        """Looks up the tokens that were put off; returns how many there were."""
        unread, self._unread = self._unread, []
        self.lookup.extend(unread)
        return len(unread)

    def fade(self, share: float) -> None:
        """Forgets a share of how often lookup gave what probes give."""
        self._right -= share * (self._right - _NEW)
        self._novel -= share * (self._novel - _NEW)

    def read_probe(self, probed: Probed) -> None:
        """Takes what the probe after the last accepted row gave, if there is one."""
        if probed:
            self._probed = ProbedToken(*probed[0], probed[1:], self.mask_embeddings.kind)

    def _score_probe(self, committed: Sequence[int], siblings: Sequence[int]) -> None:
        if self._probed.token is None:
            return
        right, match = committed[0] == self._probed.token, self.lookup.match_after()
        agrees = bool(match.length) and self.lookup.tokens(match, 1) == [self._probed.token]
        if agrees:
            self._agreed.note(right, match.length)
        if right:
            self._right = _NEW + _FADING * (self._right - _NEW) + 1
            self._novel = _NEW + _FADING * (self._novel - _NEW) + (not agrees)
        self._probes.note(right, self._probed.confidence)
        for token_id, confidence in self._probed.others:
            self._others.note(committed[0] == token_id, confidence)
        if self._probed.others:
            self._beside.note(not right and committed[0] in siblings)
        self.mask_embeddings.note(self._probed.mask, right)
        self._probed = ProbedToken()
