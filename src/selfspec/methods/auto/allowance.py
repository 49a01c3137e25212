"""What drafting may still lose: the bound that keeps ``auto`` from being slower than plain decoding."""


class Allowance:
    """Keeps the time of a request within ``(1 + delta)`` times that of plain decoding, or that and a few steps.

    A conservative bandit (Wu et al. 2016) with plain decoding as its baseline: a round may be played only if the bound
    holds even where none of its draft tokens is accepted. So drafts are paid out of the time that earlier rounds have
    saved, and out of a small share of plain decoding's own time.

    With ``P`` the time that plain decoding takes for the tokens so far and ``A`` the time that was spent, the bound is
    ``A <= B(P) = P + max(delta P, credit)``. A round commits at least one token, so it holds after a round of ``t``
    seconds if ``A + t <= B(P + step)`` held before it.

    Args:
        delta: share of plain decoding's time that may be lost, 0 or more.
        credit: steps of plain decoding that may be lost where that is more.
    """

    def __init__(self, delta: float, credit: float) -> None:
        self._delta = delta
        self._credit = credit
        self._plain = 0.0
        self._spent = 0.0

    def longest(self, step: float) -> float:
        """Seconds that the next round may take at most, its verification included.

        Args:
            step: seconds of a step of plain decoding. A round without a draft is always allowed.
        """
        plain = self._plain + step
        return plain + max(self._delta * plain, self._credit * step) - self._spent

    def note(self, tokens: int, seconds: float, step: float) -> None:
        """Counts a round.

        Args:
            tokens: that it committed, 1 or more.
            seconds: that it took.
            step: seconds of a step of plain decoding.
        """
        self._plain += tokens * step
        self._spent += seconds

    @property
    def saved(self) -> float:
        """Seconds saved so far against plain decoding; negative where some were lost."""
        return self._plain - self._spent
