"""Ways of reading weights: equal bits, the trial that chooses one, and what is kept of it."""

import ctypes
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec.runtimes import kept_file, reading
from selfspec.runtimes.formats import PackedFormat
from selfspec.runtimes.kernels import find
from selfspec.runtimes.packed import PackedWeights
from selfspec.runtimes.products import CompiledProduct, LowBitProduct, join
from selfspec.runtimes.target import Target
from selfspec.runtimes.threads import THREADS

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def defaults() -> Any:
    """The ways are those of before after each test."""
    yield
    for dtype in (torch.float32, torch.bfloat16, None):
        reading.set_ways(dtype, reading.default_ways(dtype))


def products(count: int, dtype: torch.dtype = torch.bfloat16, inputs: int = 200) -> list[CompiledProduct]:
    found = []
    for outputs in (100, 60) * count:
        linear = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        found.append(CompiledProduct(join([linear])))
    return found


def packed_products(count: int, dtype: torch.dtype = torch.bfloat16, bits: int = 4) -> list[CompiledProduct]:
    form = PackedFormat(bits, 32)
    weights = [PackedWeights.of(torch.randn(outputs, 192), form) for outputs in (96, 64) * count]
    return [CompiledProduct(LowBitProduct([each], dtype, None)) for each in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [40, 1100])
def test_every_way_gives_the_same_bits(dtype: torch.dtype, inputs: int) -> None:
    (multiply, *_), rows = products(1, dtype, inputs), torch.randn(8, inputs).to(dtype)
    with torch.inference_mode():
        expected = torch.cat([multiply(row[None]) for row in rows])
        for ways in product(reading.WAYS, repeat=3):
            reading.set_ways(dtype, ways)
            for count in range(1, 9):
                assert torch.equal(multiply(rows[:count]), expected[:count]), (ways, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_every_distance_gives_the_same_bits(dtype: torch.dtype, bits: int) -> None:
    (multiply, *_), rows = packed_products(1, dtype, bits), torch.randn(8, 192).to(dtype)
    with torch.inference_mode():
        expected = multiply(rows)
        for ways in product(reading.DISTANCES, repeat=3):
            reading.set_ways(None, ways)
            for count in range(1, 9):
                assert torch.equal(multiply(rows[:count]), expected[:count]), (ways, count)


def test_every_way_gives_the_same_bits_in_a_forward() -> None:
    target, found = Target(random_model(torch.bfloat16), "compiled"), []
    for way in reading.WAYS:
        reading.set_ways(torch.bfloat16, [way] * 3)
        state = target.new_sequence(20, 20, 20)
        logits = []
        for rows in (1, 2, 3, 5, 8):
            tokens = torch.arange(rows)
            with torch.inference_mode():
                forward = target.lay_out(state, rows)
                output = target.run(target.embed(tokens), range(target.sublayer_count), forward, logits=True)
            assert output.logits is not None
            logits.append(output.logits.values)
            state.cache.commit(range(rows))
        found.append(torch.cat(logits))
    assert all(torch.equal(each, found[0]) for each in found)


def test_a_small_model_has_no_trial() -> None:
    assert reading.choose_reading(products(2)) is None
    assert Target(random_model(), "compiled").reading is None
    assert reading.choose_reading([]) is None


class _Clock:
    """A clock that each measured time moves by what the current ways cost."""

    def __init__(self, costs: dict[int, float]) -> None:
        self.now, self.costs, self.way = 0.0, costs, 0

    def __call__(self) -> float:
        return self.now


def _simulate(monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]) -> _Clock:
    clock = _Clock(costs)

    def set_ways(dtype: torch.dtype | None, ways: Any) -> None:
        clock.way = ways[0]

    def measure(kernels: Any, products: Any, rows: int, threads: int, own: Any) -> float:
        clock.now += costs[clock.way]
        return costs[clock.way]

    monkeypatch.setattr(reading, "set_ways", set_ways)
    monkeypatch.setattr(reading, "product_seconds", measure)
    return clock


