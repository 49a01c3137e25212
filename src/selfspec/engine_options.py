"""The options of an engine, in one place for ``Engine``, ``AsyncEngine``, the command line and the server."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch

from selfspec.decoding.kept_texts import KeptTexts
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.errors import InvalidParameterError
from selfspec.loading.adapter_files import AdapterFiles
from selfspec.loading.divided import DeviceMap
from selfspec.methods.base import Method
from selfspec.methods.papers import paper_method
from selfspec.methods.registry import DEFAULT_METHOD
from selfspec.methods.settings import suggest
from selfspec.ranges import check_number
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Rule, rule_of
from selfspec.types import SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

_LEAST = {
    "prefill_chunk": 1,
    "prefix_cache": 0,
    "cache_dir_limit": 1,
    "max_batch": 1,
    "max_waiting": 0,
    "memory_limit": 1,
}


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine, checked when they are made.

    Attributes:
        settings: values of the method's settings by name.
        paper: the method of a paper as published, one of ``selfspec.methods.papers.PAPERS``, in place of a method.
            ``settings`` may change single values, which warns.
        authors: as in the code of the paper's authors, where that differs from the paper.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: that of the checkpoint. Only for a model that is
            loaded by name.
        device: a torch device, or ``auto``: an accelerator if there is one. Only for a model that is loaded by name.
        weights: ``int8`` or ``int4`` to run the model with low-bit weights (see ``quantise``).
        activations: ``auto``, ``exact`` or ``int8``: how rows are multiplied with weights of few bits (see
            ``load_model``). Only for a model that is loaded by name.
        unpack: turn the weights of a quantised file into numbers of the dtype (see ``load_model``). Only for a
            model that is loaded by name.
        device_map: divides the model over several devices (see ``load_model``). Only for a model that is loaded by
            name.
        tp_plan: ``auto`` to share the model with the other processes that ``torchrun`` started (see ``load_model``).
            Only for a model that is loaded by name.
        runtime: how the model's sublayers run, one of ``selfspec.runtimes.target.RUNTIMES``.
        adapters: LoRA adapters that PEFT has saved, by the names that requests call them (``SamplingParams.adapter``):
            each a folder, or a name on the hub. They run beside the model's weights, which all requests share.
        cache_bits: 8 to keep keys and values in 8 bits, in half of the memory, with a text of its own; ``None`` for the
            model's dtype.
        prefill_chunk: longest part of a prompt to run at once, in tokens; if not given, what suits the model and the
            device (``decoding.prompt.chunks_of``).
        prefix_cache: most bytes of keys and values of earlier texts, which prompts that begin alike need not read
            again; or the prefix cache of another engine for this model. 0 keeps none. If not given, ``Engine`` keeps
            none, or 1 GiB with ``cache_dir``, and ``AsyncEngine`` up to half of its memory limit.
        cache_dir: a folder in which texts of requests are kept for later processes: what was written, to draft from,
            and the prefix cache. The texts can be read in it; only the user may open it. Or what another engine for
            this model keeps (``Engine.kept``). Processes may share a folder. ``None`` keeps nothing.
        cache_dir_limit: most bytes of all files of that folder.
        max_batch: most requests that run at a time; each of them holds a cache for its whole length.
        max_waiting: most requests of an ``AsyncEngine`` beside ``max_batch``; further ones are refused. ``None``
            refuses none.
        memory_limit: most bytes of keys and values of an ``AsyncEngine``, requests and prefix cache together, and of
            the low-bit weights of its ``methods``. A request is admitted when its whole length fits. If not given, half
            of the memory that is free.
        max_read_seconds: about how long an ``AsyncEngine`` reads prompts in a step while outputs are written; ``None``
            for any time. Where chunks cannot be cut (see ``decoding.prompt``), one chunk is read.
        rule: makes the sampling rule of a request. Other functions than the default are for experiments: their rules
            need not be lossless.

    Raises:
        InvalidParameterError: an option is out of range.
    """

    settings: Mapping[str, Any] | None = None
    paper: str | None = None
    authors: bool = False
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    weights: str | Precision | None = None
    unpack: bool = False
    activations: str = "auto"
    device_map: DeviceMap | None = None
    tp_plan: str | None = None
    runtime: str = "auto"
    adapters: Mapping[str, str | Path | AdapterFiles] | None = None
    cache_bits: int | None = None
    prefill_chunk: int | None = None
    prefix_cache: int | PrefixCache | None = None
    cache_dir: str | Path | KeptTexts | None = None
    cache_dir_limit: int = 4 * 2**30
    max_batch: int = 16
    max_waiting: int | None = None
    memory_limit: int | None = None
    max_read_seconds: float | None = 0.1
    rule: Callable[[SamplingParams, torch.device, ScoreProcessor], Rule] = rule_of

    def __post_init__(self) -> None:
        if self.authors and self.paper is None:
            raise InvalidParameterError("authors takes the authors' form of a paper's method; give paper too")
        if self.cache_bits not in (None, 8):
            raise InvalidParameterError(f"cache_bits must be 8, or not given, not {self.cache_bits}")
        for name, least in _LEAST.items():
            if isinstance(getattr(self, name), int):
                check_number(name, getattr(self, name), least, whole=True)
        if self.max_read_seconds is not None:
            check_number("max_read_seconds", self.max_read_seconds, 0, above=True)

    def check_loaded(self) -> None:
        """Raises ``InvalidParameterError`` for options that only a model loaded by name can have."""
        if any(getattr(self, name) != default for name, default in LOADING.items()):
            raise InvalidParameterError(
                f"{', '.join(LOADING)} are for a model that is loaded by name; load this one with them"
            )

    def chosen(self, method: "str | type[Method]") -> "str | type[Method]":
        """The method that these options and a method choose, of which only one may be given.

        Raises:
            InvalidParameterError: there are a paper and a method other than the default.
        """
        if self.paper is None:
            return method
        if method != DEFAULT_METHOD:
            named = method if isinstance(method, str) else method.name
            raise InvalidParameterError(f"paper '{self.paper}' chooses the method; leave out the method '{named}'")
        return paper_method(self.paper, self.authors)

    def kept_texts(self, target: Target, grain: int) -> KeptTexts | None:
        """What keeps texts in files for a model, with ``cache_dir``; ``grain`` is that of its prompts' chunks.

        Raises:
            InvalidParameterError: several processes share the model, or these are kept texts of another one.
        """
        given = self.cache_dir
        if given is not None and target.ranks.count > 1:
            raise InvalidParameterError("processes that share a model may not have the same files; leave cache_dir out")
        if isinstance(given, KeptTexts):
            if given.target is not target:
                raise InvalidParameterError("these kept texts are of another model; give a folder instead")
            return given
        return None if given is None else KeptTexts(Path(given), self.cache_dir_limit, target, grain)

    def prefixes(self, target: Target, default: int) -> PrefixCache | None:
        """The prefix cache for a model, of ``default`` bytes if no size is given; ``None`` for 0.

        Raises:
            InvalidParameterError: it is of another model.
        """
        given = self.prefix_cache
        if isinstance(given, PrefixCache):
            if given.target is not target:
                raise InvalidParameterError("this prefix cache is of another model; give a number of bytes instead")
            return given
        size = default if given is None else given
        return PrefixCache(target, size) if size else None


