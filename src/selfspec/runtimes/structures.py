"""What the C++ code is given, as ctypes structures with the fields that the headers beside this file declare.

When a library is loaded, ``layout.h`` says whether it has these headers, and the sizes of its structures are compared.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
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
from pathlib import Path
from typing import Any

from selfspec.model.mxint8 import SHARED
from selfspec.runtimes.costs.rows import MOST_SIBLINGS
from selfspec.runtimes.formats import BLOCK, FORMATS, SEEN, TILE
from selfspec.runtimes.kernel_build import sources

_FOLDER = Path(__file__).parent
_HEADERS = "".join(path.read_text(encoding="utf-8") for path in _FOLDER.glob("*.h"))
_BODIES = dict(re.findall(r"^struct (\w+) {\n(.*?)^};", _HEADERS, re.MULTILINE | re.DOTALL))
_NUMBERS = {"long": c_long, "int": c_int, "float": c_float, "double": c_double, "uint64_t": c_uint64}


def _fields(name: str) -> Iterator[tuple[str, Any]]:
    for line in _BODIES[name].splitlines():
        code = line.partition("//")[0].replace("const", "").strip()
        if function := re.search(r"\(\*(\w+)\)", code):
            yield function[1], _FUNCTIONS[function[1]]
        elif code and "(" not in code:  # otherwise it is one of the structure's functions
            kind, declared = re.fullmatch(r"(\w+)(.*);", code).groups()  # type: ignore[union-attr]
            for each in declared.split(","):
                yield each.strip(" *"), _kind(kind, each.count("*"))


def _kind(name: str, stars: int) -> Any:
    """What ctypes calls a type. Pointers to other numbers than ``long`` and ``int`` are addresses, as tensors have."""
    if stars == 2:
        return POINTER(c_void_p)
    if stars and name not in ("long", "int", *STRUCTURES):
        return c_void_p
    own = _NUMBERS[name] if name in _NUMBERS else STRUCTURES[name]
    return POINTER(own) if stars else own


Follow = CFUNCTYPE(c_int, c_long, c_long, c_float)
"""Given a sequence, a drafted token and its confidence; returns whether the draft ends with it."""

PlanForward = CFUNCTYPE(None)
"""Lays the rows of the next forward out."""


class _Native(Structure):
    """A structure of the headers. Its name there is that of the class without ``Native``, or in ``_OTHER_NAMES``."""


class Stored(_Native):
    """Weights of few bits of some outputs of a linear layer, in tiles."""


class Linear(_Native):
    """A linear layer: weights ``[outputs, inputs]``, or parts of few bits; bias ``[outputs]`` or null.

    ``order`` is of the parts' inputs, the place of each in a row, or null.
    """


class Norm(_Native):
    """A norm of a row; none where ``kind`` is 0."""


class Heads(_Native):
    """Sizes of an attention branch."""


class AttentionWeights(_Native):
    """An attention branch."""


class MlpWeights(_Native):
    """An MLP branch."""


class MixtureWeights(_Native):
    """A mixture of experts: the weights of all of them follow each other; no shared one where its ``inner`` is 0."""


class LatentWeights(_Native):
    """Attention to latents; see ``latent.h``."""


class NativeStateNet(_Native):
    """A layer with a state for each head; see ``state_net.h``."""


class NativeSublayer(_Native):
    """A branch of a forward: attention, an MLP, a mixture of experts or attention to latents; the others are null."""


class View(_Native):
    """The slots that the rows of a sequence see through a window."""


class NativeCosSin(_Native):
    """Cosine and signed sine of the rows' positions."""


class LowRankOutputs(_Native):
    """The second factor of a low-rank product, whose sums are added to a product's outputs from ``first`` on."""


class NativeLowRank(_Native):
    """The low-rank products that an adapter adds to a product; ``inputs`` are the first factors of all."""


class AdaptedSublayer(_Native):
    """What an adapter adds to the two products of a sublayer."""


class SeenBlocks(_Native):
    """What of a text the rows of a draft see: blocks of slots, and all slots from one on."""


