"""A Hugging Face model taken apart: embedding, sublayers, rope, final norm, head. What is computed, not how fast."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from selfspec.errors import UnsupportedModelError
from selfspec.model.cache import KeyValueCache
from selfspec.model.families import Branch, Family, RopeLayout, Windows
from selfspec.model.forward import Forward
from selfspec.model.placement import device_of, placement_of
from selfspec.model.ranks import heads_of_rank
from selfspec.model.rope import Rope
from selfspec.model.sublayers import AttentionSublayer, BranchSublayer, Sublayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODULES = ("model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb")


class Decoder:
    """The modules of a supported causal language model. No attribute of the model is set.

    Args:
        model: in eval mode.

    Attributes:
        family: the row of its family.
        placement: where its weights are.
        embedding: the module that embeds tokens.
        embedding_scale: what embeddings are multiplied by; ``None`` for nothing.
        final_norm: the norm before the head.
        head: the LM head.
        tree_refusal: why rows cannot be a token tree, if they cannot.
        slot_shape: key and value heads in this process, and the size of each, of one cache slot in one layer; the most
            where layers differ.
        slot_layers: number of layers that keep keys and values.
        slot_has_values: a slot has a value beside a key, not a latent of both.
        has_states: layers carry states from token to token, as recurrent ones do.
        reads_tokens: layers read the tokens of their rows, so that a forward runs only after these were embedded.
        logits_divisor: the head's outputs are divided by it.
        logits_softcap: caps them afterwards; ``None`` for no cap.

    Raises:
        UnsupportedModelError: the family, or a feature of this model, is not supported.
    """

    def __init__(self, model: "PreTrainedModel", family: Family) -> None:
        _check_supported(model)
        self.family, self.model, self.placement = family, model, placement_of(model)
        self.config: Any = model.config
        self.head: nn.Module = _head(model)
        self.embedding_scale: torch.Tensor | float | None = None
        self.tree_refusal: str | None = None
        self.has_states = self.reads_tokens = False
        self.slot_has_values = True
        self.logits_divisor = 1.0
        self.logits_softcap: float | None = None
        self._take_apart()

    def _take_apart(self) -> None:
        _require(self.model, _MODULES, f"this {self.family.name} model", self.family)
        self._parts: Any = self.model.model
        self.embedding: nn.Module = self._parts.embed_tokens
        self.final_norm: nn.Module = self._parts.norm
        self.embedding_scale = self._find_embedding_scale()
        self.logits_divisor = float(getattr(self.config, self.family.logits_divisor or "", 1.0))
        self.logits_divisor /= float(getattr(self.config, self.family.logits_multiplier or "", 1.0))
        self.logits_softcap = getattr(self.config, "final_logit_softcapping", None)
        self.slot_has_values, self.slot_layers = not self.family.latent, self.layer_count
        self.slot_shape = self._find_slot_shape()

    @property
    def layer_count(self) -> int:
        """``L``."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def like(self) -> torch.Tensor:
        """A tensor with the model's dtype, on the device where rows enter."""
        return self.placement.like(self.final_norm.weight)  # type: ignore[arg-type]

    def _find_slot_shape(self) -> tuple[int, int]:
        if self.family.latent:
            return 1, int(self.config.kv_lora_rank + self.config.qk_rope_head_dim)
        heads = self.config.num_attention_heads
        head_dim = getattr(self.config, "head_dim", None) or self.hidden_size // heads
        return heads_of_rank(self.model, getattr(self.config, "num_key_value_heads", None) or heads), head_dim

    @property
    def context_limit(self) -> int:
        """Longest sequence of prompt and new tokens together."""
        return int(self.config.max_position_embeddings)

    def room(self, prompt_length: int) -> int:
        """Number of new tokens that fit after a prompt; zero or negative if none do."""
        room, switch = self.context_limit - prompt_length, self._rope_switch
        return room if switch is None or prompt_length > switch else min(room, switch - prompt_length + 1)

    def embed(self, token_ids: torch.Tensor, forward: Forward | None = None) -> torch.Tensor:
        """The residual stream before sublayer 0: long ``[rows]`` to ``[rows, hidden]``.

        ``forward`` has the rows' positions, which embeddings of models without a row of the table may depend on.
        """
        hidden_states: torch.Tensor = self.embedding(token_ids)
        return hidden_states if self.embedding_scale is None else hidden_states * self.embedding_scale

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the family's divisor and soft cap to the head's outputs, ``[rows, outputs]``."""
        if self.logits_divisor != 1.0:
            logits = logits / self.logits_divisor
        if self.logits_softcap is not None:
            logits = torch.tanh(logits / self.logits_softcap) * self.logits_softcap
        return logits

    def split(self) -> list[Sublayer]:
        """The ``2L`` sublayers, run by the model's own modules."""
        eager = self.config._attn_implementation == "eager"
        multiplier = float(getattr(self.config, self.family.residual_multiplier or "", 1.0))
        sublayers: list[Sublayer] = []
        for index, layer in enumerate(self._parts.layers[: self.layer_count]):
            _check_layer(layer, index, self.family)
            attention = AttentionSublayer(
                layer,
                self.family,
                multiplier,
                window=self._window(index),
                rope=self.config.layer_types[index] if self.family.rope_by_layer_type else None,
                eager=eager,
            )
            sublayers += [attention, BranchSublayer(layer, self.family.mlp, multiplier)]
        return sublayers

    def new_rope(self) -> Rope:
        """The model's rope, by a private copy of its module."""
        layer_types = tuple(sorted(set(self.config.layer_types))) if self.family.rope_by_layer_type else ()
        neighbours = self.family.rope is RopeLayout.NEIGHBOURS
        once = self.family.angles_once
        return Rope(self._parts.rotary_emb, layer_types, self._rope_switch, neighbours=neighbours, once=once)

    def new_cache(self, capacity: int, *, packed: bool = False) -> KeyValueCache:
        """An empty cache with ``capacity`` slots, ``packed`` in 8 bits or not."""
        heads, head_dim = self.slot_shape
        like = self.like
        devices = None if self.placement.is_whole else self._layer_devices()
        return KeyValueCache(
            self.slot_layers,
            heads,
            capacity,
            head_dim,
            dtype=like.dtype,
            device=like.device,
            packed=packed,
            devices=devices,
            has_values=self.slot_has_values,
        )

    def new_slots(self, slots: int) -> torch.Tensor:
        """Zeros for the keys and values of all layers, ``[layers, 2, key_value_heads, slots, head_dim]``."""
        heads, head_dim = self.slot_shape
        return self.like.new_zeros((self.slot_layers, 1 + self.slot_has_values, heads, slots, head_dim))

    def _layer_devices(self) -> list[torch.device]:
        """The device of each layer's attention, where its keys and values are."""
        attention = self.family.attention.module
        return [device_of(getattr(layer, attention)) for layer in self._parts.layers[: self.layer_count]]

    @property
    def _rope_switch(self) -> int | None:
        """The sequence length past which ``longrope`` takes its long frequencies."""
        parameters = getattr(self.config, "rope_parameters", None) or {}
        if parameters.get("rope_type") != "longrope":
            return None
        length = parameters.get("original_max_position_embeddings") or self.config.original_max_position_embeddings
        return int(length)

    def _window(self, layer: int) -> int | None:
        if self.family.windows is Windows.NONE:
            return None
        if self.family.windows is Windows.BY_LAYER_TYPE and self.config.layer_types[layer] != "sliding_attention":
            return None
        window: int | None = self.config.sliding_window
        return window

    def _find_embedding_scale(self) -> torch.Tensor | float | None:
        if self.family.embedding_multiplier is not None:
            return float(getattr(self.config, self.family.embedding_multiplier))
        if self.family.sqrt_embedding and not hasattr(self.embedding, "embed_scale"):
            # Rounded to the model's dtype, as transformers does.
            return torch.tensor(self.hidden_size**0.5, dtype=self.like.dtype, device=self.like.device)
        return None