LOADING: dict[str, Any] = {
    name: getattr(EngineOptions, name) for name in ("dtype", "device", "unpack", "activations", "device_map", "tp_plan")
}
"""The options for a model that is loaded by name, with their defaults."""


class QueueKeywords(TypedDict, total=False):
    """The options that an ``AsyncEngine`` may change of its engine's, for editors and type checkers."""

    max_batch: int
    max_waiting: int | None
    memory_limit: int | None
    max_read_seconds: float | None


class EngineKeywords(QueueKeywords, total=False):
    """``EngineOptions`` as keywords of ``Engine``, for editors and type checkers."""

    settings: Mapping[str, Any] | None
    paper: str | None
    authors: bool
    dtype: str | torch.dtype
    device: str | torch.device
    weights: str | Precision | None
    unpack: bool
    activations: str
    device_map: DeviceMap | None
    tp_plan: str | None
    runtime: str
    adapters: Mapping[str, str | Path | AdapterFiles] | None
    cache_bits: int | None
    prefill_chunk: int | None
    prefix_cache: int | PrefixCache | None
    cache_dir: str | Path | KeptTexts | None
    cache_dir_limit: int
    rule: Callable[[SamplingParams, torch.device], Rule]


def changed(values: "T", changes: Mapping[str, Any], kind: str, known: Collection[str] | None = None) -> "T":
    """A dataclass of options or parameters with some of them changed, of which errors call one a ``kind``.

    ``known`` are the names that may be changed, if not all. An unknown one is refused, with the nearest.
    """
    allowed = dict.fromkeys([field.name for field in fields(values)] if known is None else known)
    for name in changes:
        if name not in allowed:
            raise InvalidParameterError(f"there is no {kind} '{name}'{suggest(name, allowed)}")
    return replace(values, **changes) if changes else values
