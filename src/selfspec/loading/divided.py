"""Models larger than a device: loaded by transformers with a ``device_map``, or by several processes with a plan."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import transformers

from selfspec.errors import InvalidParameterError, MissingPackageError, UnsupportedModelError
from selfspec.model.placement import placement_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DeviceMap = str | Mapping[str, str | int]
"""What transformers takes: ``auto``, or a device for every module by name."""


@dataclass(frozen=True)
class Division:
    """How a model is divided.

    Attributes:
        device_map: over the devices of this process; ``None`` for not.
        tp_plan: ``auto`` to share every weight with the other processes that ``torchrun`` started; ``None`` for not.

    Raises:
        InvalidParameterError: both are given, the plan is unknown, or there are no other processes.
        MissingPackageError: a ``device_map`` needs a package that is not installed.
        UnsupportedModelError: parts would be on disk.
    """

    device_map: DeviceMap | None = None
    tp_plan: str | None = None

    def __post_init__(self) -> None:
        if self.tp_plan is not None:
            self._check_plan()
        if self.device_map is not None:
            if find_spec("accelerate") is None:
                raise MissingPackageError("device_map needs accelerate; run: pip install 'selfspec[parallel]'")
            places = self.device_map if isinstance(self.device_map, Mapping) else {"the model": self.device_map}
            if disk := [name or "the model" for name, place in places.items() if place == "disk"]:
                raise UnsupportedModelError(
                    f"device_map puts {', '.join(disk)} on disk, which every forward would read again; name a device "
                    "with memory, or load the model in fewer bits"
                )

    def __bool__(self) -> bool:
        """Whether the model is divided at all."""
        return self.device_map is not None or self.tp_plan is not None

    def refuse_with(self, name: str) -> None:
        """Raises ``InvalidParameterError`` if the model is divided, where ``name`` does not go together with that."""
        if self:
            raise InvalidParameterError(
                f"device_map and tp_plan divide models of transformers' own modules, not with {name}; leave one out"
            )

    def load(self, source: str, dtype: Any) -> tuple["PreTrainedModel", Mapping[str, Any]]:
        """The model, divided if it is to be, and transformers' report about its weights.

        Raises:
            UnsupportedModelError: transformers has no plan for its family, or parts of it are on disk.
        """
        make: Any = transformers.AutoModelForCausalLM.from_pretrained
        options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        where = self._plan(source) if self.tp_plan else {"device_map": self.device_map}
        model, report = make(source, trust_remote_code=False, **options, **where)
        placement_of(model)
        return model.eval(), report

    def _plan(self, source: str) -> dict[str, Any]:
        config: Any = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        if not getattr(config, "base_model_tp_plan", None):
            raise UnsupportedModelError(
                f"transformers has no tp_plan for the family '{config.model_type}'; divide it by a device_map, or run "
                "it on one device"
            )
        from transformers.distributed.configuration_utils import DistributedConfig

        plan: Any = self.tp_plan
        try:
            return {"distributed_config": DistributedConfig(tp_plan=plan)}
        except TypeError:  # of transformers that takes the plan itself
            return {"tp_plan": plan}

    def _check_plan(self) -> None:
        if self.tp_plan != "auto":
            raise InvalidParameterError(f"tp_plan must be 'auto', not '{self.tp_plan}'")
        if self.device_map is not None:
            raise InvalidParameterError("a model is divided by device_map or by tp_plan, not by both; leave one out")
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            raise InvalidParameterError(
                "tp_plan shares a model between processes, and this is a single one; start them with "
                "torchrun --nproc-per-node N"
            )
