"""What ``auto`` knows of the coming tokens without a draft: copies of the text, and what a row before chose."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.decoding.drafter import Prefill
from selfspec.methods.auto.mask_embeddings import MaskEmbeddings
from selfspec.planning.acceptance_tables import AGREED, AcceptanceRate, Copies, Guess
from selfspec.planning.plans import MOST_DRAFTED, Known, gain_of_guess

COPIES, EARLIER, GUESS = "copies", "earlier", "guess"

_NEW = 2.0
"""Guesses that were right and no copies, with which a request begins."""

_FADING = 0.95
"""Share that is kept of what was counted, with each guess that was right."""

LIKELIEST = 0.95
"""Acceptance rate that is never exceeded. If drafting would not pay at it, a batch does not search for copies."""


@dataclass(frozen=True)
class Experience:
    """What all requests have seen of the acceptance of drafts."""

    copies: AcceptanceRate
    """Of copied tokens, by the length of the match."""
    guesses: AcceptanceRate
    """Of what is chosen after a probe, by its probability."""
    confident: AcceptanceRate
    """Of tokens of a layer draft, by its confidence."""
    agreed: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(AGREED))
    """Of copied tokens that were chosen after a probe, too, by the length of the match."""


class KnownTokens:
    """The tokens of one request that may be verified without a draft. Every token of the text scores them.

    The prompt is read when tokens are looked for: one of many tokens takes a while.

    Attributes:
        copies: of the text, and of earlier ones.
        mask_embeddings: of its probes.
    """

    def __init__(self, prefill: Prefill, experience: Experience, mask_embeddings: MaskEmbeddings) -> None:
        self._prompt = (*prefill.prompt_ids, prefill.first_token)
        self.copies = Copies((), experience.copies.of_request(), prefill.earlier)
        self.mask_embeddings = mask_embeddings
        self._guesses = experience.guesses.of_request()
        self._agreed = experience.agreed.of_request()
        self._guess = Guess()
        self._right = self._novel = _NEW  # guesses that were right, and those of them that no copy said
        self._unread: list[int] = []  # tokens of plain rounds that copies have not been looked for in

    @property
    def any(self) -> bool:
        """Whether a token is known."""
        return self._guess.token is not None or bool(self.copies.match_length)

    @property
    def prompt_is_unread(self) -> bool:
        """Whether no copies can be found, as the prompt was not read."""
        return bool(self._prompt)

    def read_prompt(self, most: int) -> None:
        """Reads the last ``most`` tokens of the prompt, at least 1."""
        self.copies.read(self._prompt[-most:])
        self._prompt = ()

    @property
    def has_unread(self) -> bool:
        """Whether tokens were put off."""
        return bool(self._unread)

    @property
    def likelihood(self) -> float:
        """The probability that the next token is known, at most ``LIKELIEST``."""
        return LIKELIEST if self._guess.token is not None else min(self.copies.likelihood, LIKELIEST)

    def gain_of_guess(self, row: float, rate: float) -> float:
        """What a guess of the next round's first draft token is worth, in tokens (``planning.plans``).

        Those that are right where a copy says the same are worth nothing: the token is verified without them.
        """
        return gain_of_guess(self._guesses.outlook(), row, rate) * self._novel / self._right

    def likeliest(self) -> Known:
        """The tokens that are likeliest to come next."""
        guess, match = self._guess, self.copies.match_after()
        survival = self.copies.survival(match, MOST_DRAFTED)
        copied = self.copies.tokens(match, MOST_DRAFTED) if match.length else []
        chance = self._guesses.rate(guess.confidence) if guess.token is not None else 0.0
        name = EARLIER if match.earlier else COPIES
        if guess.token is not None and copied[:1] != [guess.token] and chance > (survival or [0.0])[0]:
            after = self.copies.match_after([guess.token])
            following = self.copies.survival(after, MOST_DRAFTED - 1)
            tokens = self.copies.tokens(after, MOST_DRAFTED - 1, [guess.token]) if after.length else []
            return Known(GUESS, [guess.token, *tokens], [chance, *(chance * each for each in following)])
        if guess.token is not None and copied[:1] == [guess.token]:
            both = self._agreed.rate(match.length)
            return Known(name, copied, [both / survival[0] * each for each in survival] or [both])
        return Known(name, copied, survival)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the tokens of a round to the text, and scores by them what was known."""
        self._score_guess(token_ids)
        self.copies.extend(token_ids)

    def put_off(self, token_ids: Sequence[int]) -> None:
        """The same for a round for which nothing was planned; ``catch_up`` looks for copies in it."""
        self._score_guess(token_ids)
        self._unread += token_ids

    def catch_up(self) -> int:
        """Looks for copies in the tokens that were put off; returns how many there were."""
        unread, self._unread = self._unread, []
        self.copies.extend(unread)
        return len(unread)

    def fade(self, share: float) -> None:
        """Forgets a share of how often copies said what guesses say."""
        self._right -= share * (self._right - _NEW)
        self._novel -= share * (self._novel - _NEW)

    def read_guess(self, guess: tuple[int, float] | None) -> None:
        """Takes what the probe after the last accepted row gave, if there is one."""
        if guess is not None:
            self._guess = Guess(*guess, self.mask_embeddings.kind)

    def _score_guess(self, committed: Sequence[int]) -> None:
        if self._guess.token is None:
            return
        right, match = committed[0] == self._guess.token, self.copies.match_after()
        agrees = bool(match.length) and self.copies.tokens(match, 1) == [self._guess.token]
        if agrees:
            self._agreed.note(right, match.length)
        if right:
            self._right = _NEW + _FADING * (self._right - _NEW) + 1
            self._novel = _NEW + _FADING * (self._novel - _NEW) + (not agrees)
        self._guesses.note(right, self._guess.confidence)
        self.mask_embeddings.note(self._guess.mask, right)
        self._guess = Guess()
