"""What the C++ code is given, as ctypes structures: see the headers beside this file.

``layout.h`` has their sizes and fields, which are compared with these when a library is loaded.
"""

from collections.abc import Iterator, Mapping
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_long,
    c_uint64,
    c_void_p,
    sizeof,
)

from selfspec.model.mxint8 import SHARED
from selfspec.runtimes.formats import BLOCK, FORMATS, TILE


class Stored(Structure):
    """Weights of few bits of some outputs of a linear layer, in tiles."""

    _fields_ = (("tiles", c_void_p), ("outputs", c_long), ("format", c_int))


class Linear(Structure):
    """A linear layer: weights ``[outputs, inputs]``, or parts of few bits; bias ``[outputs]`` or null.

    ``order`` is of the parts' inputs, the place of each in a row, or null.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("weights", "bias")),
        ("parts", POINTER(Stored)),
        *((name, c_int) for name in ("count", "short_rows")),
        ("order", c_void_p),
    )


class Norm(Structure):
    """A norm of a row; none where ``kind`` is 0."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        ("epsilon", c_float),
        *((name, c_int) for name in ("kind", "rounds")),
        ("added", c_float),
    )


class Heads(Structure):
    """Sizes of an attention branch."""

    _fields_ = (*((name, c_long) for name in ("heads", "key_heads", "dim")), ("shared", c_int))


