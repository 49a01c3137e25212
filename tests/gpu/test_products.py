"""Triton's products, interpreted or compiled: sums of the readable weights, rows that do not depend on the others."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.device import DEVICE, IS_INTERPRETED
from helpers.kernels import needs_kernels
from selfspec.runtimes.formats import GGUF_FORMATS, GROUPS, LOW_BITS, TILE, PackedFormat
from selfspec.runtimes.packed import PackedWeights

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec.errors import UnsupportedModelError
from selfspec.gpu import launch
from selfspec.gpu.blocks import WITHOUT_KERNEL, tile_form
from selfspec.gpu.few_rows import divisions, low_bit_divisions
from selfspec.gpu.launch import MOST_ROWS, look_up, multiply_dense, multiply_parts

QUADS = (False, True) if IS_INTERPRETED else (launch.QUADS,)
"""How matrix instructions are laid out: NVIDIA's and AMD's, of which the interpreter has both."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRIDS = [PackedFormat(bits, group, "GRID") for bits in (2, 3, 4, 8) for group in GROUPS]
OWN_FORMATS = [PackedFormat(bits, group) for bits in LOW_BITS for group in GROUPS]


def rows_of(count: int, inputs: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def gguf_weights(name: str, outputs: int, inputs: int, seed: int) -> tuple[PackedWeights, torch.Tensor]:
    """Random blocks of a format, and their values as the package ``gguf`` reads them."""
    kind, draw = GGMLQuantizationType[name], np.random.default_rng(seed)
    size, length = GGML_QUANT_SIZES[kind]
    if name in ("F32", "F16", "BF16"):
        numbers = draw.standard_normal((outputs, inputs)).astype(np.float32)
        data = np.ascontiguousarray(quants.quantize(numbers, kind)).view(np.uint8).reshape(outputs, -1)
    else:
        blocks = draw.integers(0, 256, (outputs, inputs // size, length), dtype=np.uint8)
        for place in scale_places(name, length):
            scales = draw.uniform(0.01, 0.1, blocks.shape[:2]).astype(np.float16)
            blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
        data = blocks.reshape(outputs, -1)
    stored = data.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    values = torch.from_numpy(np.array(quants.dequantize(stored, kind), np.float32)).reshape(outputs, inputs)
    return on_device(PackedWeights.of_gguf(data, GGUF_FORMATS[name], (outputs, inputs))), values.to(DEVICE)


def on_device(packed: PackedWeights) -> PackedWeights:
    return replace(packed, tiles=packed.tiles.to(DEVICE))


def scale_places(name: str, length: int) -> Sequence[int]:
    """Where the 16-bit scales of a block are."""
    if name in ("Q2_K", "Q3_K", "Q6_K"):
        return {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}[name]
    return (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)


def random_grid(form: PackedFormat, outputs: int, inputs: int, seed: int) -> PackedWeights:
    """Random codes and zero points with usual scales."""
    made = torch.Generator().manual_seed(seed)
    packed = PackedWeights.empty(outputs, inputs, form)
    packed.tiles.random_(0, 256, generator=made)
    units = packed.tiles.view(len(packed.tiles), -1, form.unit_bytes)
    scales = torch.rand(*units.shape[:2], TILE, generator=made)
    units[:, :, : 4 * TILE] = scales.view(torch.uint8).view(*units.shape[:2], -1)
    return packed  # on the CPU


def assert_products(packed: PackedWeights, values: torch.Tensor, count: int, dtype: torch.dtype) -> None:
    rows = rows_of(count, packed.inputs, dtype, count)
    found, expected = multiply_parts(rows, [packed]), rows.double() @ values.double().T
    size = float((rows.double().abs() @ values.double().abs().T).max())
    assert float((found.double() - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * size
    assert torch.equal(multiply_parts(rows[-1:], [packed])[0], found[-1])


@settings(max_examples=20)
@given(
    rows=st.integers(1, 16),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_dense_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool, seed: int) -> None:
    entries, weight = rows_of(rows, inputs, dtype, seed), rows_of(outputs, inputs, dtype, seed + 1)
    bias = rows_of(1, outputs, dtype, seed + 2)[0] if has_bias else None
    found, expected = multiply_dense(entries, weight, bias), entries.double() @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    size = float((entries.double().abs() @ weight.double().abs().T).max()) + 4
    assert float((found.double() - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * size
    for place in {0, rows // 2, rows - 1}:
        assert torch.equal(multiply_dense(entries[place : place + 1], weight, bias)[0], found[place])


def test_inputs_that_are_divided() -> None:
    outputs, inputs = 17, 2060
    assert divisions(outputs, inputs) > 1
    entries, weight = rows_of(3, inputs, torch.float32, 0), rows_of(outputs, inputs, torch.float32, 1)
    bias = rows_of(1, outputs, torch.float32, 2)[0]
    found = multiply_dense(entries, weight, bias)
    torch.testing.assert_close(found, entries @ weight.T + bias, rtol=1e-4, atol=1e-3)
    assert torch.equal(multiply_dense(entries[1:2], weight, bias)[0], found[1])


@pytest.mark.parametrize(
    ("outputs", "inputs", "count"),
    [(576, 1536, 2), (4096, 4096, 4), (14336, 4096, 4), (24576, 4608, 4), (128256, 4096, 1), (192, 576, 1)],
)
def test_codes_of_few_bits_are_divided_among_more_programs(outputs: int, inputs: int, count: int) -> None:
    """As measured: shares of a thousand inputs, and of fewer where there are hardly any programs."""
    assert low_bit_divisions(outputs, inputs, 16) == count


def test_a_format_without_kernel_is_refused_by_name() -> None:
    for name in WITHOUT_KERNEL:
        with pytest.raises(UnsupportedModelError, match=name):
            tile_form(GGUF_FORMATS[name])


@needs_kernels
@pytest.mark.parametrize("name", sorted(GGUF_FORMATS.keys() - WITHOUT_KERNEL))
def test_blocks_of_gguf_files(name: str) -> None:
    for outputs, units, count, dtype in ((7, 2, 3, torch.float32), (18, 1, 16, torch.bfloat16)):
        packed, values = gguf_weights(name, outputs, units * GGUF_FORMATS[name].unit, outputs)
        chosen = torch.tensor([0, outputs - 1, 5], device=DEVICE)
        assert torch.equal(look_up(packed, chosen, torch.float32), values[chosen])
        assert_products(packed, values, count, dtype)


@needs_kernels
@settings(max_examples=8)
@given(
    form=st.sampled_from([*GRIDS, *OWN_FORMATS]),
    rows=st.integers(1, 16),
    outputs=st.integers(1, 33),
    units=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_grids_and_own_formats(
    form: PackedFormat, rows: int, outputs: int, units: int, dtype: torch.dtype, seed: int
) -> None:
    inputs = units * form.unit
    if form.name:
        packed = random_grid(form, outputs, inputs, seed)
    else:
        packed = PackedWeights.of(rows_of(outputs, inputs, torch.float32, seed).cpu(), form)
    assert_products(on_device(packed), packed.unpack().to(DEVICE), rows, dtype)


def some_weights(name: str) -> tuple[PackedWeights, torch.Tensor]:
    """A unit of 16 weight rows of a format of files, or of a grid by its bits."""
    if name.startswith("GRID"):
        packed = random_grid(PackedFormat(int(name[-1]), 128, "GRID"), 16, 128, 3)
        return on_device(packed), packed.unpack().to(DEVICE)
    return gguf_weights(name, 16, GGUF_FORMATS[name].unit, 3)


@needs_kernels
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "GRID 2", "GRID 3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quads", QUADS)
def test_a_row_with_a_single_one_gives_the_very_values_of_its_input(
    name: str, dtype: torch.dtype, quads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So codes, integers of scales and what is subtracted are exact, in either order of inputs."""
    monkeypatch.setattr(launch, "QUADS", quads)
    packed, _ = some_weights(name)
    values = look_up(packed, torch.arange(16, device=DEVICE), torch.float32)
    chosen = torch.randperm(packed.inputs, generator=torch.Generator().manual_seed(5))[:16].to(DEVICE)
    rows = torch.eye(packed.inputs, dtype=dtype, device=DEVICE)[chosen].contiguous()
    out = torch.empty(len(chosen), 16, device=DEVICE)
    launch.multiply_tiles(rows, packed.tiles, packed.form, out)
    assert torch.equal(out, values[:, chosen].T)


@needs_kernels
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "Q8_0", "IQ4_XS", "GRID 2", "GRID 3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_enter_as_pairs_of_numbers_of_16_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of two under which codes become numbers leaves the sums; in either order of codes of a word."""
    packed, values = some_weights(name)
    rows = 1 + rows_of(9, packed.inputs, dtype, 1).abs()  # sums of entries that do not cancel
    expected = rows.double() @ values.double().T
    size = rows.double().abs() @ values.double().abs().T
    for quads in QUADS:
        monkeypatch.setattr(launch, "QUADS", quads)
        out = torch.empty(9, 16, device=DEVICE)
        launch.multiply_tiles(rows, packed.tiles, packed.form, out)
        assert float(((out.double() - expected).abs() / size).max()) < 1e-4
        for row in (3, 8):  # beside others a program has twice as many rows
            alone = torch.empty(1, 16, device=DEVICE)
            launch.multiply_tiles(rows[row : row + 1], packed.tiles, packed.form, alone)
            assert torch.equal(alone[0], out[row])


@needs_kernels
def test_parts_of_several_formats_an_order_and_a_bias() -> None:
    first, own = gguf_weights("Q4_K", 16, 256, 0)
    second, other = gguf_weights("Q6_K", 9, 256, 1)
    bias, entries = rows_of(1, 25, torch.float32, 2)[0], rows_of(5, 256, torch.float32, 3)
    found = multiply_parts(entries, [first, second], bias)
    torch.testing.assert_close(found, entries @ torch.cat([own, other]).T + bias, rtol=1e-4, atol=1e-2)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4)).to(DEVICE, torch.int32)
    stored = PackedWeights(second.tiles, second.form, 9, 256, order)
    torch.testing.assert_close(multiply_parts(entries, [stored]), entries[:, order] @ other.T, rtol=1e-4, atol=1e-2)


@needs_kernels
def test_many_rows_are_multiplied_with_what_is_unpacked() -> None:
    packed, values = gguf_weights("Q8_0", 18, 64, 0)
    entries = rows_of(MOST_ROWS + 1, 64, torch.float32, 1)
    torch.testing.assert_close(multiply_parts(entries, [packed]), entries @ values.T, rtol=1e-5, atol=1e-4)
    few = multiply_parts(entries, [packed], widest=4)  # of many sequences with few rows each
    assert torch.equal(few[7:8], multiply_parts(entries[7:8], [packed]))
