"""What the trial of an accelerator found: the table of runtimes and low-bit weights, and which one is chosen."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from selfspec.runtimes.kept_file import restored

_STEPS, _VERIFICATION = 4, 8

_EXACT_MAY_COST = 1.1
"""How many times the round of another runtime may take with one whose rows do not depend on each other.

Without them a verification rounds otherwise than single steps do, and in bfloat16 drafts change some texts.
"""


@dataclass(frozen=True)
class Tried:
    """A candidate after the trial.

    Attributes:
        name: of a runtime, or ``8 bits``.
        seconds: of its forwards, by their rows; empty where it is out.
        reason: why it is out; ``None`` where it may be used.
        lacked_memory: the reason is memory.
        is_exact: a row of a verification is that of a single step, bit for bit.
    """

    name: str
    seconds: Mapping[int, float] = field(default_factory=dict)
    reason: str | None = None
    lacked_memory: bool = False
    is_exact: bool = False

    @property
    def passed(self) -> bool:
        """Whether it may be used."""
        return self.reason is None

    @property
    def round_seconds(self) -> float:
        """Seconds of a round of four steps of one row and a verification of 8; infinite where nothing was timed."""
        if not self.seconds:
            return float("inf")
        return _STEPS * self.seconds[1] + self.seconds[min(_VERIFICATION, max(self.seconds))]

    @property
    def weighed_seconds(self) -> float:
        """``round_seconds`` by which runtimes are chosen: an exact one may take a little longer."""
        return self.round_seconds * (1.0 if self.is_exact else _EXACT_MAY_COST)

    def __str__(self) -> str:
        if self.reason is not None:
            return f"out: {self.reason}"
        return ", ".join(f"{rows} rows {1000 * seconds:.2f} ms" for rows, seconds in self.seconds.items())


@dataclass(frozen=True)
class DeviceTrial:
    """The table of a trial.

    Attributes:
        device: the name of the device.
        runtimes: the runtimes in the order of ``candidates.CANDIDATES``; the first is the reference, which passes.
        weights: low-bit weights of the chosen runtime, by their bits.
        seconds: what the trial took, compiling and rounding included.
        free_bytes: memory that was free before it; ``None`` if unknown.
    """

    device: str
    runtimes: tuple[Tried, ...]
    weights: Mapping[int, Tried] = field(default_factory=dict)
    seconds: float = 0.0
    free_bytes: int | None = None

    @property
    def order(self) -> list[str]:
        """The runtimes that passed, fastest first (``Tried.weighed_seconds``)."""
        passed = [each for each in self.runtimes if each.passed]
        return [each.name for each in sorted(passed, key=lambda each: each.weighed_seconds)]

    @property
    def chosen(self) -> Tried:
        """The fastest runtime of those that passed."""
        return next(each for each in self.runtimes if each.name == self.order[0])

    @property
    def refused_bits(self) -> dict[int, str]:
        """Why low-bit weights are out, by their bits."""
        return {bits: each.reason for bits, each in self.weights.items() if each.reason is not None}

    @property
    def lacked_memory(self) -> list[str]:
        """What is out for want of memory."""
        return [each.name for each in (*self.runtimes, *self.weights.values()) if each.lacked_memory]

    def table(self) -> dict[str, str]:
        """A line of text for each runtime and each kind of weights, by its name."""
        lines = {each.name: str(each) for each in (*self.runtimes, *self.weights.values())}
        fastest = min(each.round_seconds for each in self.runtimes if each.passed)
        reason = ": with it drafts change no text" if self.chosen.round_seconds > fastest else ""
        lines[self.chosen.name] += f" (chosen{reason})"
        return lines

    def to_dict(self) -> dict[str, Any]:
        """A mapping that JSON can hold, for ``from_dict``."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "DeviceTrial":
        """From ``to_dict``, also through JSON; raises ``ValueError``, ``TypeError`` or ``KeyError`` for others."""
        trial: DeviceTrial = restored(DeviceTrial, values)
        if not trial.order:
            raise ValueError("no runtime passed this trial")
        return trial
