"""How prompts are cut into chunks, so that the text does not depend on what else runs, and how much a step reads."""

import math
from dataclasses import dataclass

import torch

from selfspec.runtimes.target import Target

_FEWEST_ROWS = 64
_CPU_CHUNK = 256
_CHUNK = 1024
_FEWEST_TOKENS = 16
_FIRST_TOKENS = 64
_SMOOTHING = 0.5


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of a prompt may end.

    Attributes:
        longest: most tokens of a chunk.
        grain: chunks end at multiples of it, or with the prompt: 1 or ``longest``.
    """

    longest: int
    grain: int

    def end(self, start: int, length: int, most: int) -> int:
        """Where the chunk ends that begins at ``start``, in a prompt of ``length`` tokens.

        At most ``most`` tokens are wanted, at least 1; a chunk may have more, up to ``grain``.
        """
        end = start + max(1, min(most, self.longest))
        return min(length, max(start + self.grain, end // self.grain * self.grain))

    def whole(self, rows: int) -> int:
        """As many of ``rows`` leading tokens as fill chunks that may end there."""
        return rows // self.grain * self.grain


def chunks_of(target: Target, longest: int | None = None) -> Chunks:
    """The chunks in which a model's prompts are read.

    Where rows do not depend on each other, a prompt has the same keys and values however it is cut. In float32 they
    differ by rounding that no text shows, as those of a verification do. Elsewhere the cuts are the same for every
    request, so that a prompt is computed alike alone, beside others, and after a beginning that was found in a prefix
    cache.

    Args:
        target: the model.
        longest: most tokens of a chunk. If not given: as many rows as do not depend on each other, where these are as
            fast as more; else 256 on a CPU, where a chunk takes long, and 1024 elsewhere.
    """
    independent = target.independent_rows if target.independent_rows >= _FEWEST_ROWS else 0
    if longest is None:
        longest = _CPU_CHUNK if target.device.type == "cpu" else _CHUNK
        longest = min(independent, _CHUNK) if independent else longest
    is_free = longest <= independent or target.dtype == torch.float32
    return Chunks(longest, 1 if is_free else longest)


class Pace:
    """How much of prompts a step reads, so that outputs that are being written do not wait long for it.

    Args:
        most_seconds: longest time for reading in a step while outputs are written; ``None`` for any time. A chunk that
            cannot be made shorter may take longer, and so may the first chunks, from which the speed is learned.
    """

    def __init__(self, most_seconds: float | None) -> None:
        self._most_seconds = most_seconds
        self._per_token: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether times matter."""
        return self._most_seconds is not None

    def tokens(self, writing: bool) -> float:
        """Tokens to read in the next step, depending on whether outputs are being written."""
        if self._most_seconds is None or not writing:
            return math.inf
        if self._per_token is None:
            return _FIRST_TOKENS
        return max(_FEWEST_TOKENS, int(self._most_seconds / self._per_token))

    def note(self, tokens: int, seconds: float) -> None:
        """Measures what was read. Later tokens of a prompt take longer, since they see more."""
        if tokens >= _FEWEST_TOKENS:  # fewer take about as long as that many
            now = seconds / tokens
            before = now if self._per_token is None else self._per_token
            self._per_token = max(now, _SMOOTHING * now + (1 - _SMOOTHING) * before)