class AttentionWeights(Structure):
    """An attention branch."""

    _fields_ = (
        *((name, Linear) for name in ("inputs", "output")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        *((name, c_int) for name in ("norms_rows", "norms_last", "neighbours")),
        ("sizes", Heads),
        *((name, c_float) for name in ("scale", "softcap")),
        ("sinks", c_void_p),
        ("layer", c_int),
    )


class MlpWeights(Structure):
    """An MLP branch."""

    _fields_ = (
        *((name, Linear) for name in ("gate_up", "down")),
        ("inner", c_long),
        *((name, c_int) for name in ("activation", "gated")),
        *((name, c_float) for name in ("alpha", "limit")),
    )


class MixtureWeights(Structure):
    """A mixture of experts: the weights of all of them follow each other; no shared one where its ``inner`` is 0."""

    _fields_ = (
        ("router", Linear),
        *((name, MlpWeights) for name in ("experts", "shared")),
        *((name, c_long) for name in ("count", "top")),
        *((name, c_int) for name in ("normalizes", "sigmoid")),
        ("bias", c_void_p),
        *((name, c_long) for name in ("groups", "kept", "best_of_group")),
        ("scale", c_float),
        *((name, c_int) for name in ("exact", "shared_gated")),
    )


class LatentWeights(Structure):
    """Attention to latents; see ``latent.h``."""

    _fields_ = (
        *((name, Linear) for name in ("inputs", "queries", "output")),
        ("expanding", c_void_p),
        *((name, Norm) for name in ("query_norm", "latent_norm")),
        *((name, c_long) for name in ("rank", "heads", "key", "value", "turned", "latent")),
        ("halves", c_int),
        ("scale", c_float),
        ("layer", c_int),
    )


class NativeStateNet(Structure):
    """A layer with a state for each head; see ``state_net.h``."""

    _fields_ = (
        *((name, c_void_p) for name in ("conv", "conv_bias", "decay", "bias", "skip", "norm")),
        *((name, c_float) for name in ("epsilon", "lowest", "highest")),
        *((name, c_long) for name in ("queries", "keys", "values", "groups", "heads", "state", "size", "taps")),
        ("delta", c_int),
    )


class NativeSublayer(Structure):
    """A branch of a forward: attention, an MLP, a mixture of experts or attention to latents; the others are null."""

    _fields_ = (
        ("attention", POINTER(AttentionWeights)),
        ("mlp", POINTER(MlpWeights)),
        *((name, Norm) for name in ("before", "after")),
        ("multiplier", c_float),
        *((name, c_int) for name in ("view", "turn")),
        ("hidden", c_long),
        ("mixture", POINTER(MixtureWeights)),
        ("latent", POINTER(LatentWeights)),
    )


class View(Structure):
    """The slots that the rows of a sequence see through a window."""

    _fields_ = (("visible", c_void_p), ("first", c_long), ("window", c_long))


class NativeCosSin(Structure):
    """Cosine and signed sine of the rows' positions."""

    _fields_ = (("cosine", c_void_p), ("sine", c_void_p), ("dim", c_long), ("is_float", c_int))


class LowRankOutputs(Structure):
    """The second factor of a low-rank product, whose sums are added to a product's outputs from ``first`` on."""

    _fields_ = (("weights", c_void_p), *((name, c_long) for name in ("rank", "outputs", "first")), ("scale", c_float))


class NativeLowRank(Structure):
    """The low-rank products that an adapter adds to a product; ``inputs`` are the first factors of all."""

    _fields_ = (("inputs", Linear), ("rank", c_long), ("outputs", POINTER(LowRankOutputs)), ("count", c_long))


class AdaptedSublayer(Structure):
    """What an adapter adds to the two products of a sublayer."""

    _fields_ = (("entering", NativeLowRank), ("leaving", NativeLowRank))


class Part(Structure):
    """The rows of one sequence."""

    _fields_ = (
        ("caches", POINTER(c_void_p)),
        *((name, c_long) for name in ("capacity", "start", "first_row", "rows")),
        ("views", POINTER(View)),
        ("adapter", POINTER(AdaptedSublayer)),
    )


class NativeDrawing(Structure):
    """How the token of a row is drawn; not at all where the temperature is 0."""

    _fields_ = (("key", c_uint64), ("position", c_long), ("temperature", c_float))


class NativeHead(Structure):
    """Final norm and LM head, and where their results go; the norm alone where ``linear`` has no weights."""

    _fields_ = (
        ("norm", Norm),
        ("linear", Linear),
        *((name, c_long) for name in ("hidden", "outputs")),
        ("rows", POINTER(c_long)),
        ("count", c_long),
        *((name, c_void_p) for name in ("out", "tokens", "confidences", "finite")),
        ("drawings", POINTER(NativeDrawing)),
        *((name, c_float) for name in ("divisor", "softcap")),
    )


class NativeCall(Structure):
    """A forward: its sublayers, the states to keep, the rows of each sequence, their rotations, the head if it runs."""

    _fields_ = (
        ("sublayers", POINTER(NativeSublayer)),
        ("which", POINTER(c_int)),
        ("count", c_long),
        ("kept", POINTER(c_void_p)),
        ("kept_rows", POINTER(c_long)),
        ("parts", POINTER(Part)),
        ("part_count", c_long),
        ("turns", POINTER(NativeCosSin)),
        ("threads", c_int),
        ("head", POINTER(NativeHead)),
        ("packed", c_int),
        ("entry", POINTER(Linear)),
        ("entering", c_void_p),
    )


class ChainSequence(Structure):
    """A sequence whose tokens are drafted in a chain, and how many were; or a chain or tree to verify."""

    _fields_ = (
        ("caches", POINTER(c_void_p)),
        *((name, c_long) for name in ("capacity", "start", "limit")),
        ("tokens", POINTER(c_long)),
        ("confidences", POINTER(c_float)),
        ("guesses", POINTER(c_long)),
        ("guess_count", c_long),
        ("probes", POINTER(c_long)),
        ("probe_count", c_long),
        ("probed", POINTER(c_long)),
        ("probed_confidence", POINTER(c_float)),
        ("mask_embedding", c_void_p),
        ("drawing", NativeDrawing),
        ("kept", POINTER(c_void_p)),
        ("depths", POINTER(c_long)),
        ("visible", c_void_p),
        ("adapter", POINTER(AdaptedSublayer)),
        *((name, c_long) for name in ("drafted", "guessed", "finite")),
    )


Follow = CFUNCTYPE(c_int, c_long, c_long, c_float)
"""Given a sequence, a drafted token and its confidence; returns whether the draft ends with it."""

PlanForward = CFUNCTYPE(None)
"""Lays the rows of the next forward out."""


class NativeHeadEntry(Structure):
    """What enters the layer of a multi-token-prediction head."""

    _fields_ = (
        ("projection", Linear),
        *((name, Norm) for name in ("token_norm", "state_norm")),
        ("state_first", c_int),
        ("hidden", c_long),
    )


class NativeHeadText(Structure):
    """What such a head knows of a sequence; see ``mtp.h``."""

    _fields_ = (
        ("caches", POINTER(c_void_p)),
        *((name, c_long) for name in ("capacity", "start")),
        ("states", c_void_p),
        ("tokens", POINTER(c_long)),
        *((name, c_long) for name in ("missing", "limit")),
    )


class NativeDraftHead(Structure):
    """Such a head, which drafts the guesses of a chain; ``chain`` is a ``NativeChain``."""

    _fields_ = (
        ("chain", c_void_p),
        ("entry", NativeHeadEntry),
        ("texts", POINTER(NativeHeadText)),
        ("seconds", c_double),
    )


class NativeChain(Structure):
    """Forwards after each other, each over the tokens that the one before it chose."""

    _fields_ = (
        ("forward", POINTER(NativeCall)),
        ("embedding", c_void_p),
        ("table", POINTER(Linear)),
        ("scale", c_float),
        ("windows", POINTER(c_long)),
        ("window_count", c_long),
        ("sequences", POINTER(ChainSequence)),
        ("count", c_long),
        ("follow", Follow),
        ("plan", PlanForward),
        ("head", POINTER(NativeDraftHead)),
    )


STRUCTURES: Mapping[str, type[Structure]] = {
    "Stored": Stored,
    "Linear": Linear,
    "Norm": Norm,
    "Heads": Heads,
    "AttentionWeights": AttentionWeights,
    "MlpWeights": MlpWeights,
    "MixtureWeights": MixtureWeights,
    "LatentWeights": LatentWeights,
    "StateNet": NativeStateNet,
    "Sublayer": NativeSublayer,
    "View": View,
    "CosSin": NativeCosSin,
    "LowRankOutputs": LowRankOutputs,
    "LowRank": NativeLowRank,
    "AdaptedSublayer": AdaptedSublayer,
    "Part": Part,
    "Drawing": NativeDrawing,
    "Head": NativeHead,
    "Forward": NativeCall,
    "ChainSequence": ChainSequence,
    "Chain": NativeChain,
    "HeadEntry": NativeHeadEntry,
    "HeadText": NativeHeadText,
    "DraftHead": NativeDraftHead,
}
"""The structures by their names in the headers."""

CONSTANTS = {
    "BLOCK": BLOCK,
    "TILE": TILE,
    "SHARED": SHARED,
    **{f"format.{name}": form.number for name, form in FORMATS.items()},
    **{f"inputs.{name}": form.unit for name, form in FORMATS.items()},
    **{f"bytes.{name}": form.unit_bytes for name, form in FORMATS.items()},
}
"""What Python has to know without the library, by its name in the headers."""


class _Fact(Structure):
    _fields_ = (("name", c_char_p), ("value", c_long))


def read_layout(library: CDLL) -> dict[str, int]:
    """Sizes and offsets in bytes (``Linear``, ``Linear.bits``) and constants (``BLOCK``), as the library has them."""
    library.layout.argtypes, library.layout.restype = [], POINTER(_Fact)
    facts = library.layout()
    found: dict[str, int] = {}
    while facts[len(found)].name:
        fact = facts[len(found)]
        found[fact.name.decode()] = int(fact.value)
    return found


def disagreements(library: Mapping[str, int]) -> list[str]:
    """In words, where a library and this file differ; ``library`` is what ``read_layout`` gave."""
    own = dict(_own_layout())
    names = {name.partition(".")[0] for name in own}
    known = {name: value for name, value in library.items() if name.partition(".")[0] in names}
    return [
        f"{name} is {known.get(name, 'unknown')} in the library and {own.get(name, 'unknown')} here"
        for name in sorted(own.keys() | known.keys())
        if own.get(name) != known.get(name)
    ]


def _own_layout() -> Iterator[tuple[str, int]]:
    yield from CONSTANTS.items()
    for name, structure in STRUCTURES.items():
        yield name, sizeof(structure)
        for field in structure._fields_:
            yield f"{name}.{field[0]}", getattr(structure, field[0]).offset
