"""Mixtures of experts in a native forward: the same weights, those of all experts as one product.

Where a forward is not native, transformers' own module runs.
"""

import math
from operator import attrgetter
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


class CompiledMixture(FusedBlock):
    """Norm, router, the experts that rows choose, and one that all rows share if there is one.

    Attributes with the name of a field of ``MixtureWeights`` are that field; see ``mixture.h``.

    Attributes:
        router: its logits, with that of the gate of the shared expert after them.
        bias: float32 ``[experts]``, added to scores where experts are chosen.
        products: gate and up of all experts, down of all; the same of the shared expert if there is one.
    """

    def __init__(self, generic: BranchSublayer, family: Family) -> None:
        super().__init__(generic)
        module: Any = self.module
        mixture = family.mixture
        assert mixture is not None
        router, experts = getattr(module, mixture.router), module.experts
        self.norms = fast_norms(self, family)
        self.count, self.top = int(experts.num_experts), int(router.top_k)
        self.normalizes = bool(getattr(router, "norm_topk_prob", mixture.normalizes))
        self.sigmoid, self.best_of_group = mixture.sigmoid, mixture.best_of_group
        bias: Any = None if mixture.bias is None else attrgetter(mixture.bias)(module)
        self.bias = None if bias is None else bias.detach().float().flatten().contiguous()
        is_greedy = getattr(router, "topk_method", None) == "greedy"
        groups = [1 if is_greedy else int(getattr(router, name, None) or 1) for name in ("num_group", "topk_group")]
        self.groups, self.kept = groups
        self.scale = float(getattr(router, "routed_scaling_factor", getattr(router, "router_scaling_factor", 1.0)))
        self.shared_gated = hasattr(module, "shared_expert_gate")
        self.activate = activation_of(experts)
        gates = [router.weight]
        products = [_all_experts(experts, name, mixture) for name in EXPERT_WEIGHTS]
        if (shared := getattr(module, mixture.shared, None)) is not None:
            if self.shared_gated:
                gates.append(module.shared_expert_gate.weight)
            products += [join([shared.gate_proj, shared.up_proj]), join([shared.down_proj])]
        self.router = DenseProduct(join_parameters(gates), getattr(router, "bias", None))
        is_exact, is_float = mixture.exact or self.bias is not None, self.router.dtype == torch.float32
        self.exact = (1 if is_float else 2) if is_exact else 0
        self.products = tuple(map(CompiledProduct, products))
        self._signature = signature(self.modules)

    @property
    def can_choose(self) -> bool:
        """Whether there are as many experts, and groups of them, as a row chooses, which the kernels do not look at."""
        return 0 < self.top <= self.count and 0 < self.kept <= self.groups and self.count % self.groups == 0

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
    if not has_kernels(weights):
        return sublayer
    mixture = CompiledMixture(sublayer, family)
    return mixture if mixture.can_choose else sublayer


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
