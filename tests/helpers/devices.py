"""A CPU that plays an accelerator, and runtimes for it that are wrong, slow, crash, or run out of memory on purpose."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from helpers.low_bit_model import random_model
from selfspec.model.decoder import Decoder
from selfspec.model.forward import Forward
from selfspec.model.observed import take_apart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.candidates import CANDIDATES, Candidate
from selfspec.runtimes.runner import Runner, make_runner
from selfspec.runtimes.trial_table import DeviceTrial

Fault = Callable[[torch.Tensor, torch.Tensor, Forward], torch.Tensor]
"""What a faulty sublayer gives in place of the stream after it, of the streams before and after, and of the forward."""

REFERENCE = CANDIDATES[0]

SMALL = {"num_hidden_layers": 2, "max_position_embeddings": 128}
"""Sizes of a model that a trial runs in no time."""

AMPLE = 600.0
"""Seconds of a trial of which what is right counts, not the time: machines of tests are busy."""


@dataclass(eq=False)
class FaultySublayer(Sublayer):
    """Another sublayer, with a fault."""

    of: Sublayer
    fault: Fault

    def __post_init__(self) -> None:
        super().__init__(self.of.layer)

    @property
    def modules(self) -> list[torch.nn.Module]:
        return self.of.modules

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        return self.fault(hidden_states, self.of(hidden_states, forward), forward)


def faulty(name: str, fault: Fault, index: int = -1) -> Candidate:
    """A runtime whose sublayer of an index has a fault."""

    def build(decoder: Decoder) -> Runner:
        runner = make_runner(decoder, "eager")
        runner.sublayers[index] = FaultySublayer(runner.sublayers[index], fault)
        return runner

    return Candidate(name, "", build)


def failing(name: str, error: Exception, after: int = 0) -> Candidate:
    """A runtime that raises an error when it is built, or after some sublayers have run."""
    calls = [0]

    def fault(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
        calls[0] += 1
        if calls[0] >= after:
            raise error
        return stream

    def build(decoder: Decoder) -> Runner:
        if after == 0:
            raise error
        return faulty(name, fault).build(decoder)

    return Candidate(name, "", build)


def slow(name: str, seconds: float) -> Candidate:
    """A runtime that is right, and waits in every forward."""

    def fault(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
        time.sleep(seconds)
        return stream

    return faulty(name, fault)


# What kernels get wrong.


def _drops_a_key(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """Attention does not see one slot of a longer text: its value is taken out after the fact."""
    part = forward.parts[-1]
    if part.end > 2:
        stream = stream.clone()
        stream[-1] += 0.02 * before[-1]
    return stream


def _many_rows(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """The rows after the eighth are left as they were."""
    return torch.cat([stream[:8], before[8:]]) if forward.rows > 8 else stream


def _several(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """With several rows each is what the one before it should be."""
    return stream.roll(1, 0) if forward.rows > 1 else stream


def _trees(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """Rows of trees skip the sublayer."""
    return before if forward.parts[0].visible is not None else stream


def _sequences(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """Rows of several sequences get each other's."""
    return stream.flip(0) if len(forward.parts) > 1 else stream


def _not_a_number(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """One number of a step is none."""
    stream = stream.clone()
    if forward.rows == 1:
        stream[0, 0] = torch.nan
    return stream


def _scaled(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """A branch is two percent too large."""
    return before + 1.02 * (stream - before)


def _stale_cache(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """Keys that a rejected row has left are not overwritten: the last slot's are those of another row."""
    for part in forward.parts:
        keys = part.sequence.cache.keys[0]
        if part.start > 0 and part.count == 1:
            keys[:, :, part.start] = keys[:, :, part.start - 1]
    return stream


def _column(before: torch.Tensor, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
    """The last column of a product is not written where rows are an odd number."""
    stream = stream.clone()
    if forward.rows % 2:
        stream[:, -1] = before[:, -1]
    return stream


FAULTS: tuple[Fault, ...] = (
    _drops_a_key,
    _many_rows,
    _several,
    _trees,
    _sequences,
    _not_a_number,
    _scaled,
    _stale_cache,
    _column,
)


def random_fault(seed: int, sublayers: int) -> Candidate:
    """A runtime with one of the faults in one of the sublayers."""
    draw = random.Random(seed)
    fault = draw.choice(FAULTS)
    return faulty(f"{fault.__name__} {seed}", fault, draw.randrange(sublayers))


def small() -> Decoder:
    """A random model of these sizes, taken apart."""
    return take_apart(random_model(**SMALL))


def reasons(trial: DeviceTrial) -> dict[str, str | None]:
    """Why each runtime is out, by its name; ``None`` for those that passed."""
    return {each.name: each.reason for each in trial.runtimes}