def _head(model: Any) -> nn.Module:
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM")
    return head


def _check_supported(model: "PreTrainedModel") -> None:
    """Refuses what would run but generate other text than the model's own."""
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"attention implementation '{implementation}' takes no tree masks; "
            "load the model with attn_implementation='sdpa'"
        )
    if model.training:
        raise UnsupportedModelError(
            "the model is in training mode, where dropout makes it random; call model.eval() first"
        )
    _check_activations(model)


def _check_layer(layer: nn.Module, index: int, family: Family) -> None:
    """Refuses a layer that lacks a module which its family's row names.

    The linear layers of a module are checked only if it is of the family's own class: another one (a mixture of
    experts, a quantised or a user's own module) is called as it is.
    """
    for branch in (family.attention, family.mlp):
        _require(layer, _names(layer, branch, family), f"layer {index} of this {family.name} model", family)


def _check_activations(model: "PreTrainedModel") -> None:
    """Refuses a model that quantises the inputs of its layers, not only their weights.

    A scale that several rows share makes the rows of a verification depend on each other. Even with a scale for each
    row, rounding to few integers turns differences in the last bit into differences that change a text. Layers are
    recognised by their names in torchao and bitsandbytes, so that neither package is needed.
    """
    for name, module in model.named_modules():
        kind = _activation_quantiser(module)
        if kind is not None:
            raise UnsupportedModelError(
                f"layer '{name}' quantises its inputs while the model runs ({kind}), so that a row can depend on the "
                "rows verified with it; quantise the weights only (torchao's weight-only configurations, "
                "bitsandbytes' 4 bits), or load the model unquantised with weights='int8'"
            )


def _activation_quantiser(module: nn.Module) -> str | None:
    """What quantises the inputs of a module; ``None`` where nothing does."""
    kind = type(module)
    if kind.__name__ == "Linear8bitLt":
        return "bitsandbytes' Linear8bitLt"
    if kind.__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return f"torch's dynamic {kind.__name__}"
    weight = vars(module)["_parameters"].get("weight")
    attributes = ("act_quant_kwargs", "activation_quantization", "input_quant_func")  # torchao's, old and new
    quantises = any(getattr(weight, attribute, None) is not None for attribute in attributes)
    return f"torchao's {type(weight).__name__}" if quantises else None


def _names(layer: nn.Module, branch: Branch, family: Family) -> list[str]:
    names = [name for name in (branch.module, branch.norm_before, branch.norm_after) if name is not None]
    if family.owns(getattr(layer, branch.module, None), branch.class_ending):
        names += [f"{branch.module}.{part}" for part in branch.parts]
    return names


def _require(root: nn.Module, names: Iterable[str], owner: str, family: Family) -> None:
    missing = [name for name in names if _find(root, name) is None]
    if missing:
        raise UnsupportedModelError(
            f"{owner} has no module '{missing[0]}', which {family.name} models of transformers have; "
            "load the model with AutoModelForCausalLM and leave its modules in their places"
        )


def _find(root: Any, name: str) -> Any:
    for part in name.split("."):
        root = getattr(root, part, None)
    return root
