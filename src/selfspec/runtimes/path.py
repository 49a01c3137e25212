"""Where a draft or a verification runs, and why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Path:
    """Whether something runs in one native call.

    Attributes:
        reason: why it runs forward by forward from Python; ``None`` where it runs natively.
    """

    reason: str | None = None

    @property
    def native(self) -> bool:
        """Whether it runs in one native call."""
        return self.reason is None

    def __str__(self) -> str:
        return "native" if self.reason is None else f"Python: {self.reason}"


NATIVE = Path()
NO_KERNELS = Path("no kernels run this model here")
