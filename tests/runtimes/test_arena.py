"""The arena that replays use, by itself; ``test_graphs.py`` has it with replays."""

import pytest
import torch

from selfspec.runtimes.arena import FEWEST_SLOTS, Arena


def test_an_arena_is_lent_empty() -> None:
    lender = Arena(lambda slots: torch.zeros(2, 2, 1, slots, 4), capacity=5)
    assert lender.capacity == FEWEST_SLOTS
    assert lender.slots.shape == (2, 2, 1, FEWEST_SLOTS + 1, 4)
    cache = lender.lease(5)
    assert (cache.capacity, cache.size_in_bytes) == (5, 2 * 2 * 5 * 4 * 4)
    cache.write(1, 3, torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    assert lender.slots.sum() == 16
    with pytest.raises(AssertionError, match="do not fit"):
        cache.write(1, 4, torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    cache.clear_from(4)
    assert lender.slots.sum() == 8
    del cache
    assert lender.lease(5).keys[1].sum() == 0
