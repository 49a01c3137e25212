"""The config of a model from the header of its GGUF file, for every family that selfspec and llama.cpp both have.

A family is one row of a table. What a row does not say is alike in all of them: sizes, rope, biases, experts, the head.
What a config calls that, transformers' config class tells by the names that it has.
"""

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig

from selfspec.errors import ModelLoadError, UnsupportedModelError, first_line
from selfspec.loading.gguf_ends import read_special_tokens
from selfspec.loading.gguf_family import GgufFamily, Header
from selfspec.loading.gguf_file import MOST_LAYERS
from selfspec.loading.gguf_header import GgufTensor, short
from selfspec.loading.gguf_own import FAMILIES, OTHERS
from selfspec.loading.gguf_readers import usual
from selfspec.loading.gguf_rope import read_rope, rotated_share
from selfspec.loading.gguf_settings import Settings, damaged, refused
from selfspec.model.families import FAMILIES as ROWS
from selfspec.model.families import find_family, require_row

_MOST_HEADS = 2**12
_MOST_HEAD_DIM = 2**13
"""No model has nearly as many. Tables of a model are as long, so that a damaged file may not choose them freely."""

_BLOCK = re.compile(r"blk\.(\d{1,9})\.")


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> PreTrainedConfig:
    """The config of the model in a GGUF file, as transformers has it for the same model.

    What a file does not hold is taken to be absent, as llama.cpp does: a sliding window that is not named, above all,
    which some converters leave out. Every setting of the file is either read or known to change nothing.

    Args:
        metadata: the keys of the file's header.
        tensors: its tensors by name.

    Raises:
        ModelLoadError: a setting is missing or makes no sense.
        UnsupportedModelError: the family, or a setting of this model, is not supported; the message names it.
    """
    settings = Settings(metadata)
    family = _find_family(settings, metadata)
    header = _read_header(settings, tensors, family)
    values = _read_values(family, header)
    tokens = read_special_tokens(metadata, values["vocab_size"])
    settings.refuse_unread()
    kind = transformers.CONFIG_MAPPING[family.model_type]
    known = {name: value for name, value in values.items() if not isinstance(getattr(kind, name, None), property)}
    try:
        config = transformers.AutoConfig.for_model(family.model_type, **known, **tokens)
    except Exception as error:  # each config class has its own checks, and huggingface_hub its own errors
        raise UnsupportedModelError(
            f"this GGUF file's settings fit no {family.model_type} model: {first_line(error.__cause__ or error)}"
        ) from error
    for name, value in tokens.items():  # some classes put ids of their own in the place of none
        setattr(config, name, value)
    (require_row if family.model_type in ROWS else find_family)(config)
    return config


def _find_family(settings: Settings, metadata: Mapping[str, Any]) -> GgufFamily:
    kind = metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModelError(f"this GGUF file holds no model but: {str(kind)[:40]}; take the file of the model")
    if settings.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"the family '{short(settings.architecture)}' of this GGUF file is not supported; supported are "
            f"{', '.join(FAMILIES)}"
        )
    others = (family for name, holds, family in OTHERS if name == settings.architecture and holds(settings))
    family = next(others, FAMILIES[settings.architecture])
    if family.model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no {family.model_type} models; install a newer one"
        )
    return family


