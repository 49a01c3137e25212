"""The processes that share a model by a ``tp_plan``, which have to decide alike: each runs every round with its part.

Draft tokens, samples and the length of a draft may depend on clocks and random numbers. These come from the first
process, rank 0. What all of them must have in common anyway, they compare.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from selfspec.errors import RanksError, UnsupportedModelError
from selfspec.timing import now

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel, StoppingCriteria

TIMEOUT = "SELFSPEC_RANK_TIMEOUT"
"""The environment variable with the seconds after which a process that does not answer counts as lost."""

_SECONDS = 120.0
_LOADING = timedelta(minutes=30)
"""How much longer than the others one process may take to load its weights."""


class Ranks:
    """One process with a whole model: it decides alone.

    Attributes:
        count: number of processes.
    """

    count = 1

    def clock(self) -> float:
        """Seconds of ``time.perf_counter``, those of rank 0."""
        return now()

    def lead(self, numbers: Sequence[float]) -> list[float]:
        """Numbers as rank 0 has them."""
        return list(numbers)

    def compare(self, what: str, value: object) -> None:
        """Checks that a value, as JSON, is the same on all ranks; an object counts by its class.

        Raises:
            RanksError: it is not; on every rank alike.
        """

    def gather(self, value: str) -> list[str]:
        """A text of every rank."""
        return [value]

    @contextlib.contextmanager
    def same_draws(self) -> Iterator[None]:
        """Inside, torch's global generator of the CPU draws the same on all ranks."""
        yield

    def led(self, criterion: "StoppingCriteria") -> "StoppingCriteria":
        """A stopping criterion that ends the output where it does on rank 0."""
        return criterion


class SharingRanks(Ranks):
    """Several processes that share a model.

    Args:
        count: number of them, all that there are.
        groups: the groups in which the model's forwards exchange rows.

    Raises:
        RanksError: one of them did not come.
    """

    def __init__(self, count: int, groups: Sequence["ProcessGroup"] = ()) -> None:
        self.count = count
        seconds = timedelta(seconds=float(os.environ.get(TIMEOUT, _SECONDS)))
        try:
            self._group = distributed.new_group(backend="gloo", timeout=seconds)
            distributed.monitored_barrier(self._group, timeout=_LOADING)
        except RuntimeError as error:
            raise lost_rank(error) from error
        for group in (None, *groups):
            distributed.distributed_c10d._set_pg_timeout(seconds, group)  # transformers' own is two hours

    def clock(self) -> float:
        """See ``Ranks``."""
        return self.lead([now()])[0]

    def lead(self, numbers: Sequence[float]) -> list[float]:
        """See ``Ranks``."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        distributed.broadcast(tensor, 0, group=self._group)
        led: list[float] = tensor.tolist()
        return led

    def compare(self, what: str, value: object) -> None:
        """See ``Ranks``."""
        text = json.dumps(value, sort_keys=True, default=lambda each: type(each).__qualname__)
        own = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.long)
        of_all = [torch.zeros_like(own) for _ in range(self.count)]
        distributed.all_gather(of_all, own, group=self._group)
        others = [str(rank) for rank, each in enumerate(of_all) if not torch.equal(each, of_all[0])]
        if others:
            raise RanksError(
                f"rank {', '.join(others)} and rank 0 differ in {what}; give all processes of a model the same"
            )

    def gather(self, value: str) -> list[str]:
        """See ``Ranks``."""
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value, group=self._group)
        return values

    @contextlib.contextmanager
    def same_draws(self) -> Iterator[None]:
        """See ``Ranks``."""
        (seed,) = self.lead([int(torch.randint(2**52, (1,)))])
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(int(seed))
            yield

    def led(self, criterion: "StoppingCriteria") -> "StoppingCriteria":
        """See ``Ranks``."""

        def ends(token_ids: torch.Tensor, scores: Any) -> bool:
            own = torch.as_tensor(criterion(token_ids, scores)).all()
            return bool(self.lead([bool(own)])[0])

        return ends  # type: ignore[return-value]


def ranks_of(model: "PreTrainedModel") -> Ranks:
    """The processes that share a model; each of them has to call this.

    Raises:
        UnsupportedModelError: its weights are shared in another way than by a ``tp_plan``, or not by all processes.
    """
    sharded, count = any(map(is_sharded, model.parameters())), _sharing(model)
    config = getattr(model.config, "distributed_config", None)
    others = [name for name in ("pp_size", "fsdp_size", "ep_size") if (getattr(config, name, None) or 1) > 1]
    if others or (sharded and count == 1):
        raise UnsupportedModelError(
            f"the weights of this model are shared by {' and '.join(others) or 'FSDP'}, and drafts run on tensor "
            "parallel models only; load it with DistributedConfig(tp_plan='auto')"
        )
    if count == 1:
        return Ranks()
    if distributed.get_world_size() != count:
        raise UnsupportedModelError(
            f"{count} of {distributed.get_world_size()} processes share this model; start as many as share it"
        )
    mesh: Any = getattr(model, "_device_mesh", None)
    return SharingRanks(count, [] if mesh is None else mesh.get_all_groups())


def heads_of_rank(model: "PreTrainedModel", heads: int) -> int:
    """Of the key and value heads of a layer, those whose projections this process holds.

    Raises:
        UnsupportedModelError: they cannot be shared evenly.
    """
    if (count := _sharing(model)) == 1:
        return heads
    plan = getattr(model, "tp_plan", None) or {}
    if not any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items()):
        return heads
    if heads % count:
        raise UnsupportedModelError(
            f"{count} processes cannot share the {heads} key and value heads of this model evenly; start as many as "
            f"divide {heads}"
        )
    return heads // count


def is_sharded(weight: torch.Tensor) -> bool:
    """Whether a weight is one process's part of a larger one, or a copy that is kept equal to others."""
    return hasattr(weight, "device_mesh")


def is_lost_rank(error: BaseException) -> bool:
    """Whether an exception means that another process ended, or did not answer in time."""
    text = str(error)
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "Gloo" in text or "NCCL" in text)
    )


def lost_rank(error: BaseException) -> RanksError:
    """The error of a process that another one left."""
    return RanksError(
        f"another process that shares the model ended or did not answer ({str(error).splitlines()[0][-120:]}); look at "
        "its own error, and start all of them again"
    )


def _sharing(model: Any) -> int:
    """How many processes share each weight."""
    return int(getattr(model, "_tp_size", None) or 1)
