"""A model of a family without a row of the table, taken apart by looking at one forward of it."""

import sys
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from selfspec.errors import SelfSpecError, UnsupportedModelError, first_line
from selfspec.limits import is_out_of_memory
from selfspec.model.decoder import Decoder
from selfspec.model.families import Family, find_family
from selfspec.model.forward import Forward, Rows, SequenceState
from selfspec.model.rope import OwnRope, Rope
from selfspec.model.skeleton import Skeleton, differ
from selfspec.model.splitting import Splitter
from selfspec.model.sublayers import Sublayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = 9
"""Random tokens on which a model is observed."""

_LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")


class ObservedDecoder(Decoder):
    """The modules of a causal language model whose family has no row. No attribute of the model is set.

    Args:
        model: in eval mode, on one device.
        family: its name.

    Attributes:
        skeleton: the model without its layers.

    Raises:
        UnsupportedModelError: this model cannot be taken apart.
    """

    @torch.inference_mode()
    def _take_apart(self) -> None:
        if len(self.placement.devices) > 1:
            raise UnsupportedModelError(
                f"a '{self.family.name}' model runs by transformers' own modules, and only on one device; put it on "
                "one, or load it in fewer bits"
            )
        self.skeleton = skeleton = Skeleton(self.model)
        self.config = skeleton.config
        self.embedding: Any = self.model.get_input_embeddings()
        self._tokens = tokens = random_tokens(int(self.config.vocab_size), _ROWS, self.like.device)
        cache = transformers.DynamicCache(config=self.config)
        try:
            self._streams, _ = skeleton.observe(tokens, cache)
        except Exception as error:  # any that the model's own code raises
            if isinstance(error, SelfSpecError) or is_out_of_memory(error):
                raise
            raise UnsupportedModelError(
                f"model family '{self.family.name}' is not supported: a forward of it could not be observed "
                f"({first_line(error)})"
            ) from error
        layers, nothing = zip(cache.layers, skeleton.kinds, strict=False), self.like.new_empty(1, 1, 0, 1)
        kept: list[Any] = [layer for layer, kind in layers if kind.place is not None]
        skeleton.seen = [(nothing, nothing) if layer.keys is None else (layer.keys, layer.values) for layer in kept]
        states = [each for pair in skeleton.seen for each in pair]
        self.slot_shape = (
            max((each.shape[1] for each in states), default=1),
            max((each.shape[3] for each in states), default=1),
        )
        self.slot_layers = max(1, len(skeleton.seen))
        calls = [skeleton.calls(self._new_rows(each)) for each in (tokens, tokens.flip(0))]
        self.reads_tokens = skeleton.reads_tokens = differ(*calls)
        self.has_states = any(kind.states for kind in skeleton.kinds)
        self.tree_refusal = self._find_tree_refusal()
        self.final_norm = skeleton.norms[0] if len(skeleton.norms) == 1 else nn.Sequential(*skeleton.norms)
        self.head = _Head(self.head, skeleton)

    def observe(self, token_ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The model's own residual stream before each layer and after the last, and its logits, of a prompt."""
        return self.skeleton.observe(token_ids, transformers.DynamicCache(config=self.config))

    @property
    def like(self) -> torch.Tensor:
        """A tensor with the model's dtype, on the device where rows enter."""
        return self.placement.like(self.skeleton.like)

    def _new_rows(self, tokens: torch.Tensor | None = None) -> Rows:
        """Rows of a fresh sequence with the observed tokens, or others, in whose cache are the keys that were seen."""
        state = SequenceState(self.new_cache(_ROWS))
        rows = Rows(state, 0, _ROWS, 0, settled=True)
        for place, pair in enumerate(self.skeleton.seen):
            for slots, own in zip(state.cache.slots_for(place, 0, _ROWS), pair, strict=True):
                slots[: own.shape[1], : own.shape[2], : own.shape[3]] = own[0]
        self.skeleton.embed(self._tokens if tokens is None else tokens, rows)
        return rows

    def _find_tree_refusal(self) -> str | None:
        if self.has_states:
            return "its recurrent layers read tokens one after the other"
        for layer in self.skeleton.layers:
            for name, buffer in layer.named_buffers():
                if (
                    buffer.dtype == torch.bool
                    and buffer.dim() > 1
                    and not torch.equal(buffer, torch.ones_like(buffer).tril())
                ):
                    return f"its layers have masks of their own ('{name}')"
        return None

    @property
    def context_limit(self) -> int:
        """Longest sequence of prompt and new tokens together."""
        lengths = [getattr(self.config, name, None) for name in _LENGTHS]
        if self._rope_switch is not None:  # other frequencies past this length would need every key to be recomputed
            return self._rope_switch
        return next((int(length) for length in lengths if length), sys.maxsize)

    def _layer_devices(self) -> list[torch.device]:
        return [self.placement.home] * self.slot_layers  # a model on several devices is refused

    def embed(self, token_ids: torch.Tensor, forward: Forward | None = None) -> torch.Tensor:
        """The residual stream before sublayer 0: long ``[rows]`` to ``[rows, hidden]``."""
        assert forward is not None, "embeddings of this model may depend on positions"
        return forward.by_part(lambda own, rows: self.skeleton.embed(token_ids[own], rows))

    @torch.inference_mode()
    def split(self) -> list[Sublayer]:
        """The ``2L`` sublayers, run by the model's own modules."""
        splitter = Splitter(self.skeleton, self._new_rows)
        pairs = [splitter.sublayers(index, stream) for index, stream in enumerate(self._streams[:-1])]
        return [sublayer for pair in pairs for sublayer in pair]

    def new_rope(self) -> Rope:
        """None of ours: the model's own forward rotates."""
        dynamic = (getattr(self.config, "rope_parameters", None) or {}).get("rope_type") == "dynamic"
        return OwnRope(is_stateless=not dynamic and not self.has_states)


def take_apart(model: "PreTrainedModel") -> Decoder:
    """A model by the row of its family, or by looking where it has none.

    Raises:
        UnsupportedModelError: the model, or a feature of it, is not supported.
    """
    family = find_family(model.config)
    if family is not None:
        return Decoder(model, family)
    return ObservedDecoder(model, Family(str(model.config.model_type), classes=""))


class _Head(nn.Module):
    """All that the model does to the states after its final norm, as a module."""

    def __init__(self, head: nn.Module, skeleton: Skeleton) -> None:
        super().__init__()
        self.head = head
        self._skeleton = skeleton

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        return self._skeleton.logits(normed)


def random_tokens(vocabulary: int, count: int, device: torch.device) -> torch.Tensor:
    """Token ids, long ``[count]``, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (count,), generator=generator).to(device)
