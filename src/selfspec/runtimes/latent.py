"""Attention to latents (DeepSeek's MLA) in a native forward: the same weights, without keys and values of every head.

A slot of the cache has the latent and the rotated entries of its keys, for all heads. Where a forward is not native,
transformers' own module runs, on the same cache.
"""

from typing import Any

from torch import nn

from selfspec.model.families import Family
from selfspec.model.sublayers import AttentionSublayer, Sublayer
from selfspec.runtimes.fused import FusedBlock, RowNorm, fast_norm, fast_norms
from selfspec.runtimes.products import CompiledProduct, are_plain, can_join, has_kernels, is_ordinary, join, signature


class CompiledLatentAttention(FusedBlock, AttentionSublayer):
    """Norm, queries and latent in one product, queries of their own latent, attention, values, output.

    Attributes:
        products: queries (or their latent) and latent; queries of theirs where there is one; output.
        query_norm: of the queries' latent, if there is one.
        latent_norm: of the latent.
        expanding: keys and values of all heads by latents, ``[heads * (key + value), latent]``.
        halves: rotated neighbours become two halves of a key in the cache.
        index: of the layer.
        turns: it has a rope, of ``turned`` entries of a key.
    """

    turns = True

    def __init__(self, generic: AttentionSublayer, family: Family, layer: int) -> None:
        super().__init__(generic)
        module: Any = self.module
        self.index, self.norms = layer, fast_norms(self, family)
        linears = [getattr(module, name) for name in latent_linears(module)]
        self.products = tuple(CompiledProduct(join(each)) for each in (linears[:2], *([one] for one in linears[2:])))
        self.query_norm = fast_norm(module.q_a_layernorm, family) if module.q_a_layernorm is not None else None
        self.latent_norm = fast_norm(module.kv_a_layernorm, family)
        self.expanding: nn.Parameter = module.kv_b_proj.weight
        self.heads, self.scale = int(module.num_heads), float(module.scaling)
        self.rank, self.halves = int(module.q_lora_rank or 0), not generic.complex_angles
        self.latent, self.turned = int(module.kv_lora_rank), int(module.qk_rope_head_dim)
        self.key, self.value = int(module.qk_nope_head_dim), int(module.v_head_dim)
        self._signature = signature(self.modules)

    @property
    def head_norms(self) -> list[Any]:
        """The norms within."""
        return [norm for norm in (self.query_norm, self.latent_norm) if norm is not None]


def latent_linears(module: Any) -> list[str]:
    """The linear layers of a module that become products: two that read its input, queries of a latent, the output.

    What expands latents stays as it is.
    """
    if module.q_lora_rank is None:
        return ["q_proj", "kv_a_proj_with_mqa", "o_proj"]
    return ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"]


def compile_latent_attention(sublayer: Sublayer, family: Family, layer: int) -> Sublayer:
    """The native form of attention to latents of a family that has it; any other sublayer as it is."""
    if not isinstance(sublayer, AttentionSublayer) or not _is_own(sublayer, family):
        return sublayer
    return CompiledLatentAttention(sublayer, family, layer) if has_kernels(list(sublayer.parameters())) else sublayer


def _is_own(sublayer: AttentionSublayer, family: Family) -> bool:
    """Whether a sublayer has its family's own modules, and layers and norms that the kernels know."""
    module: Any = sublayer.module
    if not family.latent or not family.owns(module, family.attention.class_ending):
        return False
    if not are_plain(sublayer.modules):
        return False
    if not getattr(module.config, "rope_interleave", True):
        return False
    linears = [getattr(module, name) for name in latent_linears(module)]
    expanding = module.kv_b_proj
    ordinary = type(expanding) is nn.Linear and expanding.bias is None and is_ordinary(expanding.weight)
    joined = can_join(linears[:2]) and all(can_join([each]) for each in linears[2:])
    norms = [norm for norm in (module.q_a_layernorm, module.kv_a_layernorm) if norm is not None]
    return ordinary and joined and all(isinstance(fast_norm(norm, family), RowNorm) for norm in norms)
