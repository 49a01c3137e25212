"""The target model as 2L sublayers: the only place that runs the model."""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec.model.cache import KeyValueCache
from selfspec.model.families import Windows, find_family
from selfspec.model.masks import Layout
from selfspec.model.requirements import check_decoder, check_layer
from selfspec.model.rope import Rope
from selfspec.model.sublayers import AttentionSublayer, SequenceState, Step, Sublayer
from selfspec.model.transfer import send
from selfspec.runtimes.arena import FEWEST_SLOTS
from selfspec.runtimes.compiled import compile_block, compile_head
from selfspec.runtimes.fused import FusedAttention, FusedMLP, fast_norm, fuse
from selfspec.runtimes.graphs import Graphs
from selfspec.runtimes.kernels import KernelBuildError
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.products import signature

__all__ = ["RUNTIMES", "SequenceState", "StackOutput", "Step", "Sublayer", "Target"]

RUNTIMES = {
    "auto": "the fastest that works for this model, sublayer by sublayer",
    "eager": "transformers' own modules: slow, and the oracle of the others",
    "fused": "fused blocks; refused where no sublayer of the model can have one",
    "compiled": "fused blocks with kernels for few rows, built by the machine's C++ compiler; CPU only",
    "graphs": "fused blocks, replayed as CUDA graphs where rows are few; CUDA only, and not measured yet",
}
"""How the sublayers run. ``auto`` takes what has been measured to be fastest, so it does not take ``graphs`` yet."""


@dataclass
class StackOutput:
    """What a run of sublayers gives.

    Attributes:
        hidden_states: ``[rows, hidden]``, the residual stream behind the last sublayer that ran.
        captured: by sublayer ``i`` the residual stream before it, ``h[i]``, ``[rows, hidden]`` of the rows to keep.
    """

    hidden_states: torch.Tensor
    captured: dict[int, torch.Tensor] = field(default_factory=dict)


