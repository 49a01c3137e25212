"""Cost models for replays: this processor as measured, and a paper's machine by roofline and by the paper's own rule.

*Roofline*: the paper's model on the paper's device, from published bandwidth and peak alone. *Rule*: the cost that the
papers count with: a draft forward costs the share of the sublayers that it runs, a verification as much as a step
(SWIFT, equation 6; DEL, equation 1). A framework whose launches take the time comes near to the rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from selfspec_lab.replay import CostModel
from selfspec_lab.roofline import Device, ModelShape, find_device, find_shape, step_seconds

SELECTION = {"swift": 0.008, "clasp": 0.048, "knapspec": 0.075}
"""Published shares of decoding time that selecting takes: SWIFT figure 6, CLaSp figure 3c, KnapSpec figure 6 (T = 64).
DEL publishes none."""


@dataclass(frozen=True)
class RooflineCost:
    """A model on a device, by bytes and operations.

    Attributes:
        device: the device.
        shape: sizes of the model.
        name: device and model.
        bits: of a weight.
        selection: see ``CostModel``.
    """

    device: Device
    shape: ModelShape
    name: str
    bits: int = 16
    selection: float = 0.0

    def forward(self, attention: float, mlp: float, rows: int, context: int) -> float:
        """Seconds of a forward; see ``CostModel``."""
        return step_seconds(self.shape, self.device, rows, self.bits, context, attentions=attention, mlps=mlp)


@dataclass(frozen=True)
class RuleCost:
    """The papers' rule: seconds are the share of sublayers that run, in units of a step.

    Attributes:
        name: what the rule is.
        selection: see ``CostModel``.
    """

    name: str = "the papers' rule"
    selection: float = 0.0

    def forward(self, attention: float, mlp: float, rows: int, context: int) -> float:
        """Steps of a forward; see ``CostModel``."""
        return (attention + mlp) / 2


@dataclass(frozen=True)
class ProfileCost:
    """This machine, from what ``selfspec profile`` measured.

    Attributes:
        layers: number of layers.
        rows: numbers of rows that were measured, ascending.
        parts: ``[rows, 4]`` seconds: an attention branch per token and without, an MLP branch, head and layout.
        name: what was measured.
        selection: see ``CostModel``.
    """

    layers: int
    rows: tuple[int, ...]
    parts: tuple[tuple[float, float, float, float], ...]
    name: str = "this machine's profile"
    selection: float = 0.0

    @classmethod
    def from_profile(cls, profile: Mapping[str, Any]) -> "ProfileCost":
        """The costs in the result of ``measure_profile``."""
        rows = sorted(map(int, profile["rows"]))
        found = [profile["rows"][str(count)] for count in rows]
        parts = tuple(
            (each["attention_per_token"], each["attention_base"], each["mlp"], each["head"] + each["rest"])
            for each in found
        )
        return cls(int(profile["layers"]), tuple(rows), parts)

    def forward(self, attention: float, mlp: float, rows: int, context: int) -> float:
        """Seconds of a forward, between the measured numbers of rows by linear interpolation; see ``CostModel``."""
        slope, base, branch, outside = (
            float(np.interp(rows, self.rows, column)) for column in zip(*self.parts, strict=True)
        )
        return self.layers * (attention * (slope * context + base) + mlp * branch) + outside


PAPER_MACHINES = {
    "swift": ("RTX A6000", "Llama-2-13B"),
    "clasp": ("A800", "Llama-3-70B"),
    "del": ("A100 40GB", "Llama-2-7B"),
    "knapspec": ("A100", "Llama-3.1-8B"),
}
"""GPU and model of the experiments of each paper. KnapSpec names no GPU; an A100 of 80 GB is assumed."""


def paper_machine(method: str) -> CostModel:
    """The machine of a method's paper, with the paper's share of time for selecting."""
    return with_selection(roofline_cost(*PAPER_MACHINES[method]), method)


def roofline_cost(device: str, model: str, *, bits: int = 16) -> RooflineCost:
    """The cost model of a paper's model on a paper's device.

    Raises:
        InvalidParameterError: nothing is published here about one of them.
    """
    return RooflineCost(find_device(device), find_shape(model), f"{model} on {device}, roofline", bits)


def with_selection(cost: CostModel, method: str) -> CostModel:
    """The cost model with the published share of selection of a method, by its name; without one it takes no time."""
    share = next((share for name, share in SELECTION.items() if name in method), 0.0)
    return replace(cost, selection=share)  # type: ignore[type-var]
