"""Mixtures of experts in a native forward: the same weights, those of all experts as one product.

Where a forward is not native, transformers' own module runs.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from selfspec.model.families import Family, Mixture
from selfspec.model.sublayers import BranchSublayer, Sublayer
from selfspec.runtimes.activations import activation_of
from selfspec.runtimes.fused import FusedBlock, fast_norms
from selfspec.runtimes.packed import LowBitLinear
from selfspec.runtimes.products import (
    CompiledProduct,
    DenseProduct,
    Product,
    are_plain,
    can_join,
    has_kernels,
    is_ordinary,
    join,
    join_parameters,
    signature,
    turn_parameter,
)

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the weights of all experts."""

_PARTS = {"experts", "shared_expert", "shared_experts", "shared_expert_gate"}


@dataclass(frozen=True, eq=False)
class Routing:
    """How rows choose experts; see ``mixture.h``.

    Attributes:
        normalizes: the weights of a row's experts add up to one.
        sigmoid: scores are sigmoids of logits, not shares in a softmax.
        bias: float32 ``[experts]``, added to scores where experts are chosen.
        groups: of experts, which are chosen from ``kept_groups`` of them.
        kept_groups: those whose best experts have the largest sum of scores.
        best_of_group: as many experts of a group count for this, 1 or 2.
        scale: of the weights of a row's experts.
        exact: logits are float32.
        shared_gated: the shared expert has a gate.
    """

    normalizes: bool
    sigmoid: bool
    bias: torch.Tensor | None
    groups: int
    kept_groups: int
    best_of_group: int
    scale: float
    exact: bool
    shared_gated: bool


def _routing(module: Any, router: Any, mixture: Mixture) -> Routing:
    bias = None
    if mixture.bias is not None:
        bias = module
        for name in mixture.bias.split("."):
            bias = getattr(bias, name)
        bias = bias.detach().float().flatten().contiguous()
    groups, kept = (int(getattr(router, name, None) or 1) for name in ("num_group", "topk_group"))
    if getattr(router, "topk_method", None) == "greedy":
        groups = kept = 1
    return Routing(
        normalizes=bool(getattr(router, "norm_topk_prob", mixture.normalizes)),
        sigmoid=mixture.sigmoid,
        bias=bias,
        groups=groups,
        kept_groups=kept,
        best_of_group=mixture.best_of_group,
        scale=float(getattr(router, "routed_scaling_factor", getattr(router, "router_scaling_factor", 1.0))),
        exact=mixture.exact or bias is not None,
        shared_gated=hasattr(module, "shared_expert_gate"),
    )


class CompiledMixture(FusedBlock):
    """Norm, router, the experts that rows choose, and one that all rows share if there is one.

    Attributes:
        router: its logits, with that of the gate of the shared expert after them.
        routing: which experts a row chooses by them.
        products: gate and up of all experts, down of all; the same of the shared expert if there is one.
        count: experts.
        top: how many of them a row chooses.
    """

    def __init__(self, generic: BranchSublayer, family: Family) -> None:
        super().__init__(generic)
        module: Any = self.module
        assert family.mixture is not None
        router, experts = getattr(module, family.mixture.router), module.experts
        self.norms = fast_norms(self, family)
        self.count, self.top = int(experts.num_experts), int(router.top_k)
        self.routing = _routing(module, router, family.mixture)
        self.activate = activation_of(experts)
        gates = [router.weight]
        products = [_all_experts(experts, name, family.mixture) for name in EXPERT_WEIGHTS]
        if (shared := getattr(module, family.mixture.shared, None)) is not None:
            if self.routing.shared_gated:
                gates.append(module.shared_expert_gate.weight)
            products += [join([shared.gate_proj, shared.up_proj]), join([shared.down_proj])]
        self.router = DenseProduct(join_parameters(gates), getattr(router, "bias", None))
        self.products = tuple(map(CompiledProduct, products))
        self._signature = signature(self.modules)

    @property
    def expert_weights(self) -> int:
        """Number of weights of all experts, of which rows read those that they choose."""
        return sum(math.prod(product.shape) for product in self.products[:2])


def compile_mixture(sublayer: Sublayer, family: Family) -> Sublayer:
    """The native form of a mixture of experts of a family that has them; any other sublayer as it is."""
    if not isinstance(sublayer, BranchSublayer) or not _is_own_mixture(sublayer, family):
        return sublayer
    assert family.mixture is not None
    weights = list(sublayer.parameters())
    if family.mixture.exact or family.mixture.bias is not None:  # its router may be float32
        router = {id(weight) for weight in getattr(sublayer.module, family.mixture.router).parameters()}
        weights = [weight for weight in weights if id(weight) not in router]
    return CompiledMixture(sublayer, family) if has_kernels(weights) else sublayer


def _is_own_mixture(sublayer: BranchSublayer, family: Family) -> bool:
    """Whether a sublayer is a mixture of its family's own class, of ordinary weights or low-bit ones."""
    module: Any = sublayer.module
    if family.mixture is None or not family.owns(module, family.mixture.class_ending):
        return False
    if not are_plain(sublayer.modules):
        return False
    if not {name for name, _ in module.named_children()} <= {family.mixture.router, *_PARTS}:
        return False
    router, shared = getattr(module, family.mixture.router), getattr(module, family.mixture.shared, None)
    linears = [] if shared is None else [shared.gate_proj, shared.up_proj, shared.down_proj]
    experts = [getattr(module.experts, name) for name in EXPERT_WEIGHTS]
    dense = [each for each in experts if not isinstance(each, LowBitLinear)]
    biases = [getattr(router, "bias", None), *(expert_bias(module.experts, name) for name in EXPERT_WEIGHTS if dense)]
    if not all(is_ordinary(each, transposed=family.mixture.transposed) for each in dense):
        return False
    ordinary = [router.weight, *(each for each in biases if each is not None)]
    return all(map(is_ordinary, ordinary)) and all(can_join([each]) for each in linears)


def _all_experts(experts: Any, name: str, mixture: Mixture) -> Product:
    """A product of the weights of all experts."""
    weights: nn.Parameter | LowBitLinear = getattr(experts, name)
    if isinstance(weights, LowBitLinear):
        return join([weights])
    by_outputs = turn_parameter(weights) if mixture.transposed else weights.data
    bias = expert_bias(experts, name)
    return DenseProduct(by_outputs.flatten(0, 1), None if bias is None else bias.data.flatten())


def expert_bias(experts: Any, name: str) -> nn.Parameter | None:
    """The biases ``[experts, outputs]`` of one of ``EXPERT_WEIGHTS``, where there are any."""
    return getattr(experts, f"{name}_bias", None)
