"""The target model as 2L sublayers: the only place that runs the model."""

from collections.abc import Callable, Iterable
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from selfspec.errors import InvalidParameterError, MissingPackageError, UnsupportedModelError
from selfspec.limits import check_context
from selfspec.memory import release_freed_memory
from selfspec.model.cache import KeyValueCache, is_taken_late
from selfspec.model.forward import SequenceState
from selfspec.model.identity import shared_traits, weights_digest
from selfspec.model.low_rank import Adapter
from selfspec.model.mxint8 import SHARED, packed_size
from selfspec.model.observed import ObservedDecoder, take_apart
from selfspec.model.ranks import Ranks, ranks_of
from selfspec.model.splitting import Nothing
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.accelerators import is_accelerator
from selfspec.runtimes.adapting import check_adapted
from selfspec.runtimes.arena import FEWEST_SLOTS
from selfspec.runtimes.candidates import RUNTIMES, Candidate, find_candidate
from selfspec.runtimes.cores import choose_cores
from selfspec.runtimes.fused import FusedBlock
from selfspec.runtimes.levels import LINEAR, LevelChoice, settle_level
from selfspec.runtimes.packed import LowBitEmbedding, LowBitLinear, parameter_count
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.products import CompiledProduct
from selfspec.runtimes.proof import prove
from selfspec.runtimes.reading import choose_reading
from selfspec.runtimes.runner import Runner, make_runner
from selfspec.runtimes.seen_text import AttentionShares
from selfspec.runtimes.stack import Stack, StackOutput
from selfspec.runtimes.threads import keep_to_limit
from selfspec.runtimes.trial_store import build_fastest, find_trial
from selfspec.runtimes.trial_table import DeviceTrial

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RUNTIMES", "StackOutput", "Target", "fingerprint"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _of_runner(method: Callable[Concatenate[Runner, _P], _T]) -> "Callable[Concatenate[Target, _P], _T]":
    """A method of the target's runner at full precision as one of the target."""

    @wraps(method)
    def call(target: "Target", /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        result: _T = getattr(target._prepared, method.__name__)(*arguments, **options)
        return result

    return call


class Target:
    """A Hugging Face causal language model, seen as ``2L`` sublayers that run in any subset.

    The model computes what it did, bit for bit: no attribute of it is set, and all state of a request lives in its
    ``SequenceState``. Fused blocks move weights that are read together into one piece of memory, of which the model's
    own parameters become views (``products.Product``); nothing is held twice. It has the methods of ``Stack`` that run
    the model, at full precision; ``at`` gives the model at any.

    Args:
        model: a supported ``PreTrainedModel``, in eval mode. Where a ``device_map`` or a ``tp_plan`` divides it,
            transformers' own modules run.
        runtime: one of ``RUNTIMES``. On an accelerator ``auto`` is what a trial finds to be right and fastest, which
            begins nothing new after two minutes at the first use of a model and is kept. Hooks, adapters and quantised
            layers keep the sublayer that has them on transformers' modules; those that come later are noticed at the
            next request.
        cache_bits: 8 to keep keys and values in 8 bits (see ``mxint8``); ``None`` for the dtype of the weights.

    Attributes:
        cache_bits: see above.
        decoder: the model taken apart.
        config: the model's config.
        family: the row of its family.
        ranks: the processes that share the model.
        level: what a trial found about levels of instructions in this process; see ``levels.settle_level``.
        trial: what a trial found on an accelerator; ``None`` where there was none. See ``device_trial``.
        chosen_runtime: the runtime of the sublayers; with ``auto`` the one that was chosen.
        cores: what a trial found where a processor has slow cores beside fast ones; see ``cores.choose_cores``.
        reading: how kernels read the weights, where a trial chose it; see ``reading.choose_reading``.
        version: grows when modules or weights of the model were replaced; older keys and values are of no use then.

    Raises:
        InvalidParameterError: there is no such runtime, or it cannot have ``cache_bits``.
        UnsupportedModelError: the family, or a feature of this model, is not supported, or nothing of it can be fused
            where that was asked for, or its keys and values cannot be in 8 bits.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        runtime: str = "auto",
        *,
        cache_bits: int | None = None,
    ) -> None:
        if runtime not in RUNTIMES:
            raise InvalidParameterError(f"there is no runtime '{runtime}'; choose one of {', '.join(RUNTIMES)}")
        keep_to_limit()
        self.model = model
        self.ranks: Ranks = ranks_of(model)
        self.decoder = take_apart(model)
        if self.device.type == "meta":
            raise UnsupportedModelError("the model is on device 'meta', without its weights; load them")
        self.runtime = self._divided_runtime(runtime)
        if self.ranks.count > 1:
            for what, value in shared_traits(model).items():
                self.ranks.compare(what, value)
            self._digest_of_all = "+".join(self.ranks.gather(weights_digest(model)))
        self.config: Any = self.decoder.config
        self.family = self.decoder.family
        self.hidden_size = self.decoder.hidden_size
        self.vocab_size = int(self.config.vocab_size)
        self.context_limit = self.decoder.context_limit
        self.level: LevelChoice | None = None
        self.version = 0
        if isinstance(self.decoder, ObservedDecoder) and runtime not in ("auto", "eager"):
            raise UnsupportedModelError(
                f"a '{self.config.model_type}' model runs by transformers' own modules, which runtime '{runtime}' does "
                "not use; use runtime 'auto' or 'eager'"
            )
        self.cache_bits = cache_bits
        _ = self.slot_bytes  # refuses heads that the processes cannot share
        self._check_cache()
        self.trial: DeviceTrial | None = None
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
        return sum(isinstance(sublayer, FusedBlock) for sublayer in self.sublayers)

    @property
    def whole_layers(self) -> int | None:
        """How many layers run or are skipped as a whole; ``None`` where a row of the table says how they are split."""
        if not isinstance(self.decoder, ObservedDecoder):
            return None
        return sum(isinstance(sublayer, Nothing) for sublayer in self.sublayers)

    @property
    def tree_refusal(self) -> str | None:
        """Why rows cannot be a token tree, or others than consecutive ones; ``None`` where they can."""
        return self.decoder.tree_refusal

    @cached_property
    def parameter_count(self) -> int:
        """Number of weights, low-bit ones too; a shared one counts once."""
        return parameter_count(self.model)

    @property
    def weights_digest(self) -> str:
        """Identifies the weights."""
        return weights_digest(self.model) if self.ranks.count == 1 else self._digest_of_all

    def room(self, prompt_length: int) -> int:
        """Number of new tokens that fit after a prompt; not positive where none fits."""
        return self.decoder.room(prompt_length)

    def check_length(self, prompt_length: int, max_new_tokens: int) -> None:
        """Refuses a request that does not fit the context or crosses the model's rope switch, all in tokens.

        Raises:
            ContextLengthError: it says how many new tokens there is room for.
        """
        check_context(prompt_length, max_new_tokens, self.context_limit)
        self._prepared.rope.is_long(prompt_length, max(prompt_length, prompt_length + max_new_tokens - 1))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of keys and values if they are not in 8 bits."""
        return self.decoder.like.dtype

    @property
    def weights(self) -> str:
        """How the weights are held, in words: ``bfloat16``, ``4 bits and 8 bits (bfloat16)``, ``Q4_K (float32)``.

        ``Q4_K (bfloat16, int8 activations)`` where rows are rounded to 8 bits.
        """
        low_bit = (LowBitLinear, LowBitEmbedding)
        own = sorted({str(module.form) for module in self.model.modules() if isinstance(module, low_bit)})
        dtype = str(self.dtype).removeprefix("torch.")
        short = any(isinstance(module, LowBitLinear) and module.short_rows for module in self.model.modules())
        return f"{' and '.join(own)} ({dtype}{', int8 activations' if short else ''})" if own else dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.like.device

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values of one token, all layers together."""
        heads, head_dim = self.decoder.slot_shape
        row = head_dim * self.dtype.itemsize if self.cache_bits is None else packed_size(head_dim)
        return (1 + self.decoder.slot_has_values) * self.decoder.slot_layers * heads * row

    def takes_memory_late(self, slots: int) -> bool:
        """Whether a cache of ``slots`` slots takes memory only when they are written."""
        return self.decoder.placement.is_whole and is_taken_late(slots * self.slot_bytes, self.device)

    def attention_shares(self, slots: int) -> AttentionShares | None:
        """Those of a text in a cache of ``slots``; ``None`` where verifications are not native, and note none."""
        runner = self.at(None)
        if runner.native is None or not runner.path().native or (shape := runner.native.attention) is None:
            return None
        return AttentionShares(self.decoder.slot_layers, shape.heads, shape.key_heads, slots)

    @property
    def independent_rows(self) -> int:
        """Most rows of a sequence in a forward of which none depends on the others, bit for bit; 0 where they may."""
        return self._prepared.independent_rows

    @property
    def keys_depend_on_position_alone(self) -> bool:
        """Whether equal beginnings of texts have equal keys, however long the texts are."""
        return self._prepared.rope.is_stateless

    def new_sequence(
        self, prompt_length: int, capacity: int, last_length: int, adapter: Adapter | None = None
    ) -> SequenceState:
        """The state of a new request.

        Args:
            prompt_length: tokens of the prompt.
            capacity: cache slots to reserve.
            last_length: tokens that will have gone through the model at the end, at most.
            adapter: what is added to the products for its rows (see ``adapting.fit_adapter``).

        Raises:
            ContextLengthError: the request crosses the model's rope switch.
            AdapterError: hooks have replaced a sublayer that the adapter changes.
        """
        if not self._prepared.is_current():
            self._prepare()
        if adapter is not None:
            check_adapted(adapter, self.sublayers)
        rope = self._prepared.rope
        long_rope = rope.is_long(prompt_length, last_length)
        rope.reserve(self.decoder.like, capacity)
        cache = self._prepared.new_cache(capacity, packed=self.cache_bits is not None)
        return SequenceState(cache, long_rope, adapter)

    def new_cache(self, capacity: int) -> KeyValueCache:
        """An empty cache with ``capacity`` slots."""
        return self.decoder.new_cache(capacity, packed=self.cache_bits is not None)

    lay_out = _of_runner(Stack.lay_out)
    embed = _of_runner(Stack.embed)
    run = _of_runner(Stack.run)
    norm = _of_runner(Stack.norm)
    logits = _of_runner(Stack.logits)
    score = _of_runner(Stack.score)

    def at(self, precision: Precision | None) -> Runner:
        """This model at a precision, over the same caches and rotations.

        Its products read low-bit weights, which are made at first use and kept; ``None``, or 16 bits
        everywhere, is full precision. A runner has the weights as they were when the target was last prepared: ask
        again at each request.

        Raises:
            UnsupportedModelError: the model cannot have it; the message says why.
            OutOfMemoryError: the low-bit weights do not fit into the available memory; nothing has been allocated.
        """
        return self._prepared if precision is None or precision.is_full else self._low_bit.at(precision)

    def check_low_bit(self, precision: Precision) -> None:
        """Raises ``UnsupportedModelError`` for a precision that this model cannot have, without making anything."""
        self._low_bit.check(precision)

    def low_bit_bytes(self, precision: Precision | None) -> int:
        """What the weights of a precision take, in bytes, whether they have been made or not; 0 at full precision.

        Raises:
            UnsupportedModelError: the model cannot have it.
        """
        return 0 if precision is None else self._low_bit.bytes(precision)

    @property
    def recorded(self) -> int:
        """Replays that were recorded so far; the time of a round in which one was is not that of its forwards."""
        return 0 if self._prepared.graphs is None else self._prepared.graphs.arenas.recorded

    def release_low_bit(self, keep: Precision | None = None) -> None:
        """Drops low-bit weights, but for those of a precision. They are made again where they are asked for."""
        self._low_bit.release(keep)

    @torch.inference_mode()
    def warm_up(self, row_counts: Iterable[int]) -> None:
        """Runs the whole model once over each number of rows within the context limit, on a scratch sequence.

        Graphs are recorded for these numbers of rows, for all lengths that the smallest arena has room for, and for
        each sublayer by itself, as kept sets need them.
        """
        fitting, graphs = [rows for rows in row_counts if rows <= self.context_limit], self._prepared.graphs
        longest = max(fitting, default=1)
        capacity = longest if graphs is None else max(longest, FEWEST_SLOTS)
        sequence = self.new_sequence(longest, capacity, longest)
        for rows in fitting:
            tokens = torch.zeros(rows, dtype=torch.long, device=self.device)
            for end in [rows] if graphs is None else graphs.ends(rows, capacity):
                forward = self.lay_out(sequence, rows, start=end - rows, prefix=0)
                self.logits(self.run(self.embed(tokens, forward), range(self.sublayer_count), forward).hidden_states)
                for index in range(self.sublayer_count if graphs is not None else 0):
                    self.run(self.embed(tokens, forward), [index], forward)

    def _divided_runtime(self, runtime: str) -> str:
        """The runtime; of a model that is divided, transformers' own modules."""
        if self.decoder.placement.is_whole:
            return runtime
        if runtime not in ("auto", "eager"):
            raise UnsupportedModelError(
                f"runtime '{runtime}' needs all weights in one process on one device, but a device_map or tp_plan "
                "divides this model; use runtime 'auto' or 'eager'"
            )
        return "eager"

    def _check_cache(self) -> None:
        """Refuses a cache of 8 bits where something else than our own sublayers reads and writes it."""
        assert self.cache_bits in (None, 8)
        if self.cache_bits is None:
            return
        if self.runtime == "graphs":
            raise InvalidParameterError("runtime 'graphs' keeps keys and values in the model's dtype; use another one")
        _, head_dim = self.decoder.slot_shape
        if isinstance(self.decoder, ObservedDecoder):
            reason = f"'{self.config.model_type}' runs by transformers' own modules, which write to the cache"
        elif not self.decoder.slot_has_values:
            reason = "it holds latents"
        elif head_dim % SHARED:
            reason = f"its heads have {head_dim} numbers, which is no multiple of {SHARED}"
        else:
            return
        raise UnsupportedModelError(f"the cache of this model cannot have 8 bits: {reason}; leave cache_bits out")

    def _prepare(self) -> None:
        """Makes the runtime's form of the model as the model is now."""
        candidate, self._prepared = self._choose()
        self.chosen_runtime = candidate.name
        self.version += 1
        if isinstance(self.decoder, ObservedDecoder):
            prove(self.decoder, self._prepared)
            release_freed_memory()  # states of recurrent layers after each row are large
        blocks = [each for each in self.sublayers if isinstance(each, FusedBlock)]
        products = [each for block in blocks for each in block.products]
        compiled = [each for each in products if isinstance(each, CompiledProduct)]
        self.cores, self.reading = choose_cores(compiled), choose_reading(compiled)
        self._low_bit = candidate.low_bit(self.decoder, self._prepared)
        if self.trial is not None:
            self._low_bit.refuse(self.trial.refused_bits)

    def _choose(self) -> tuple[Candidate, Runner]:
        """The runtime that is asked for, or that a trial chose, and its form of the model."""
        if self.version > 0 and self._prepared.problem is not None:
            fused = find_candidate("fused")
            return fused, fused.build(self.decoder)
        observed = isinstance(self.decoder, ObservedDecoder)
        if self.runtime == "auto" and is_accelerator(self.device) and not observed:
            if self.trial is None:
                self._prepared = make_runner(self.decoder, "eager")  # what the model is known by needs one
                self.trial = find_trial(self.decoder, fingerprint(self))
            return build_fastest(self.trial, self.decoder)
        if self.runtime in ("auto", "compiled") and self.device.type == "cpu":
            self.level = settle_level(self.model, (LowBitLinear,) if observed else LINEAR)
        if self.runtime == "auto":
            return find_candidate("compiled"), make_runner(self.decoder, "auto")
        candidate = find_candidate(self.runtime)
        if candidate.missing is not None:
            raise MissingPackageError(f"runtime '{self.runtime}' cannot run: {candidate.missing}")
        return candidate, candidate.build(self.decoder)


def fingerprint(target: Target) -> dict[str, Any]:
    """The identity of a model, for state files and latency profiles: its shape, its dtype and a digest of its weights.

    See ``identity.weights_digest``. Of a model that several processes share it depends on how they do.
    """
    return {
        "family": target.config.model_type,
        "layers": target.layer_count,
        "hidden_size": target.hidden_size,
        "vocabulary": target.vocab_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": target.weights_digest,
    }
