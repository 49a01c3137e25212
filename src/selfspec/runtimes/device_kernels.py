"""What the kernels of an accelerator do beside products and attention: which tokens rows choose, how far rows agree."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from selfspec.model.forward import Forward
from selfspec.runtimes.chain import Path
from selfspec.runtimes.logits import Logits


@dataclass(frozen=True)
class DeviceKernels:
    """Kernels that run forward by forward, each in a launch of its own.

    Attributes:
        name: what they are called in a ``Path``.
        most_rows: rows of a sequence up to which a row is the same, bit for bit, whichever rows run with it.
        obstacle: what of the model the kernels do not compute, so that no rows are; ``None`` where they compute all.
        choose: gives logits ``[rows, vocab]`` of a forward the token of each row, drawn where the row has a drawing,
            its confidence, and whether it is finite. It does not wait for the device.
    """

    name: str
    most_rows: int
    obstacle: str | None
    choose: Callable[[torch.Tensor, Forward], Logits]

    @property
    def independent_rows(self) -> int:
        """See ``Target.independent_rows``."""
        return 0 if self.obstacle is not None else self.most_rows

    @property
    def path(self) -> Path:
        """How drafts and verifications run with them."""
        return Path(f"{self.name} forward by forward" + ("" if self.obstacle is None else f", but {self.obstacle}"))
