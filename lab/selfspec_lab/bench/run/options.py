"""The options of ``selfspec bench run``."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidParameterError
from selfspec.loading import find_gguf_file, parse_device
from selfspec.types import SamplingParams
from selfspec_lab.bench.llama_cpp import obstacle
from selfspec_lab.bench.llama_cpp.library import PACKAGE
from selfspec_lab.bench.options import BenchOptions
from selfspec_lab.bench.run.peers import LLAMA_CPP_PEERS, find_peers

SAMPLING = ("coupled", "speculative")
"""How draft tokens are accepted at a temperature; the default first."""


@dataclass(frozen=True)
class RunOptions(BenchOptions):
    """What to measure; checked at construction.

    Attributes:
        peers: names of peers, ``("all",)`` or ``("none",)``.
        suite: suite as ``read_suite`` takes it.
        limit: most questions per category; ``None`` for all.
        temperature: 0 is greedy.
        top_p: tokens are sampled from the most probable ones up to this total.
        sampling: how draft tokens are accepted at a temperature: ``coupled``, so that all methods write what plain
            decoding writes with the same seed, or ``speculative`` (Leviathan et al. 2023), where texts differ.
        seed: seed of sampling, of the order of candidates, and of the choice of questions.
        context: tokens per passage of a ``text`` suite.
        chat: whether questions are chat messages; ``None`` for the default of ``decide_chat``.
        states: by candidate a file of what it has learned, as ``Engine.load_state`` takes it.
    """

    peers: tuple[str, ...] = ("transformers",)
    suite: str = "mini"
    limit: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    sampling: str = SAMPLING[0]
    seed: int = 0
    context: int = 1024
    chat: bool | None = None
    states: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvalidParameterError(f"temperature must be a finite number of at least 0, not {self.temperature}")
        if self.sampling not in SAMPLING:
            raise InvalidParameterError(f"sampling is {' or '.join(SAMPLING)}, not '{self.sampling}'")
        if not 0 < self.top_p <= 1:
            raise InvalidParameterError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.temperature == 0 and (self.top_p < 1 or self.sampling != SAMPLING[0]):
            raise InvalidParameterError("temperature 0 is greedy: top_p and sampling need a temperature above 0")
        if self.context < 1:
            raise InvalidParameterError(f"context must be at least 1 token, not {self.context}")
        self.peer_names  # noqa: B018 - raises where one is unknown or cannot be measured

    @property
    def peer_names(self) -> list[str]:
        """The peers to measure, each once."""
        return find_peers(self.peers, self._without_llama_cpp)

    @property
    def file(self) -> Path | None:
        """The GGUF file in whose own numbers the model runs, if llama.cpp is to read it, too; else ``None``."""
        return None if self.unpack or self.widen > 1 or not self._has_llama_cpp else find_gguf_file(self.model)

    @property
    def left_out(self) -> str | None:
        """Why ``all`` leaves out some peers, or ``None``."""
        reason = self._without_llama_cpp if "all" in self.peers else None
        return f"{', '.join(LLAMA_CPP_PEERS)} left out: {reason}" if reason else None

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages of the peers of this run, whose versions belong to its stamp."""
        return (PACKAGE,) if self._has_llama_cpp else ()

    @property
    def _has_llama_cpp(self) -> bool:
        return any(name in LLAMA_CPP_PEERS for name in self.peer_names)

    @property
    def _without_llama_cpp(self) -> str | None:
        return obstacle(parse_device(self.device), self.temperature)

    def params(self, repeat: int = 0) -> SamplingParams:
        """How tokens are chosen. Speculative sampling writes another text in each repeat; a coupled one is the same."""
        if self.temperature == 0:
            return SamplingParams(max_new_tokens=self.max_new_tokens)
        speculative = self.sampling == "speculative"
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed + (repeat if speculative else 0),
            acceptance="speculative" if speculative else "coupled",
        )

    def to_dict(self) -> dict[str, Any]:
        """The options, ready for JSON; runs with equal options are repeats of each other."""
        left_out = {"states"} if self.variants else {"states", "variants"}
        own = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {**own, "methods": self.method_names, "peers": self.peer_names}
