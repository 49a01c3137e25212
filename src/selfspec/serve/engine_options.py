"""The engine of a server, described so that another process can make it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec.async_engine import AsyncEngine
from selfspec.engine import Engine
from selfspec.errors import StateError
from selfspec.memory import available_bytes
from selfspec.methods import METHODS


@dataclass(frozen=True)
class EngineOptions:
    """What makes an engine; as for ``Engine.from_pretrained`` and ``AsyncEngine``.

    Attributes:
        model: a name, a folder or a file.
        method: what drafts where a request names nothing.
        settings: of the method.
        dtype: of the weights.
        device: a torch device.
        weights: ``int8`` or ``int4`` for low-bit weights.
        runtime: how the model runs.
        keep_copies: keep low-bit copies that draft.
        max_batch: most requests that run at a time.
        waiting: requests that may wait.
        memory_limit: most bytes of keys and values; ``None`` for half of the free memory.
        prefix_cache: most bytes of the prefix cache; 0 keeps none, ``None`` up to half of the limit.
        methods: names of the methods that requests may choose; ``None`` for all of this package.
    """

    model: str
    method: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    weights: str | None = None
    runtime: str = "auto"
    keep_copies: bool = False
    max_batch: int = 16
    waiting: int = 256
    memory_limit: int | None = None
    prefix_cache: int | None = None
    methods: tuple[str, ...] | None = None

    def load(self) -> Engine:
        """Loads the model.

        Raises:
            SelfSpecError: it cannot be loaded.
        """
        return Engine.from_pretrained(
            self.model,
            self.method,
            settings=self.settings,
            dtype=self.dtype,
            device=self.device,
            weights=self.weights,
            runtime=self.runtime,
            keep_copies=self.keep_copies,
        )

    def serve(self, engine: Engine) -> AsyncEngine:
        """Makes what takes many requests for an engine.

        Args:
            engine: from ``load``.

        Raises:
            InvalidParameterError: an option is out of range.
        """
        return AsyncEngine(
            engine,
            max_batch=self.max_batch,
            max_waiting=self.waiting,
            memory_limit=self.memory_limit,
            prefix_cache_bytes=self.prefix_cache,
        )

    def shared(self, processes: int) -> "EngineOptions":
        """The options of each of several processes on one machine, which share its memory."""
        free = available_bytes()
        if processes == 1 or (self.memory_limit is None and free is None):
            return self
        limit = free // 2 if self.memory_limit is None and free is not None else self.memory_limit
        each = None if self.prefix_cache is None else self.prefix_cache // processes
        return replace(self, memory_limit=max(1, (limit or 0) // processes), prefix_cache=each)

    def allowed_methods(self, engine: Engine) -> tuple[str, ...]:
        """Names of the methods that a request may choose, the engine's own first."""
        return tuple(dict.fromkeys((engine.method.name, *(METHODS if self.methods is None else self.methods))))


@dataclass(frozen=True)
class StateFile:
    """Where what the method learns is kept.

    Attributes:
        path: the file.
        seconds: between two savings while requests come.
        index: of the worker; those after the first have files of their own beside it.
        asked_for: whether the server's user named the file; otherwise a method without a state keeps none.
    """

    path: Path
    seconds: float = 60.0
    index: int = 0
    asked_for: bool = True

    @property
    def own(self) -> Path:
        """The file of this worker."""
        return self.path if self.index == 0 else self.path.with_name(f"{self.path.name}.{self.index}")

    def load(self, engine: Engine, log: Callable[[str], None] = lambda _: None) -> bool:
        """Loads what was learned, if there is a file: the worker's own, or else the first one's.

        Args:
            engine: whose method learns.
            log: is told what was loaded.

        Returns:
            Whether there will be anything to save.

        Raises:
            StateError: the file does not fit; or it was asked for, and the method learns nothing.
        """
        try:
            engine.method.state()  # raises if the method's settings leave nothing to save
        except StateError:
            if self.asked_for:
                raise
            return False
        for path in (self.own, self.path):
            if path.exists():
                engine.load_state(path)
                log(f"loaded what {engine.method.name} has learned from '{path}'")
                break
        return True
