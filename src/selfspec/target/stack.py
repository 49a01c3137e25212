"""The target model as 2L sublayers: the only place that runs the model."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.target.cache import KeyValueCache
from selfspec.target.families import Branch, Windows, find_family
from selfspec.target.masks import Layout
from selfspec.target.rope import Rope, Rotation


@dataclass
class SequenceState:
    """The state of one request inside the target: its cache and which rope frequencies it takes."""

    cache: KeyValueCache
    long_rope: bool = False


@dataclass
class Step:
    """One forward in progress: the layout of its rows, with rope and masks computed once for all sublayers."""

    sequence: SequenceState
    layout: Layout
    rotations: dict[str | None, Rotation]


@dataclass
class StackOutput:
    """What a run of sublayers gives.

    Attributes:
        hidden_states: ``[rows, hidden]``, the residual stream behind the last sublayer that ran.
        captured: by sublayer ``i`` the residual stream before it, ``h[i]``, ``[rows, hidden]``.
    """

    hidden_states: torch.Tensor
    captured: dict[int, torch.Tensor] = field(default_factory=dict)


class _CacheWriter:
    """What transformers' attention gets as ``past_key_values``: writes the rows of a step, returns what they see."""

    def __init__(self, step: Step, window: int | None) -> None:
        self._cache = step.sequence.cache
        self._start = step.layout.start
        self._first = step.layout.first_slot(window)
        self._slots = step.layout.end - self._first

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache.write(layer_idx, self._start, keys, values)
        seen_keys = self._cache.keys[layer_idx].narrow(2, self._first, self._slots)
        seen_values = self._cache.values[layer_idx].narrow(2, self._first, self._slots)
        return seen_keys, seen_values


