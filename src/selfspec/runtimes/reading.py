"""How products of few rows read a model's weights, chosen by a trial on the processor where they run.

Weights in the dtype of the rows are read one weight row after the other or several side by side, through the outer
caches or past them: ``Reading`` of ``product.h``. Those of few bits are fetched into the first cache nearer or farther
ahead of their use: ``fetched_soon`` of ``block_products.h``. All ways give the same bits. Which is fastest depends on
the processor, by up to a factor of three, so it is measured once with a model's own weights, and kept in the cache
folder.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import cycle, islice
from typing import Any, TypeVar

import torch

from selfspec.runtimes.formats import TILE
from selfspec.runtimes.kept_file import KeptFile, restored
from selfspec.runtimes.kernel_build import processor_name
from selfspec.runtimes.kernels import DTYPES, Kernels, find
from selfspec.runtimes.products import CompiledProduct, Product
from selfspec.runtimes.threads import THREADS

AnyProduct = TypeVar("AnyProduct", bound=Product)

WAYS = (0, 1, 2, 4)
"""Weight rows side by side; 0 for single ones past the outer caches. The number of columns in ``product.h``."""

DISTANCES = (256, 1024, 4096)
"""The same for weights of few bits: bytes that they are fetched ahead, as ``block_products.h`` counts them."""

_TEXTS = {0: "past the caches", 1: "single", 2: "pairs", 4: "widest", 256: "near", 1024: "usual", 4096: "far"}

_ROWS = (1, 3, 6)
"""Rows of a product by which a way is chosen for one row, for two or three, and for more."""

_NAMES = ("1 row", "2 or 3", "more")

_SECONDS = 0.35
"""After which a trial ends; it is tried with all threads, and where other processes make these wait, with one."""

_ROUNDS, _FEWEST = 7, 3
_SMALLEST, _LARGEST = 48 << 20, 128 << 20
"""Bytes of weights that a trial reads: less stays in the caches, where no way is much better than another."""

_AT_ONCE, _OF_PRODUCT = 8 << 20, 4 << 20
"""Bytes of weights that are read for one measured time; most of one product."""

_WORTHWHILE = 0.97
"""Times as long as the default at most, for another way to be chosen."""


@dataclass(frozen=True)
class Reading:
    """A way for each of three kinds of products, by their rows; see ``WAYS`` and ``DISTANCES``."""

    ways: tuple[int, ...]
    gains: tuple[float, ...]
    """Time of the default divided by that of the way."""

    def __str__(self) -> str:
        each = zip(_NAMES, self.ways, self.gains, strict=True)
        return ", ".join(f"{name}: {_TEXTS[way]} ({gain:.2f})" for name, way, gain in each)


def set_ways(dtype: torch.dtype | None, ways: Sequence[int], kernels: Kernels | None = None) -> None:
    """Sets how this process reads weights by kernels, its own if not given; until then in default ways.

    Weights of a ``dtype``, or those of few bits (``None``).
    """
    default_ways(dtype, kernels)
    library = (kernels or find()).library
    getattr(library, f"read_{_suffix(dtype)}")((ctypes.c_int * len(_ROWS))(*ways))


def default_ways(dtype: torch.dtype | None, kernels: Kernels | None = None) -> tuple[int, ...]:
    """The ways of the level of kernels, those of the process if not given; see ``set_ways``."""
    kernels = kernels or find()
    if (kernels.level, dtype) not in _defaults:
        ways = (ctypes.c_int * len(_ROWS))()
        getattr(kernels.library, f"reading_{_suffix(dtype)}")(ways)
        _defaults[kernels.level, dtype] = tuple(ways)
    return _defaults[kernels.level, dtype]


_defaults: dict[tuple[str, torch.dtype | None], tuple[int, ...]] = {}


def _suffix(dtype: torch.dtype | None) -> str:
    return "packed" if dtype is None else DTYPES[dtype]


def choose_reading(products: Sequence[CompiledProduct]) -> Reading | None:
    """Sets and returns the best ways for the largest products of a model: kept ones, or measured now and kept.

    Of weights that have the dtype of the rows, if there are many, or else of those of few bits. ``None``, and nothing
    is set, for models that nearly fit the caches, for tiles, and where a trial could not end in time.
    """
    sample = take_sample([product for product in products if product.bits == 0])
    if sample and find().level == "amx" and sample[0].dtype == torch.bfloat16:
        return None
    sample = sample or take_sample([product for product in products if product.bits > 0])
    if not sample:
        return None
    choice = KeptFile("readings", {**describe_sample(sample), "level": find().level})
    found = _parse(choice.read() or {}, _ways_of(sample))
    if found is None:
        found = measure_reading(sample, THREADS.most) or measure_reading(sample, 1)
        if found is None:
            return None
        choice.write({"ways": found.ways, "gains": found.gains})
    set_ways(_read_as(sample), found.ways)
    return found


def _read_as(sample: Sequence[Product]) -> torch.dtype | None:
    return None if sample[0].bits else sample[0].dtype


def _ways_of(sample: Sequence[Product]) -> tuple[int, ...]:
    return DISTANCES if sample[0].bits else WAYS


def _parse(kept: Mapping[str, Any], ways: Sequence[int]) -> Reading | None:
    try:
        found: Reading = restored(Reading, kept)
        valid = set(found.ways) <= set(ways) and len(found.ways) == len(found.gains) == len(_ROWS)
    except (ValueError, KeyError, TypeError):
        return None
    return found if valid else None


def measure_reading(
    sample: Sequence[Product], threads: int, clock: Callable[[], float] = time.perf_counter
) -> Reading | None:
    """The best ways for products, each measured in turns; ``None`` if there was no time for a few of each."""
    dtype, each_way = _read_as(sample), _ways_of(sample)
    end, default = clock() + _SECONDS, default_ways(dtype)
    seconds: dict[tuple[int, int], list[float]] = {(kind, way): [] for kind in range(len(_ROWS)) for way in each_way}
    parts = split_sample(sample)
    try:
        for _ in range(_ROUNDS):
            for (kind, way), times in seconds.items():
                set_ways(dtype, [way] * len(_ROWS))
                times.append(product_seconds(find(), next(parts), _ROWS[kind], threads, clock))
                if clock() > end:
                    break
            if clock() > end:
                break
    finally:
        set_ways(dtype, default)
    if min(map(len, seconds.values())) < _FEWEST:
        return None
    least = {each: min(times) for each, times in seconds.items()}
    ways, gains = [], []
    for kind, usual in enumerate(default):
        best = min(each_way, key=lambda way: least[kind, way])
        if least[kind, best] > _WORTHWHILE * least[kind, usual]:
            best = usual
        ways.append(best)
        gains.append(least[kind, usual] / least[kind, best])
    return Reading(tuple(ways), tuple(gains))


def _outputs(product: Product) -> int:
    """The outputs of a product that are measured: whole tiles where there are more."""
    outputs, inputs = product.shape
    return min(outputs, 8 * _OF_PRODUCT // (inputs * _bits(product)) // TILE * TILE)


def _bits(product: Product) -> int:
    return product.bits or 8 * product.dtype.itemsize


def _bytes(product: Product) -> int:
    return _outputs(product) * product.shape[1] * _bits(product) // 8


def take_sample(products: Sequence[AnyProduct]) -> list[AnyProduct]:
    """Those of the two shapes with most bytes, up to ``_LARGEST``; none if there is not enough to measure."""
    total: dict[tuple[int, int], int] = {}
    for product in products:
        total[product.shape] = total.get(product.shape, 0) + _bytes(product)
    largest = sorted(total, key=lambda shape: -total[shape])[:2]
    sample, size = [], 0
    for product in products:
        if product.shape in largest and size < _LARGEST:
            sample.append(product)
            size += _bytes(product)
    return sample if size >= _SMALLEST else []


def split_sample(sample: Sequence[Product]) -> Iterator[list[Product]]:
    """Equal parts of a sample, each read right before it comes again as long ago as possible."""
    shapes = len({product.shape for product in sample})
    of_layer = sum(map(_bytes, sample[:shapes]))
    count = shapes * max(1, _AT_ONCE // of_layer)
    products = cycle(sample)
    while True:
        yield list(islice(products, count))


def product_seconds(
    kernels: Kernels, products: Sequence[Product], rows: int, threads: int, clock: Callable[[], float]
) -> float:
    """The seconds of products of some rows, with zeros: their values do not matter."""
    dtype = products[0].dtype
    call = getattr(kernels.library, f"product_{DTYPES[dtype]}")
    inputs = torch.zeros(rows, max(product.shape[1] for product in products), dtype=dtype)
    results = torch.empty(rows, max(product.shape[0] for product in products), dtype=dtype)
    start = clock()
    for product in products:
        linear = ctypes.byref(product.linear)
        call(linear, inputs.data_ptr(), results.data_ptr(), rows, product.shape[1], _outputs(product), threads)
    return clock() - start


def describe_sample(sample: Sequence[Product]) -> dict[str, Any]:
    """What a choice is valid for."""
    return {
        "processor": processor_name(),
        "dtype": str(sample[0].dtype),
        "bits": max(product.bits for product in sample),
        "threads": torch.get_num_threads(),
        "shapes": sorted(list(shape) for shape in {product.shape for product in sample}),
        "selfspec": version("selfspec"),
    }
