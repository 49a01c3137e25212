"""Clocks for tests: nothing in a test depends on how fast the machine is."""

from selfspec.methods.payoff import Payoff


class HandClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Always(Payoff):
    """Every selection pays, or none does."""

    def __init__(self, pays: bool = True) -> None:
        super().__init__()
        self.answer = pays

    def pays(self, remaining_tokens: int, gain: float | None) -> bool:
        return self.answer