class Sublayer:
    """One residual branch of a decoder layer: its norms, its module, its multiplier."""

    def __init__(self, layer: nn.Module, branch: Branch, multiplier: float) -> None:
        self.module: nn.Module = getattr(layer, branch.module)
        self.norm_before: nn.Module | None = getattr(layer, branch.norm_before) if branch.norm_before else None
        self.norm_after: nn.Module | None = getattr(layer, branch.norm_after) if branch.norm_after else None
        self.multiplier = multiplier

    def parameters(self) -> Iterable[nn.Parameter]:
        """The weights that one run of this branch reads."""
        for module in (self.norm_before, self.module, self.norm_after):
            if module is not None:
                yield from module.parameters()

    def __call__(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        """Runs the branch and adds it to the residual stream, ``[1, rows, hidden]`` in and out."""
        branch = hidden_states if self.norm_before is None else self.norm_before(hidden_states)
        branch = self._run(branch, step)
        if self.norm_after is not None:
            branch = self.norm_after(branch)
        if self.multiplier != 1.0:
            branch = branch * self.multiplier
        return hidden_states + branch

    def _run(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        output: torch.Tensor | tuple[torch.Tensor, ...] = self.module(hidden_states)
        return output[0] if isinstance(output, tuple) else output


class AttentionSublayer(Sublayer):
    """An attention branch: it reads and writes the cache."""

    def __init__(
        self, layer: nn.Module, branch: Branch, multiplier: float, *, window: int | None, rope: str | None, eager: bool
    ) -> None:
        super().__init__(layer, branch, multiplier)
        self.window = window
        self._rope = rope
        self._eager = eager

    def _run(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        mask = step.layout.mask(self.window, hidden_states.dtype, additive=self._eager, causal_kernel=not self._eager)
        output: torch.Tensor = self.module(
            hidden_states=hidden_states,
            position_embeddings=step.rotations[self._rope],
            attention_mask=mask,
            past_key_values=_CacheWriter(step, self.window),
        )[0]
        return output


class Target:
    """A Hugging Face causal language model, seen as ``2L`` sublayers that run in any subset.

    The model is read, never changed: no attribute of it is set, and all state of a request lives in its
    ``SequenceState``.

    Args:
        model: a supported ``PreTrainedModel``, in eval mode, on one device.

    Raises:
        UnsupportedModelError: the family, or a feature of this model, is not supported.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = find_family(model.config)
        _check_supported(model, self.family.bidirectional_flag)
        self.model = model
        self.config: Any = model.config
        self._head: nn.Module = _head(model)
        decoder: Any = model.model
        self._embedding: nn.Module = decoder.embed_tokens
        self._final_norm: nn.Module = decoder.norm
        self._embedding_scale = self._find_embedding_scale()
        self._logits_divisor = float(getattr(self.config, self.family.logits_divisor or "", 1.0))
        self._logits_softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.sublayers: list[Sublayer] = self._split_layers(decoder.layers[: self.config.num_hidden_layers])
        self._rope = Rope(decoder.rotary_emb, self._rope_layer_types(), _rope_switch(self.config))

    @property
    def sublayer_count(self) -> int:
        """``2L``."""
        return len(self.sublayers)

    @property
    def layer_count(self) -> int:
        """``L``."""
        return len(self.sublayers) // 2

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
        long_rope = self._rope.is_long(prompt_length, last_length)
        heads = self.config.num_attention_heads
        head_dim = getattr(self.config, "head_dim", None) or self.hidden_size // heads
        cache = KeyValueCache(
            self.layer_count,
            getattr(self.config, "num_key_value_heads", None) or heads,
            capacity,
            head_dim,
            dtype=self.dtype,
            device=self.device,
        )
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
            positions = torch.tensor(counted, device=self.device)
            lowest = min(counted)
        layout = Layout(start, rows, prefix, positions, lowest, visible)
        like = self._final_norm.weight
        assert isinstance(like, torch.Tensor)
        return Step(sequence, layout, self._rope.rotations(like, positions, long=sequence.long_rope))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before sublayer 0, ``h[0]``: long ``[rows]`` to ``[rows, hidden]``."""
        hidden_states: torch.Tensor = self._embedding(token_ids)
        return hidden_states if self._embedding_scale is None else hidden_states * self._embedding_scale

    def run(
        self, hidden_states: torch.Tensor, sublayers: Iterable[int], step: Step, capture: Collection[int] = ()
    ) -> StackOutput:
        """Runs sublayers over the rows of a step and writes their keys and values into the cache.

        Args:
            hidden_states: ``[rows, hidden]``, the residual stream before the first of them.
            sublayers: ascending indices; those not named are skipped.
            step: the layout of the rows.
            capture: sublayers ``i`` (0 to ``2L``) before which to keep the residual stream ``h[i]``; a skipped sublayer
                leaves the stream as it is.

        Returns:
            The residual stream behind the last one, and the captured ones.
        """
        captured: dict[int, torch.Tensor] = {}
        wanted = sorted(capture, reverse=True)
        stream = hidden_states[None]
        for index in sublayers:
            while wanted and wanted[-1] <= index:
                captured[wanted.pop()] = stream[0]
            stream = self.sublayers[index](stream, step)
        captured.update((index, stream[0]) for index in wanted)
        return StackOutput(stream[0], captured)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: ``[rows, hidden]`` to ``[rows, vocab]``, in the model's dtype."""
        logits: torch.Tensor = self._head(self._final_norm(hidden_states[None]))[0]
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        if self._logits_softcap is not None:
            logits = torch.tanh(logits / self._logits_softcap) * self._logits_softcap
        return logits

    def _split_layers(self, layers: nn.ModuleList) -> list[Sublayer]:
        eager = self.config._attn_implementation == "eager"
        multiplier = float(getattr(self.config, self.family.residual_multiplier or "", 1.0))
        sublayers: list[Sublayer] = []
        for index, layer in enumerate(layers):
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


def _check_supported(model: PreTrainedModel, bidirectional_flag: str | None) -> None:
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
    if bidirectional_flag is not None and getattr(model.config, bidirectional_flag, False):
        raise UnsupportedModelError(f"this model attends in both directions (config.{bidirectional_flag} is set)")
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
