"""What of a long text a draft attends to: its latest slots, and blocks of slots that the target attends to most.

At long texts attention is most of a step, and a draft needs little of it: most weight is on few slots, which stay the
same for many tokens (SparseSpec, Zhao et al. 2025; MagicDec, Sadhukhan et al. 2024). The target notes in each
verification how its attention divides over blocks of slots. Drafts see the strongest blocks of each key head, the first
block, and the latest slots. They write to the slots after the text, as all drafts do, and the verification sees all.
"""

from ctypes import POINTER, c_int, cast
from dataclasses import dataclass

import torch

from selfspec.runtimes.formats import SEEN
from selfspec.runtimes.structures import SeenBlocks


@dataclass(frozen=True)
class Reach:
    """What drafts attend to, in slots: all of the ``latest``, and of each key head the ``strongest`` before them."""

    latest: int = 256
    strongest: int = 1024

    @property
    def slots(self) -> int:
        """Of a text as long, or longer."""
        return self.latest + self.strongest


class SeenText:
    """The slots that a draft sees: ``blocks``, int ``[layers, key_heads, count]``, and all from ``latest`` on."""

    def __init__(self, blocks: torch.Tensor, latest: int) -> None:
        self.blocks = blocks.int().contiguous()
        self.latest = latest
        key_heads, count = blocks.shape[1:]
        address = cast(self.blocks.data_ptr(), POINTER(c_int))
        self.structure = SeenBlocks(blocks=address, key_heads=key_heads, count=count, latest=latest)


class AttentionShares:
    """How the target's attention divides over the blocks of a text, as its verifications note it.

    Attributes:
        values: float32 ``[layers, heads, blocks]``: moves halfway to what the first row of a verification has.
    """

    def __init__(self, layers: int, heads: int, key_heads: int, slots: int) -> None:
        self.values = torch.zeros(layers, heads, -(-slots // SEEN))
        self._key_heads = key_heads

    @property
    def noted(self) -> bool:
        """Whether any verification has noted them."""
        return bool(self.values[0, 0].any())

    def strongest(self, length: int, reach: Reach) -> SeenText | None:
        """What a draft after ``length`` slots sees; ``None`` where that is all, or nothing was noted yet."""
        blocks = max(0, length - reach.latest) // SEEN
        count = reach.strongest // SEEN
        if count >= blocks or not self.noted:
            return None
        layers = len(self.values)
        by_key_head = self.values[:, :, :blocks].reshape(layers, self._key_heads, -1, blocks).sum(2)
        by_key_head[..., 0] = torch.inf  # it has the slots on which heads rest
        return SeenText(by_key_head.topk(count).indices.sort().values, blocks * SEEN)
