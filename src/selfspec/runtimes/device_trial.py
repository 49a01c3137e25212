"""The trial of an accelerator: which runtimes and low-bit weights are right on it, and how fast they are.

Each candidate runs random forwards (``comparison.py``) of the user's model and has to give what its reference gives:
transformers' modules for a runtime, the rounded weights in the model's dtype for low-bit ones. One that raises, or
gives something else, is out, with the reason. Nothing is assumed of a device, and the same code runs on a CPU in tests.
"""

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from selfspec.errors import DeviceError, OutOfMemoryError, SelfSpecError, first_line
from selfspec.limits import is_out_of_memory
from selfspec.memory import free_bytes
from selfspec.model.decoder import Decoder
from selfspec.model.forward import SequenceState
from selfspec.runtimes.accelerators import device_name
from selfspec.runtimes.candidates import Candidate
from selfspec.runtimes.comparison import Expected, difference, expect, random_stages, run_stages
from selfspec.runtimes.low_bit import LowBitWeights
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.rounded import round_weights
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.trial_table import DeviceTrial, Tried
from selfspec.timing import in_turn, timed

BUDGET = 60.0
"""Seconds after which a trial begins nothing more, compiling and rounding aside."""

PREPARING = 60.0
"""Most seconds of compiling and rounding that do not count; what has begun is finished."""

ROWS = (1, 2, 4, 8, 16)
"""Rows of the forwards that are timed."""

BITS = (8, 4)
"""Low-bit weights that are tried with the fastest runtime."""

_TEXTS, _SLOTS = 3, 1024
_CONTEXT, _REPEATS = 128, 5
_NO_TIME = "the time of the trial was over before it was done"


