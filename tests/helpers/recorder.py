"""A recorder that does on the CPU what CUDA graphs do: the same operations, same addresses."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST_DEPENDENT = ("_local_scalar_dense", "is_nonzero", "nonzero", "lift_fresh", "equal")
"""Operations that tell the host a value or take one from it, which a capture refuses."""


class Address:
    """Where a tensor lies, without keeping what lies there alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._geometry = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = self._storage()
        assert storage is not None, "a replay reads memory that was given back"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)


class Recording(TorchDispatchMode):
    """Notes every operation with the addresses of what it read and wrote. What it allocated itself stays alive."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[Any]]] = []
        self._own: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        if any(name in str(function) for name in HOST_DEPENDENT):
            raise RuntimeError(f"{function} cannot be captured")
        given = [leaf.untyped_storage() for leaf in tree_leaves((arguments, keywords)) if torch.is_tensor(leaf)]
        noted = self._note((arguments, keywords or {}))
        output = function(*arguments, **(keywords or {}))
        made = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.untyped_storage() not in given]
        self._own += [leaf.untyped_storage() for leaf in made]
        if made or function._schema.is_mutable:
            self._operations.append((function, *noted, self._note(made)))
        return output

    def _note(self, values: Any) -> Any:
        return tree_map_only(torch.Tensor, Address, values)

    def replay(self) -> None:
        for function, arguments, keywords, made in self._operations:
            arguments, keywords = tree_map_only(Address, Address.tensor, (arguments, keywords))
            output = function(*arguments, **keywords)
            again = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]
            for address, tensor in zip(made, again, strict=True) if made else ():
                address.tensor().copy_(tensor)


class StrictRecorder:
    """Replays operations on recorded addresses; a number that the host has put in is the same in every replay."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        with Recording() as recording:
            function()
        return recording.replay