class Target:
    """A Hugging Face causal language model, seen as ``2L`` sublayers that run in any subset.

    The model computes what it did, bit for bit: no attribute of it is set, and all state of a request lives in its
    ``SequenceState``. Fused blocks move weights that are read together into one piece of memory, of which the model's
    own parameters become views (``fusing.Product``); nothing is held twice.

    Args:
        model: a supported ``PreTrainedModel``, in eval mode, on one device.
        runtime: one of ``RUNTIMES``. Hooks, adapters and quantised layers keep the sublayer that has them on
            transformers' modules; those that come later are noticed at the next request.

    Raises:
        InvalidParameterError: there is no such runtime.
        UnsupportedModelError: the family, or a feature of this model, is not supported, or nothing of it can be fused
            where that was asked for.
    """

    def __init__(self, model: PreTrainedModel, runtime: str = "auto") -> None:
        if runtime not in RUNTIMES:
            raise InvalidParameterError(f"there is no runtime '{runtime}'; choose one of {', '.join(RUNTIMES)}")
        self.runtime = runtime
        self.family = find_family(model.config)
        _check_supported(model)
        self.model = model
        self.config: Any = model.config
        self._head: nn.Module = _head(model)
        check_decoder(model, self.family)
        decoder: Any = model.model
        self._embedding: nn.Module = decoder.embed_tokens
        self._decoder = decoder
        self._final_norm: nn.Module = decoder.norm
        self._embedding_scale = self._find_embedding_scale()
        self._logits_divisor = float(getattr(self.config, self.family.logits_divisor or "", 1.0))
        self._logits_softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.sublayers: list[Sublayer] = []
        self._graphs: Graphs | None = None
        self._captures = runtime == "graphs"
        self._split()
        if runtime == "fused" and self.fused_count == 0:
            raise UnsupportedModelError(
                f"no sublayer of this {self.family.name} model can be fused: its modules are hooked, quantised, "
                "adapted or not transformers' own; use runtime 'auto' or 'eager'"
            )

    @property
    def sublayer_count(self) -> int:
        """``2L``."""
        return len(self.sublayers)

    @property
    def layer_count(self) -> int:
        """``L``."""
        return len(self.sublayers) // 2

    @property
    def fused_count(self) -> int:
        """How many of the sublayers run as fused blocks."""
        return sum(isinstance(sublayer, (FusedAttention, FusedMLP)) for sublayer in self.sublayers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the LM head scores."""
        return int(self.config.vocab_size)

    @property
    def context_limit(self) -> int:
        """Longest sequence of prompt and new tokens together."""
        return int(self.config.max_position_embeddings)

    def room(self, prompt_length: int) -> int:
        """How many new tokens a prompt of so many tokens leaves room for; not positive where there is none."""
        room, switch = self.context_limit - prompt_length, _rope_switch(self.config)
        return room if switch is None or prompt_length > switch else min(room, switch - prompt_length + 1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of keys and values."""
        return self._final_norm.weight.dtype  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._final_norm.weight.device  # type: ignore[return-value]

    def new_sequence(self, prompt_length: int, capacity: int, last_length: int) -> SequenceState:
        """The state of a new request.

        Args:
            prompt_length: tokens of the prompt.
            capacity: cache slots to reserve.
            last_length: tokens that will have gone through the model at the end, at most.

        Raises:
            ContextLengthError: the request crosses the model's rope switch.
        """
        if (
            not all(sublayer.is_current() for sublayer in self.sublayers)
            or signature(self._ends) != self._end_signature
        ):
            self._split()
        long_rope = self._rope.is_long(prompt_length, last_length)
        self._rope.reserve(self._like, capacity)
        leased = None if self._graphs is None else self._graphs.lease(capacity)
        if leased is not None:
            return SequenceState(leased, long_rope)
        heads, head_dim = self._slot_shape
        cache = KeyValueCache(self.layer_count, heads, capacity, head_dim, dtype=self.dtype, device=self.device)
        return SequenceState(cache, long_rope)

    def begin(
        self,
        sequence: SequenceState,
        rows: int,
        *,
        start: int | None = None,
        prefix: int | None = None,
        depths: Iterable[int] | None = None,
        visible: torch.Tensor | None = None,
    ) -> Step:
        """Lays out the rows of a forward.

        Args:
            sequence: the request.
            rows: number of rows.
            start: cache slot of the first row; the end of the committed slots if not given.
            prefix: leading slots that every row sees; ``start`` if not given.
            depths: position of each row, counted from ``prefix``; ``0, 1, 2 …`` if not given.
            visible: bool ``[rows, start + rows - prefix]``, which slots from ``prefix`` on each row sees; if not given,
                the rows of this forward up to itself.
        """
        start = sequence.cache.length if start is None else start
        prefix = start if prefix is None else prefix
        if depths is None:
            positions = torch.arange(prefix, prefix + rows, device=self.device)
            lowest = prefix
        else:
            counted = [prefix + depth for depth in depths]
            positions = send(counted, self.device)
            lowest = min(counted)
        layout = Layout(start, rows, prefix, positions, lowest, visible)
        self._rope.reserve(self._like, layout.end)
        return Step(sequence, layout, self._rope, self._like, prefix if depths is None else None)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before sublayer 0, ``h[0]``: long ``[rows]`` to ``[rows, hidden]``."""
        hidden_states: torch.Tensor = self._embedding(token_ids)
        return hidden_states if self._embedding_scale is None else hidden_states * self._embedding_scale

    def run(
        self,
        hidden_states: torch.Tensor,
        sublayers: Iterable[int],
        step: Step,
        capture: Collection[int] = (),
        through: Callable[[int, torch.Tensor, Step], torch.Tensor] | None = None,
        copies: Mapping[int, torch.Tensor] | None = None,
    ) -> StackOutput:
        """Runs sublayers over the rows of a step and writes their keys and values into the cache.

        Args:
            hidden_states: ``[rows, hidden]``, the residual stream before the first of them.
            sublayers: ascending indices; those not named are skipped.
            step: the layout of the rows.
            capture: sublayers ``i`` (0 to ``2L``) before which to keep the residual stream ``h[i]``; a skipped sublayer
                leaves the stream as it is.
            through: runs a sublayer in its own way, given its index, the stream before it and the step; gives the
                stream behind it.
            copies: by sublayer ``i`` (0 to ``2L``) a tensor ``[k, hidden]`` that gets the last ``k`` rows of ``h[i]``,
                without the others being held.

        Returns:
            The residual stream behind the last one, and the captured ones.
        """
        copies = copies or {}
        if through is None and self._native is not None:
            indices = tuple(sublayers)
            if self._native.takes(hidden_states, indices, step):
                return self._run_natively(hidden_states, indices, step, capture, copies)
            sublayers = indices
        captured: dict[int, torch.Tensor] = {}
        wanted = sorted({*capture, *copies}, reverse=True)
        graphs = self._graphs if through is None and self._graphs is not None and self._graphs.takes(step) else None
        advance = through or (self._advance if graphs is None else graphs.advance)
        stream = hidden_states if graphs is None else graphs.load(hidden_states, step)

        def keep(index: int) -> None:
            if index in capture:
                captured[index] = stream if graphs is None else stream.clone()
            if index in copies:
                copies[index].copy_(stream[len(stream) - len(copies[index]) :])

        for index in sublayers:
            while wanted and wanted[-1] <= index:
                keep(wanted.pop())
            stream = advance(index, stream, step)
        for index in wanted:
            keep(index)
        return StackOutput(stream if graphs is None else stream.clone(), captured)

    def _run_natively(
        self,
        hidden_states: torch.Tensor,
        sublayers: tuple[int, ...],
        step: Step,
        capture: Collection[int],
        copies: Mapping[int, torch.Tensor],
    ) -> StackOutput:
        """``run`` in one call. A state ``h[i]`` is that before the first of the sublayers from ``i`` on."""
        assert self._native is not None
        stream = hidden_states.clone(memory_format=torch.contiguous_format)
        places = {index: bisect_left(sublayers, index) for index in {*capture, *copies}}
        rows = {place: 0 for place in places.values() if place < len(sublayers)}
        for index, place in places.items():
            if place in rows:
                rows[place] = max(rows[place], len(stream) if index in capture else len(copies[index]))
        kept = {place: stream.new_empty(count, stream.shape[1]) for place, count in rows.items()}
        self._native.run(stream, sublayers, step, kept)
        states = {index: kept.get(place, stream) for index, place in places.items()}
        for index, copy in copies.items():
            copy.copy_(states[index][len(states[index]) - len(copy) :])
        return StackOutput(stream, {index: states[index] for index in capture})

    def _advance(self, index: int, stream: torch.Tensor, step: Step) -> torch.Tensor:
        return self.sublayers[index](stream, step)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: ``[rows, hidden]`` to ``[rows, vocab]``, in the model's dtype."""
        logits = self._score(self._norm(hidden_states))
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        if self._logits_softcap is not None:
            logits = torch.tanh(logits / self._logits_softcap) * self._logits_softcap
        return logits

    @torch.inference_mode()
    def warm_up(self, row_counts: Iterable[int]) -> None:
        """Runs the whole model once over each number of rows, on a scratch sequence.

        Graphs are recorded for these numbers of rows, for all lengths that the smallest arena has room for.

        Args:
            row_counts: numbers of rows; those beyond the context limit are left out.
        """
        fitting = [rows for rows in row_counts if rows <= self.context_limit]
        longest = max(fitting, default=1)
        capacity = max(longest, FEWEST_SLOTS) if self._captures else longest
        sequence = self.new_sequence(longest, capacity, longest)
        for rows in fitting:
            tokens = torch.zeros(rows, dtype=torch.long, device=self.device)
            for end in [rows] if self._graphs is None else self._graphs.ends(rows, capacity):
                step = self.begin(sequence, rows, start=end - rows, prefix=0)
                self.logits(self.run(self.embed(tokens), range(self.sublayer_count), step).hidden_states)

    @property
    def _like(self) -> torch.Tensor:
        """A tensor with the model's dtype and device."""
        return self._final_norm.weight  # type: ignore[return-value]

    @property
    def _slot_shape(self) -> tuple[int, int]:
        """Key and value heads, and the size of each, of one cache slot in one layer."""
        heads = self.config.num_attention_heads
        head_dim = getattr(self.config, "head_dim", None) or self.hidden_size // heads
        return getattr(self.config, "num_key_value_heads", None) or heads, head_dim

    def _new_slots(self, slots: int) -> torch.Tensor:
        """Zeros, ``[layers, 2, key_value_heads, slots, head_dim]``."""
        heads, head_dim = self._slot_shape
        return torch.zeros((self.layer_count, 2, heads, slots, head_dim), dtype=self.dtype, device=self.device)

    def _split(self) -> None:
        """Takes the model apart, as it is now."""
        decoder, fused = self._decoder, self.runtime != "eager"
        sublayers = self._split_layers(decoder.layers[: self.config.num_hidden_layers])
        if fused:
            sublayers = [fuse(sublayer, self.family, index // 2) for index, sublayer in enumerate(sublayers)]
        self._norm = fast_norm(self._final_norm, self.family) if fused else self._final_norm
        self._score: Callable[[torch.Tensor], torch.Tensor] = self._head
        self._native: NativeForward | None = None
        if self.runtime in ("auto", "compiled"):
            sublayers = self._compile(sublayers)
        self.sublayers = sublayers
        self._captures = self._captures and not (self._graphs is not None and self._graphs.gave_up)
        self._graphs = Graphs(sublayers, self.device, self._new_slots) if self._captures else None
        self._ends = [self._final_norm, self._head]
        self._end_signature = signature(self._ends)
        self._rope = Rope(decoder.rotary_emb, self._rope_layer_types(), _rope_switch(self.config))

    def _compile(self, sublayers: list[Sublayer]) -> list[Sublayer]:
        try:
            self._score = compile_head(self._head)
            compiled = [compile_block(sublayer) for sublayer in sublayers]
        except KernelBuildError as error:
            if self.runtime == "compiled":
                warnings.warn(f"the compiled runtime falls back to fused blocks: {error}", RuntimeWarning, stacklevel=4)
            return sublayers
        self._native = NativeForward(compiled)
        return compiled

    def _split_layers(self, layers: nn.ModuleList) -> list[Sublayer]:
        eager = self.config._attn_implementation == "eager"
        multiplier = float(getattr(self.config, self.family.residual_multiplier or "", 1.0))
        sublayers: list[Sublayer] = []
        for index, layer in enumerate(layers):
            check_layer(layer, index, self.family)
            attention = AttentionSublayer(
                layer,
                self.family.attention,
                multiplier,
                window=self._window(index),
                rope=self.config.layer_types[index] if self.family.rope_by_layer_type else None,
                eager=eager,
            )
            sublayers += [attention, Sublayer(layer, self.family.mlp, multiplier)]
        return sublayers

    def _window(self, layer: int) -> int | None:
        if self.family.windows is Windows.NONE:
            return None
        if self.family.windows is Windows.BY_LAYER_TYPE and self.config.layer_types[layer] != "sliding_attention":
            return None
        window: int | None = self.config.sliding_window
        return window

    def _rope_layer_types(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.config.layer_types))) if self.family.rope_by_layer_type else ()

    def _find_embedding_scale(self) -> torch.Tensor | float | None:
        if self.family.embedding_multiplier is not None:
            return float(getattr(self.config, self.family.embedding_multiplier))
        if self.family.sqrt_embedding and not hasattr(self._embedding, "embed_scale"):
            # Rounded to the model's dtype, as transformers does.
            return torch.tensor(self.hidden_size**0.5, dtype=self.dtype, device=self.device)
        return None


def _head(model: Any) -> nn.Module:
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM")
    return head


def _check_supported(model: PreTrainedModel) -> None:
    """Refuses what would run but give other text than the model's own."""
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
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise UnsupportedModelError(
            f"the model is spread over {', '.join(sorted(devices))}; put it on one device, without offloading"
        )


def _rope_switch(config: Any) -> int | None:
    """The sequence length past which ``longrope`` takes its long frequencies."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return None
    length = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
    return int(length)