class Trial:
    """Runs the candidates of one model, compares them and times them.

    Args:
        decoder: the model.
        candidates: the runtimes; the first is the reference of the others.
        skipped: runtimes that are out untried, with the reason.
        budget: see ``BUDGET``.
        seed: of the random forwards.
        clock: tells seconds.
        begin: is called with the name of a candidate before it is built.
    """

    def __init__(
        self,
        decoder: Decoder,
        candidates: Sequence[Candidate],
        *,
        skipped: Mapping[str, str] | None = None,
        budget: float = BUDGET,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        begin: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._decoder, self._candidates, self._skipped = decoder, candidates, skipped or {}
        self._device, self._clock, self._begin = decoder.like.device, clock, begin
        self._started, self._end, self._grace = clock(), clock() + budget, PREPARING
        self._slots = min(_SLOTS, decoder.context_limit)
        self._texts = [
            random_stages(
                int(decoder.config.vocab_size),
                len(decoder.split()),
                self._slots,
                trees=decoder.tree_refusal is None,
                seed=seed * _TEXTS + text,
            )
            for text in range(_TEXTS)
        ]

    def run(self) -> DeviceTrial:
        """Tries all runtimes, then low-bit weights with the fastest that passed.

        Raises:
            DeviceError: a candidate left the device in a state in which this process cannot use it any more.
            Exception: of the reference.
        """
        free = free_bytes(self._device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what candidates warn of is in the table
            runners, runtimes = self._try_runtimes()
            trial = DeviceTrial(device_name(self._device), runtimes, free_bytes=free)
            chosen = next(each for each in self._candidates if each.name == trial.order[0])
            weights = self._try_weights(chosen, runners[chosen.name])
        return replace(trial, weights=weights, seconds=self._clock() - self._started)

    def _try_runtimes(self) -> tuple[dict[str, Runner], tuple[Tried, ...]]:
        reference, *others = self._candidates
        runners: dict[str, Runner] = {reference.name: reference.build(self._decoder)}
        out: dict[str, Tried] = {}
        expected = self._run_stages(runners[reference.name])
        for each in others:
            obstacle = self._skipped.get(each.name) or each.obstacle(self._device)
            if obstacle is None:
                built = self._attempt(each.name, partial(each.build, self._decoder), lambda: expected)
            else:
                built = Tried(each.name, reason=obstacle)
            if isinstance(built, Runner):
                runners[each.name] = built
            else:
                out[each.name] = built
        timed_ones = self._time(runners)
        return runners, tuple(out.get(each.name) or timed_ones[each.name] for each in self._candidates)

    def _try_weights(self, candidate: Candidate, runner: Runner) -> dict[int, Tried]:
        """Tries the low-bit weights of a runtime. They are dropped afterwards; who drafts with them makes them.

        One text is enough, since only products differ from what has passed, and the reference is slow.
        """
        low_bit = candidate.low_bit(self._decoder, runner)
        tried: dict[int, Tried] = {}
        for bits in BITS:
            name, precision = f"{bits} bits", Precision.of(bits)
            expected = partial(self._expect_rounded, low_bit, precision)
            built = self._attempt(name, partial(low_bit.at, precision), expected)
            tried[bits] = built if isinstance(built, Tried) else self._time({name: built})[name]
            low_bit.release(None)
        return tried

    def _expect_rounded(self, low_bit: LowBitWeights, precision: Precision) -> list[list[Expected]]:
        """What weights of a precision have to give, by the same rounded ones in the model's dtype."""
        return self._run_stages(round_weights(low_bit, precision), 1)

    def _attempt(
        self, name: str, build: Callable[[], Runner], expected: Callable[[], list[list[Expected]]]
    ) -> Runner | Tried:
        """A candidate that gives what is expected, or why it is out."""
        if self._is_over:
            return Tried(name, reason=_NO_TIME)
        self._begin(name)
        began = self._clock()
        try:
            runner = build()
            reason = self._compare(runner, expected(), began)
            return runner if reason is None else Tried(name, reason=reason)
        except Exception as error:  # whatever a candidate raises, it does not reach the user
            failed = _failure(name, error)
        return self._checked(failed)

    def _compare(self, runner: Runner, expected: list[list[Expected]], began: float) -> str | None:
        """Why a runner, begun at a time, is out; ``None`` if it gives what is expected.

        What it takes up to the end of the first text is preparing: that compiles and records.
        """
        for stages, references in zip(self._texts, expected, strict=False):
            for stage, ours, reference in zip(stages, run_stages(runner, stages, self._slots), references, strict=True):
                wrong = difference(ours, reference)
                if wrong is not None:
                    return f"in {stage}, {wrong}"
                if runner.problem is not None:
                    return runner.problem
                if self._clock() > self._end + (self._grace if stages is self._texts[0] else 0.0):
                    return _NO_TIME
            if stages is self._texts[0]:
                spent = min(self._clock() - began, self._grace)
                self._grace, self._end = self._grace - spent, self._end + spent
        return None

    def _run_stages(self, runner: Runner, texts: int = _TEXTS) -> list[list[Expected]]:
        """What is expected of candidates in each forward of the first of the texts."""
        return [list(expect(runner, stages, self._slots)) for stages in self._texts[:texts]]

    def _time(self, runners: Mapping[str, Runner]) -> dict[str, Tried]:
        """The least seconds of forwards, measured in turns; a candidate that fails meanwhile is out."""
        tasks: dict[tuple[str, int], Callable[[], None]] = {}
        seconds: dict[str, dict[int, float]] = {name: {} for name in runners}
        out: dict[str, Tried] = {}
        for name, runner in runners.items():
            tasks |= {(name, rows): task for rows, task in self._forwards(runner).items()}
        for turn in range(1 + _REPEATS):
            for name, rows in in_turn(list(tasks), turn):
                if name in out or (turn > 1 and self._is_over):
                    continue
                try:
                    taken = timed(tasks[name, rows], self._device, self._clock)
                except Exception as error:
                    out[name] = _failure(name, error)
                else:
                    least = math.inf if turn <= 1 else seconds[name][rows]  # the first turn warms up
                    seconds[name][rows] = min(least, max(taken, 1e-9))
        for each in out.values():
            self._checked(each)
        return {
            name: out.get(name)
            or Tried(name, dict(sorted(seconds[name].items())), is_exact=runner.independent_rows >= max(ROWS))
            for name, runner in runners.items()
        }

    def _forwards(self, runner: Runner) -> dict[int, Callable[[], None]]:
        """Forwards of the whole model after a short context, up to the choice of tokens, by their rows."""
        context = min(_CONTEXT, max(0, self._slots - max(ROWS)))
        state, every = SequenceState(runner.new_cache(self._slots)), range(len(runner.sublayers))

        @torch.inference_mode()
        def forward(rows: int) -> None:
            tokens = torch.zeros(rows, dtype=torch.long, device=self._device)
            layout = runner.lay_out(state, rows, start=context)
            logits = runner.run(runner.embed(tokens, layout), every, layout, logits=True).logits
            assert logits is not None
            _ = logits.best

        return {rows: partial(forward, rows) for rows in ROWS if context + rows <= self._slots}

    @property
    def _is_over(self) -> bool:
        return self._clock() > self._end

    def _checked(self, failed: Tried) -> Tried:
        """A candidate that failed, after a check that the device still works."""
        if failed.lacked_memory:
            gc.collect()
        try:
            torch.zeros(1, device=self._device).add_(1).item()
        except Exception as error:
            raise DeviceError(
                f"{device_name(self._device)} cannot be used by this process since the runtime '{failed.name}' was "
                f"tried ({failed.reason}); start again: it is left out then"
            ) from error
        return failed


def _failure(name: str, error: Exception) -> Tried:
    lacked_memory = is_out_of_memory(error) or isinstance(error, OutOfMemoryError)
    if isinstance(error, SelfSpecError):
        return Tried(name, reason=first_line(error), lacked_memory=lacked_memory)
    kind = "out of memory" if lacked_memory else type(error).__name__
    return Tried(name, reason=f"{kind}: {first_line(error)}", lacked_memory=lacked_memory)
