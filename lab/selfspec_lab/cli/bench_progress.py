"""The progress of ``selfspec bench run``: how far it is, and the speedups so far."""

from collections import defaultdict
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.run.measurement import Measurement

_SHOWN = 3


class RunningSpeedups:
    """Speedups over plain decoding, prompt by prompt as they come in."""

    def __init__(self) -> None:
        self._plain: dict[tuple[str, int], float] = {}
        self._waiting: dict[tuple[str, int], list[tuple[str, float]]] = defaultdict(list)
        self._seconds: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def add(self, measurement: Measurement) -> None:
        """Counts one more; a prompt counts once plain decoding has written it too."""
        tokens = len(measurement.token_ids) - 1
        if measurement.error is not None or tokens < 1:
            return
        prompt, seconds = (measurement.prompt, measurement.repeat), measurement.decode_seconds / tokens
        if measurement.candidate == PLAIN:
            self._plain[prompt] = seconds
        else:
            self._waiting[prompt].append((measurement.candidate, seconds))
        if prompt in self._plain:
            for name, mine in self._waiting.pop(prompt, ()):
                plain, total = self._seconds[name]
                self._seconds[name] = plain + self._plain[prompt], total + mine

    @property
    def speedups(self) -> dict[str, float]:
        """By candidate its speedup so far, the fastest first."""
        speedups = {name: plain / mine for name, (plain, mine) in self._seconds.items() if mine > 0}
        return dict(sorted(speedups.items(), key=lambda item: -item[1]))


class RunProgress:
    """A progress bar on standard error with the fastest candidates so far; lines where that is no terminal.

    Attributes:
        failed: names of the candidates that failed at least once.
    """

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self._speedups = RunningSpeedups()
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._prompt: tuple[str, int] | None = None

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """What is done before anything is measured."""
        self._show(text)

    def begin(self, total: int, done: int) -> None:
        """How many measurements there will be, and how many there are already."""
        self._bar.update(self._task, total=total, completed=done)

    def measured(self, measurement: Measurement) -> None:
        """One more; a failure is shown at once."""
        self._speedups.add(measurement)
        self._bar.advance(self._task)
        if measurement.error is not None:
            self.failed.add(measurement.candidate)
            self._console.print(
                f"{measurement.candidate} failed on {measurement.prompt}: {measurement.error}", markup=False
            )
        prompt = (measurement.prompt, measurement.repeat)
        if prompt != self._prompt:
            self._prompt = prompt
            fastest = list(self._speedups.speedups.items())[:_SHOWN]
            speeds = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in fastest)
            self._show(f"repeat {measurement.repeat + 1}, {measurement.prompt}" + (f"; {speeds}" if speeds else ""))

    def _show(self, text: str) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=text)
        else:
            self._console.print(text, markup=False)