def test_the_fastest_way_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "default_ways", lambda dtype: (1, 1, 2))
    clock = _simulate(monkeypatch, {0: 0.003, 1: 0.002, 2: 0.00198, 4: 0.001})
    found = reading.measure_reading(products(1), 1, clock)
    assert found == reading.Reading((4, 4, 4), (2.0, 2.0, 1.98))
    assert str(found) == "1 row: widest (2.00), 2 or 3: widest (2.00), more: widest (1.98)"
    assert clock.now < 1


def test_the_fastest_distance_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _simulate(monkeypatch, {256: 0.001, 1024: 0.0012, 4096: 0.0011})
    found = reading.measure_reading(packed_products(1), 1, clock)
    assert found == reading.Reading((256, 256, 256), (1.2, 1.2, 1.2))
    assert str(found) == "1 row: near (1.20), 2 or 3: near (1.20), more: near (1.20)"


def test_a_small_gain_keeps_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "default_ways", lambda dtype: (1, 1, 2))
    clock = _simulate(monkeypatch, {0: 0.003, 1: 0.002, 2: 0.00198, 4: 0.00199})
    assert reading.measure_reading(products(1), 1, clock) == reading.Reading((1, 1, 2), (1.0, 1.0, 1.0))


def test_a_trial_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _simulate(monkeypatch, dict.fromkeys(reading.WAYS, 0.2))
    assert reading.measure_reading(products(1), 1, clock) is None
    assert clock.now < 1


def test_where_threads_wait_one_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if find().level == "amx":
        pytest.skip("bfloat16 runs in tiles there")
    tried = []

    def measure(sample: Any, threads: int) -> reading.Reading | None:
        tried.append(threads)
        return None if threads > 1 else reading.Reading((2, 2, 4), (1.1, 1.2, 1.3))

    monkeypatch.setattr(reading, "measure_reading", measure)
    monkeypatch.setattr(kept_file, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(reading, "_SMALLEST", 0)
    monkeypatch.setattr(THREADS, "_most", lambda: 3)
    found = reading.choose_reading(products(1))
    assert found is not None
    assert found.ways == (2, 2, 4)
    assert tried == [3, 1]


@pytest.mark.parametrize("few_bits", [False, True])
def test_it_is_measured_once(few_bits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With real products, which are small here."""
    if find().level == "amx" and not few_bits:
        pytest.skip("bfloat16 runs in tiles there")
    monkeypatch.setattr(kept_file, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(reading, "_SMALLEST", 0)
    monkeypatch.setattr(reading, "_SECONDS", 60.0)
    sample = packed_products(2) if few_bits else products(2)
    first = reading.choose_reading(sample)
    assert first is not None
    assert set(first.ways) <= set(reading.DISTANCES if few_bits else reading.WAYS)
    set_now = (ctypes.c_int * 3)()
    getattr(find().library, f"reading_{'packed' if few_bits else 'bfloat16'}")(set_now)
    assert tuple(set_now) == first.ways
    monkeypatch.setattr(reading, "measure_reading", lambda *_: pytest.fail("measured again"))
    assert reading.choose_reading(sample) == first
    (kept,) = (tmp_path / "readings").iterdir()
    for content in ("", "{}", kept.read_text().replace('"ways": [', '"ways": [9, ')):
        kept.write_text(content)
        with pytest.raises(pytest.fail.Exception, match="measured again"):
            reading.choose_reading(sample)


def test_the_parts_of_a_sample_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SMALLEST", 0)
    sample = reading.take_sample(products(8))
    monkeypatch.setattr(reading, "_AT_ONCE", 3 * sum(map(reading._bytes, sample[:2])))
    parts = reading.split_sample(sample)
    for _ in range(5):
        assert sorted(each.shape[0] for each in next(parts)) == [60, 60, 60, 100, 100, 100]
