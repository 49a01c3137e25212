"""The runtimes: how the sublayers of a model may run, and what each of them needs.

A new runtime is one line of ``CANDIDATES``. On an accelerator a trial takes the fastest that is right
(``device_trial.py``); on the CPU ``auto`` is ``compiled`` where there are kernels, sublayer by sublayer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from selfspec.errors import InvalidParameterError
from selfspec.model.decoder import Decoder
from selfspec.runtimes.arena import Arenas
from selfspec.runtimes.graphs import Graphs
from selfspec.runtimes.low_bit import LowBitWeights, TorchLowBitWeights
from selfspec.runtimes.runner import Runner, make_runner


@dataclass(frozen=True)
class Candidate:
    """A runtime.

    Attributes:
        name: what the option ``runtime`` and the table of a trial call it.
        summary: what it is, for users.
        build: makes the runtime's form of a model, at full precision. It may raise anything: then a trial leaves it
            out, and says why.
        devices: the types of torch devices that it runs on; empty for all.
        package: a package that it needs, installed by an extra of this name.
        low_bit: makes the low-bit weights that drafts read with it.
    """

    name: str
    summary: str
    build: Callable[[Decoder], Runner]
    devices: frozenset[str] = field(default=frozenset(), kw_only=True)
    package: str | None = field(default=None, kw_only=True)
    low_bit: Callable[[Decoder, Runner], LowBitWeights] = field(default=TorchLowBitWeights, kw_only=True)

    def obstacle(self, device: torch.device) -> str | None:
        """Why a trial on a device leaves it out untried; ``None`` where it may run."""
        if self.devices and device.type not in self.devices:
            return f"it runs on {' and '.join(sorted(self.devices))} alone"
        return self.missing

    @property
    def missing(self) -> str | None:
        """How to install the package that it lacks; ``None`` where it lacks none."""
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"the package {self.package} is not installed: pip install 'selfspec[{self.package}]'"


def make_graphs_runner(decoder: Decoder) -> Runner:
    """The model as fused blocks, replayed as CUDA graphs where rows are few."""
    runner = make_runner(decoder, "fused")
    runner.graphs = Graphs(runner.sublayers, decoder.like.device, Arenas(decoder.new_slots))
    return runner


def make_triton_runner(decoder: Decoder) -> Runner:
    """The model as fused blocks with Triton's products, attention of few rows, head and choice of tokens.

    Where there are CUDA graphs, few rows are replayed.
    """
    runner: Runner = import_module("selfspec.gpu.runtime").with_triton(make_runner(decoder, "fused"), decoder.new_slots)
    return runner


def _triton_weights(decoder: Decoder, runner: Runner) -> LowBitWeights:
    low_bit: LowBitWeights = import_module("selfspec.gpu.low_bit_weights").TritonLowBitWeights(decoder, runner)
    return low_bit


CANDIDATES: tuple[Candidate, ...] = (
    Candidate(
        "eager",
        "transformers' own modules: the reference of the others",
        partial(make_runner, runtime="eager"),
        low_bit=LowBitWeights,
    ),
    Candidate("fused", "fused blocks of torch's operations", partial(make_runner, runtime="fused")),
    Candidate(
        "compiled",
        "fused blocks with kernels for the CPU, of the wheel or built at first use",
        partial(make_runner, runtime="compiled"),
        devices=frozenset({"cpu"}),
        low_bit=LowBitWeights,
    ),
    Candidate("graphs", "fused blocks as CUDA graphs", make_graphs_runner, devices=frozenset({"cuda"})),
    Candidate(
        "triton",
        "fused blocks with Triton kernels, as CUDA graphs where there are any",
        make_triton_runner,
        devices=frozenset({"cuda", "xpu"}),
        package="triton",
        low_bit=_triton_weights,
    ),
)
"""All runtimes. The first is what the others have to agree with."""

RUNTIMES = {
    "auto": "the fastest that is right: on an accelerator found by a trial, on the CPU the compiled kernels",
    **{each.name: each.summary for each in CANDIDATES},
}
"""The values of the option ``runtime``, with what they are."""


def find_candidate(name: str) -> Candidate:
    """The runtime of a name. Raises ``InvalidParameterError``."""
    for each in CANDIDATES:
        if each.name == name:
            return each
    raise InvalidParameterError(f"there is no runtime '{name}'; choose one of {', '.join(RUNTIMES)}")