class Part(_Native):
    """The rows of one sequence."""


class NativeChanges(_Native):
    """How logits of a sequence change before a token is chosen; see ``changes.py``."""


class NativeDrawing(_Native):
    """How the token of a row is drawn; not at all where the temperature is 0."""


class NativeHead(_Native):
    """Final norm and LM head, and where their results go; the norm alone where ``linear`` has no weights."""


class NativeCall(_Native):
    """A forward: its sublayers, the states to keep, the rows of each sequence, their rotations, the head if it runs."""


class ChainSequence(_Native):
    """A sequence whose tokens are drafted in a chain, and how many were; or a chain or tree to verify."""


class NativeHeadEntry(_Native):
    """What enters the layer of a multi-token-prediction head."""


class NativeHeadText(_Native):
    """What such a head knows of a sequence; see ``mtp.h``."""


class NativeDraftHead(_Native):
    """Such a head, which drafts the guesses of a chain; ``chain`` is a ``NativeChain``."""


class NativeChain(_Native):
    """Forwards after each other, each over the tokens that the one before it chose."""


_FUNCTIONS = {"follow": Follow, "plan": PlanForward}
_OTHER_NAMES = {"NativeCall": "Forward"}
STRUCTURES: dict[str, type[Structure]] = {}
"""The structures by their names in the headers."""

for _structure in _Native.__subclasses__():  # in the order of definition: fields are of structures above
    _name = _OTHER_NAMES.get(_structure.__name__, _structure.__name__.removeprefix("Native"))
    _structure._fields_ = [*_fields(_name)]
    STRUCTURES[_name] = _structure

CONSTANTS = {
    "SOURCES": sources(),
    "BLOCK": BLOCK,
    "TILE": TILE,
    "SHARED": SHARED,
    "SEEN": SEEN,
    "MOST_SIBLINGS": MOST_SIBLINGS,
    **{f"format.{name}": form.number for name, form in FORMATS.items()},
    **{f"inputs.{name}": form.unit for name, form in FORMATS.items()},
    **{f"bytes.{name}": form.unit_bytes for name, form in FORMATS.items()},
}
"""What Python has to know without the library, by its name in the headers."""


def declare(library: CDLL, dtypes: Iterable[str]) -> None:
    """Gives a library's functions the types that ``kernels.cpp`` declares; some are there for each of the dtypes."""
    source = _FOLDER.joinpath("kernels.cpp").read_text(encoding="utf-8").replace("\\\n", "").replace("const", "")
    for result, name, parameters in re.findall(r'extern "C" (\w+) (\w+)(?:##SUFFIX)?\(([^)]*)\)', source):
        kinds = [_kind(kind, stars.count("*")) for kind, stars in re.findall(r"(\w+)([\s*]+)\w+", parameters)]
        for suffix in dtypes if name.endswith("_") else ("",):
            function = getattr(library, name + suffix)
            function.argtypes, function.restype = kinds, _NUMBERS.get(result)


class _Fact(Structure):
    _fields_ = (("name", c_char_p), ("value", c_long))


def read_layout(library: CDLL) -> dict[str, int]:
    """Sizes in bytes (``Linear``) and constants (``BLOCK``), as the library has them."""
    library.layout.argtypes, library.layout.restype = [], POINTER(_Fact)
    facts = library.layout()
    found: dict[str, int] = {}
    while facts[len(found)].name:
        fact = facts[len(found)]
        found[fact.name.decode()] = int(fact.value)
    return found


def disagreements(library: Mapping[str, int]) -> list[str]:
    """In words, where a library and this file differ; ``library`` is what ``read_layout`` gave."""
    own = CONSTANTS | {name: sizeof(structure) for name, structure in STRUCTURES.items()}
    names = {name.partition(".")[0] for name in own}
    known = {name: value for name, value in library.items() if name.partition(".")[0] in names}
    return [
        f"{name} is {known.get(name, 'unknown')} in the library and {own.get(name, 'unknown')} here"
        for name in sorted(own.keys() | known.keys())
        if own.get(name) != known.get(name)
    ]
