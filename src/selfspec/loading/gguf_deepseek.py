"""What GGUF files say of mixtures with sigmoid or softmax routers and shared experts, and of attention to latents."""

from typing import Any

from selfspec.loading.gguf_family import Header
from selfspec.loading.gguf_readers import integers, numbers, reads
from selfspec.loading.gguf_settings import Settings, damaged, refused

_SOFTMAX, _SIGMOID = 1, 2
"""Values of ``expert_gating_func``; files of DeepSeek-V2 may have none."""

_GLM_FLASH_BLOCKS, _GLM_FLASH_ENTRIES = (47, 48), 154_880
"""The shape of GLM-4.7-Flash, without and with its head: files of it may not say that it has sigmoids."""

_YARN_UNIT = 0.1
"""What llama.cpp's converter multiplies the scale of attention by."""


def has_sigmoids(settings: Settings) -> bool:
    """Whether experts are scored by sigmoids.

    Raises:
        UnsupportedModelError: they are scored in another way than by these or a softmax.
    """
    kind = settings.integer("expert_gating_func", 0)
    if kind not in (0, _SOFTMAX, _SIGMOID):
        raise refused(f"this GGUF file scores experts in a way that is not known ({kind})")
    return kind == _SIGMOID or (kind == 0 and _is_glm_flash(settings))


def _is_glm_flash(settings: Settings) -> bool:
    blocks, entries = settings.integer("block_count", 0), settings.integer("vocab_size", 0)
    return settings.architecture == "deepseek2" and blocks in _GLM_FLASH_BLOCKS and entries == _GLM_FLASH_ENTRIES


def require_sigmoids(header: Header) -> dict[str, Any]:
    """Refuses a router with a softmax."""
    if not has_sigmoids(header.settings):
        raise refused("the router of this GGUF file has a softmax, not the sigmoids of its family")
    return {}


def sigmoids_if_said(header: Header) -> dict[str, Any]:
    """The same where a file says how experts are scored."""
    return require_sigmoids(header) if "expert_gating_func" in header.settings else {}


def read_groups(header: Header) -> dict[str, int]:
    """The groups of experts, and of how many a row uses some."""
    groups = header.settings.integer("expert_group_count", 1) or 1
    used = header.settings.integer("expert_group_used_count", groups) or groups
    count = header.settings.integer("expert_count")
    if count % groups or used > groups:
        raise damaged(f"this GGUF file uses {used} of {groups} groups of {count} experts")
    return {"n_group": groups, "topk_group": used}


read_mixture = reads(
    numbers(0.0, 1.0, routed_scaling_factor="expert_weights_scale"),
    lambda header: {"norm_topk_prob": bool(header.settings.get("expert_weights_norm"))},
    read_groups,
)
"""What a mixture with shared experts has beside its sizes."""


def read_softmax_mixture(header: Header) -> dict[str, Any]:
    """The same of DeepSeek-V2, whose experts' weights are their shares in a softmax."""
    values = read_mixture(header)
    if values["norm_topk_prob"]:
        raise refused(
            f"this GGUF file has {header.settings.key('expert_weights_norm')}, which DeepSeek-V2 of transformers does "
            f"not compute"
        )
    return {**values, "topk_method": "group_limited_greedy" if values["n_group"] > 1 else "greedy"}


latent_ranks = reads(
    integers(0, None, q_lora_rank="attention.q_lora_rank"), integers(kv_lora_rank="attention.kv_lora_rank")
)
"""The widths of the latents."""


def read_latents(header: Header) -> dict[str, Any]:
    """The sizes of attention to latents.

    Files give the sizes of a head's key and value under names of their own; those from before llama.cpp multiplied
    queries by what expands keys have them where other families have them.
    """
    keys, values, turned = (
        header.settings.integer(name)
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    )
    key = header.settings.integer("attention.key_length_mla", keys)
    if not 0 < turned < key:
        raise refused(f"this GGUF file rotates {turned} of the {key} entries of a key, which is not supported")
    return {
        **latent_ranks(header),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": header.settings.integer("attention.value_length_mla", values),
    }


def scale_yarn(settings: Settings, rope: dict[str, Any]) -> dict[str, Any]:
    """A rope with the factors by which YaRN scales attention, which are one number in files."""
    scale = settings.number("rope.scaling.yarn_log_multiplier", 0.0) / _YARN_UNIT
    if rope["rope_type"] != "yarn" or not scale:
        return rope
    return {**rope, **dict.fromkeys(("mscale", "mscale_all_dim"), round(scale, 6))}
