"""What is allocated while a piece of code runs, tensor by tensor."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of living tensors that are made while it is on.

    Attributes:
        peak: most bytes alive at once.
        largest: largest single allocation since the last ``restart``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self._live = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def restart(self) -> None:
        """Forgets the largest allocation."""
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        held = {id(leaf.untyped_storage()) for leaf in tree_leaves((arguments, keywords)) if torch.is_tensor(leaf)}
        output = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(output):
            if torch.is_tensor(leaf) and id(leaf.untyped_storage()) not in held:
                self._note(leaf.untyped_storage())
        return output

    def _note(self, storage: Any) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self._live += size
        self.peak, self.largest = max(self.peak, self._live), max(self.largest, size)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._live -= size
