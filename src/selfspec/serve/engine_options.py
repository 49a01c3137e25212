"""The options of a server's engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from selfspec.async_engine import AsyncEngine
from selfspec.engine import Engine


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