def _read_header(settings: Settings, tensors: Mapping[str, GgufTensor], family: GgufFamily) -> Header:
    hidden, blocks = settings.integer("embedding_length"), settings.integer("block_count", most=MOST_LAYERS)
    found = max((int(match[1]) + 1 for match in map(_BLOCK.match, tensors) if match), default=0)
    later = settings.integer("nextn_predict_layers", 0)
    layers = blocks - later
    if not hidden or layers <= 0 or found not in (layers, blocks) or blocks > len(tensors):
        raise ModelLoadError(
            f"this GGUF file has tensors of {found} layers, but says {settings.key('block_count')} {blocks} and "
            f"{settings.key('embedding_length')} {hidden}; download or convert it again"
        )
    if any(f"blk.{block}.nextn.eh_proj.weight" not in tensors for block in range(layers, found)):
        raise refused(
            f"this GGUF file has {settings.key('nextn_predict_layers')} = {later}, but its last blocks have no "
            f"projection (nextn.eh_proj) that heads have"
        )
    if family.own_heads:
        heads = min(settings.largest("attention.head_count"), _MOST_HEADS)
    else:
        heads = settings.integer("attention.head_count", most=_MOST_HEADS)
    if not family.attends and not heads:
        return Header(settings, tensors, layers, hidden, 0, 0, 0)
    if family.latent:
        settings.integer("attention.head_count_kv", heads)  # 1, or that of expanded heads
        turned = settings.integer("rope.dimension_count", most=_MOST_HEAD_DIM)
        if not heads or not turned:
            raise refused(f"this GGUF file has {heads} heads that rotate {turned} entries, which is not supported")
        return Header(settings, tensors, layers, hidden, heads, heads, turned)
    head_dim = settings.integer("attention.key_length", hidden // heads if heads else 0, most=_MOST_HEAD_DIM)
    if family.varies:
        groups = min(settings.largest("attention.head_count_kv"), _MOST_HEADS)
    else:
        groups = settings.integer("attention.head_count_kv", heads, most=_MOST_HEADS)
    value_dim = head_dim if family.own_heads else settings.integer("attention.value_length", head_dim)
    if not heads or not groups or heads % groups or not head_dim or value_dim != head_dim:
        raise refused(
            f"the attention of this GGUF file is not supported: {heads} heads of {head_dim} entries for keys, {groups} "
            f"of {value_dim} for values"
        )
    return Header(settings, tensors, layers, hidden, heads, groups, head_dim)


def _read_values(family: GgufFamily, header: Header) -> dict[str, Any]:
    """The settings of a config that are not token ids."""
    settings, tensors = header.settings, header.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError("this GGUF file has no tensor token_embd.weight; take a file that holds a whole model")
    context = settings.integer("context_length")
    epsilon = settings.number(f"attention.layer_norm_{'rms_' if family.rms else ''}epsilon")
    if not context or not 0 <= epsilon < 1:
        raise damaged(f"this GGUF file has a context of {context} tokens and norms that add {epsilon:g}")
    values = {
        "vocab_size": embedding.shape[0],
        "hidden_size": header.hidden,
        "num_hidden_layers": header.layers,
        "num_attention_heads": header.heads,
        "head_dim": header.head_dim,
        "num_key_value_heads": header.groups,
        "intermediate_size": _read_width(family, settings),
        "max_position_embeddings": context,
        family.norm: epsilon,
        **({"rope_parameters": _read_rope(family, header, context)} if family.rotates else {}),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    kind, own = transformers.CONFIG_MAPPING[family.model_type], family.read_own(header)
    wanted = usual(header, lambda name: hasattr(kind, name) and name not in own, may_be_dense=family.may_be_dense)
    return {**values, **wanted, **own}


def _read_rope(family: GgufFamily, header: Header, context: int) -> dict[str, Any]:
    settings = header.settings
    rope = read_rope(settings, header.tensors, header.head_dim, context, partial=family.partial_rope)
    if rope["rope_type"] == "yarn" and not family.rounds_yarn:
        rope["truncate"] = False
    rope = family.change_rope(settings, rope)
    if not family.rope_by_layer_type:
        return rope
    base = settings.number("rope.freq_base_swa", family.local_base or rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": base}
    if family.partial_rope:
        rotated = round(rope["partial_rotary_factor"] * header.head_dim)
        rotated = settings.integer("rope.dimension_count_swa", rotated)
        local["partial_rotary_factor"] = rotated_share(rotated, header.head_dim)
    return {"full_attention": rope, "sliding_attention": local}


def _read_width(family: GgufFamily, settings: Settings) -> int:
    """The inner width of MLPs, which mixtures need not have."""
    name, default = "feed_forward_length", 0 if "expert_count" in settings else None
    return settings.largest(name, default) if family.varies else settings.integer(name, default)
