"""The target model as 2L sublayers: the only place that runs the model."""

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from transformers import PreTrainedModel

from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec.model.decoder import Decoder
from selfspec.model.forward import SequenceState
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.arena import FEWEST_SLOTS
from selfspec.runtimes.copy_store import CopyStore
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.graphs import Graphs
from selfspec.runtimes.low_bit import LowBitCopies
from selfspec.runtimes.low_bit_torch import TorchLowBitCopies
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.packed import LowBitLinear, parameter_count
from selfspec.runtimes.precision import AnyPrecision
from selfspec.runtimes.runner import RUNTIMES, Runner, prepare
from selfspec.runtimes.stack import StackOutput

_P = ParamSpec("_P")
_R = TypeVar("_R")

__all__ = ["RUNTIMES", "StackOutput", "Target"]


def _at_full_precision(method: Callable[Concatenate[Runner, _P], _R]) -> "Callable[Concatenate[Target, _P], _R]":
    """A method of ``Target`` that is one of its runner at full precision."""

    def call(self: "Target", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        own: Callable[_P, _R] = getattr(self._prepared, method.__name__)
        return own(*args, **kwargs)

    call.__doc__ = method.__doc__
    return call


class Target:
    """A Hugging Face causal language model, seen as ``2L`` sublayers that run in any subset.

    The model computes what it did, bit for bit: no attribute of it is set, and all state of a request lives in its
    ``SequenceState``. Fused blocks move weights that are read together into one piece of memory, of which the model's
    own parameters become views (``products.Product``); nothing is held twice.

    Args:
        model: a supported ``PreTrainedModel``, in eval mode, on one device.
        runtime: one of ``RUNTIMES``. Hooks, adapters and quantised layers keep the sublayer that has them on
            transformers' modules; those that come later are noticed at the next request.
        keep_copies: keep low-bit copies of weights in files of the user's cache folder; see ``copy_store.CopyStore``.

    Attributes:
        runtime: see above.
        model: see above.
        decoder: the model taken apart.
        config: the model's config.
        family: the row of its family.
        version: grows when modules or weights of the model were replaced; older keys and values are of no use then.

    Raises:
        InvalidParameterError: there is no such runtime.
        UnsupportedModelError: the family, or a feature of this model, is not supported, or nothing of it can be fused
            where that was asked for.
    """

    def __init__(self, model: PreTrainedModel, runtime: str = "auto", *, keep_copies: bool = False) -> None:
        if runtime not in RUNTIMES:
            raise InvalidParameterError(f"there is no runtime '{runtime}'; choose one of {', '.join(RUNTIMES)}")
        self.runtime = runtime
        self.model = model
        self._store = CopyStore() if keep_copies else None
        self.decoder = Decoder(model)
        if self.device.type == "meta":
            raise UnsupportedModelError("the model is on device 'meta', without its weights; load them")
        self.config: Any = self.decoder.config
        self.family = self.decoder.family
        self.version = 0
        self._uses_graphs = runtime == "graphs"
        self._prepared: Runner
        self._prepare()
        if runtime == "fused" and self.fused_count == 0:
            raise UnsupportedModelError(
                f"no sublayer of this {self.family.name} model can be fused: its modules are hooked, quantised, "
                "adapted or not transformers' own; use runtime 'auto' or 'eager'"
            )

    @property
    def sublayers(self) -> list[Sublayer]:
        """All of them, as this runtime runs them."""
        return self._prepared.sublayers

    @property
    def graphs(self) -> Graphs | None:
        """Replays of the sublayers, in the graphs runtime."""
        return self._prepared.graphs

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
    def parameter_count(self) -> int:
        """Number of weights, low-bit ones too; a shared one counts once."""
        return parameter_count(self.model)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the LM head scores."""
        return int(self.config.vocab_size)

    @property
    def context_limit(self) -> int:
        """Longest sequence of prompt and new tokens together."""
        return self.decoder.context_limit

    def room(self, prompt_length: int) -> int:
        """Number of new tokens that fit after a prompt; not positive where none fits.

        Args:
            prompt_length: tokens of the prompt.
        """
        return self.decoder.room(prompt_length)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of keys and values."""
        return self.decoder.like.dtype

    @property
    def weights(self) -> str:
        """How the weights are held, in words: ``bfloat16``, or ``4 and 8 bits (bfloat16)``."""
        own = sorted({module.form.bits for module in self.model.modules() if isinstance(module, LowBitLinear)})
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{' and '.join(map(str, own))} bits ({dtype})" if own else dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.like.device

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values of one token, all layers together."""
        heads, head_dim = self.decoder.slot_shape
        return 2 * self.layer_count * heads * head_dim * self.decoder.like.element_size()

    @property
    def independent_rows(self) -> int:
        """Most rows of a sequence in a forward of which none depends on the others, bit for bit; 0 where they may."""
        native = self._prepared.native
        return native.most_rows if native is not None and native.is_whole else 0

    @property
    def keys_depend_on_position_alone(self) -> bool:
        """Whether equal beginnings of texts have equal keys, however long the texts are."""
        return self._prepared.rope.is_stateless

    def new_sequence(self, prompt_length: int, capacity: int, last_length: int) -> SequenceState:
        """The state of a new request.

        Args:
            prompt_length: tokens of the prompt.
            capacity: cache slots to reserve.
            last_length: tokens that will have gone through the model at the end, at most.

        Raises:
            ContextLengthError: the request crosses the model's rope switch.
        """
        if not self._prepared.is_current():
            self._prepare()
        long_rope = self._prepared.rope.is_long(prompt_length, last_length)
        self._prepared.rope.reserve(self.decoder.like, capacity)
        leased = None if self.graphs is None else self.graphs.lease(capacity)
        return SequenceState(self.decoder.new_cache(capacity) if leased is None else leased, long_rope)

    @property
    def native(self) -> NativeForward | None:
        """The native forward, if there is one: what runs chains."""
        return self._prepared.native

    embed = _at_full_precision(Runner.embed)
    lay_out = _at_full_precision(Runner.lay_out)
    run = _at_full_precision(Runner.run)
    logits = _at_full_precision(Runner.logits)
    norm = _at_full_precision(Runner.norm)

    def at(self, precision: AnyPrecision | None) -> Runner:
        """This model at a precision, over the same caches and rotations.

        Its products read low-bit copies of their weights, which are made at first use and kept; ``None``, or 16 bits
        everywhere, is full precision. A runner has the weights as they were when the target was last prepared: ask
        again at each request.

        Raises:
            UnsupportedModelError: the model cannot have it; the message says why.
            OutOfMemoryError: the copies do not fit into the memory that is available; nothing has been allocated.
        """
        return self._prepared if precision is None or precision.is_full else self._low_bit.at(precision)

    def check_low_bit(self, precision: AnyPrecision) -> None:
        """Refuses a precision that this model cannot have, without making anything.

        Raises:
            UnsupportedModelError: the model cannot have it; the message says why.
        """
        self._low_bit.check(precision)

    def low_bit_bytes(self, precision: AnyPrecision | None) -> int:
        """What the copies of a precision take, in bytes, whether they have been made or not; 0 at full precision.

        Raises:
            UnsupportedModelError: the model cannot have it.
        """
        return 0 if precision is None else self._low_bit.bytes(precision)

    def release_copies(self, keep: AnyPrecision | None = None) -> None:
        """Drops low-bit copies, but for those of a precision. They are made again where they are asked for."""
        self._low_bit.release(keep)

    @torch.inference_mode()
    def warm_up(self, row_counts: Iterable[int]) -> None:
        """Runs the whole model once over each number of rows within the context limit, on a scratch sequence.

        Graphs are recorded for these numbers of rows, for all lengths that the smallest arena has room for.
        """
        fitting = [rows for rows in row_counts if rows <= self.context_limit]
        longest = max(fitting, default=1)
        capacity = longest if self.graphs is None else max(longest, FEWEST_SLOTS)
        sequence = self.new_sequence(longest, capacity, longest)
        for rows in fitting:
            tokens = torch.zeros(rows, dtype=torch.long, device=self.device)
            for end in [rows] if self.graphs is None else self.graphs.ends(rows, capacity):
                forward = self.lay_out(sequence, rows, start=end - rows, prefix=0)
                self.logits(self.run(self.embed(tokens), range(self.sublayer_count), forward).hidden_states)

    def _prepare(self) -> None:
        """Makes the runtime's form of the model as the model is now."""
        if self.version > 0 and self.graphs is not None and self.graphs.gave_up:
            self._uses_graphs = False
        self.version += 1
        self._prepared = prepare(self.decoder, self.runtime)
        if self._uses_graphs:
            self._prepared.graphs = Graphs(self.sublayers, self.device, self.decoder.new_slots)
        torchs = self.device.type == "cuda" or self.runtime == "fused"
        self._low_bit = (TorchLowBitCopies if torchs else LowBitCopies)(self.decoder, self._prepared, self._store)
