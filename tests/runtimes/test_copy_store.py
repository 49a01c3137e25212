"""Low-bit copies in files: read as they were made, and never used when they are damaged or of other weights."""

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec import Engine
from selfspec.runtimes import copy_store
from selfspec.runtimes.copy_store import CopyStore
from selfspec.runtimes.formats import LOW_BITS, PackedFormat
from selfspec.runtimes.packed import PackedWeights
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

FORM = PackedFormat(4, 64)


def some_weight(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(50, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(one: PackedWeights, other: PackedWeights) -> bool:
    return torch.equal(one.tiles, other.tiles)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PackedFormat]:
    """The formats of the copies that are made, not read."""
    formats: list[PackedFormat] = []
    make = PackedWeights.of

    def noted(weight: torch.Tensor, form: PackedFormat) -> PackedWeights:
        formats.append(form)
        return make(weight, form)

    monkeypatch.setattr(PackedWeights, "of", noted)
    return formats


@pytest.fixture(autouse=True)
def every_warning_is_an_error() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("bits", LOW_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_copy_is_read_as_it_was_made(bits: int, dtype: torch.dtype, tmp_path: Path, made: list[Any]) -> None:
    weight, form = some_weight(dtype=dtype), PackedFormat(bits, 64)
    first = CopyStore(tmp_path).get(weight, form)
    again = CopyStore(tmp_path).get(weight, form)
    assert made == [form]
    assert same(first, again)
    assert torch.equal(again.unpack(), PackedWeights.of(weight, form).unpack())


def test_other_weights_and_formats_have_other_files(tmp_path: Path, made: list[Any]) -> None:
    store, weight = CopyStore(tmp_path), some_weight()
    changed, swapped = weight.clone(), weight.clone()
    changed[49, 127] += 1
    swapped[[0, 1]] = swapped[[1, 0]]
    kinds = [(weight, FORM), (changed, FORM), (swapped, FORM), (weight.flip(1), FORM), (weight, PackedFormat(8))]
    for each, form in kinds:
        assert same(store.get(each, form), PackedWeights.of(each, form))
    assert len(made) == 2 * len(kinds)
    assert len(list(tmp_path.iterdir())) == len(kinds)


@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty", "longer", "of other weights"])
def test_a_file_that_is_not_the_copy_is_replaced(damage: str, tmp_path: Path, made: list[Any]) -> None:
    weight = some_weight()
    CopyStore(tmp_path).get(weight, FORM)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "of other weights":
        CopyStore(tmp_path / "other").get(some_weight(1), FORM)
        content = bytearray(next((tmp_path / "other").iterdir()).read_bytes())
    content[len(content) // 2] ^= damage == "one bit"
    ends = {"cut short": content[:-1], "empty": b"", "longer": content + b"0"}
    path.write_bytes(ends.get(damage, content))
    made.clear()
    with pytest.warns(RuntimeWarning, match="damaged or of other weights; it is made again"):
        found = CopyStore(tmp_path).get(weight, FORM)
    assert made == [FORM]
    assert same(found, PackedWeights.of(weight, FORM))
    made.clear()
    assert same(CopyStore(tmp_path).get(weight, FORM), found)
    assert not made


def test_a_file_that_others_could_change_is_not_read(tmp_path: Path, made: list[Any]) -> None:
    weight = some_weight()
    CopyStore(tmp_path).get(weight, FORM)
    (path,) = tmp_path.iterdir()
    path.chmod(0o666)
    assert same(CopyStore(tmp_path).get(weight, FORM), PackedWeights.of(weight, FORM))
    assert made == [FORM, FORM, FORM]  # the last one is the test's own


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CopyStore(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        found = store.get(some_weight(), FORM)
    assert same(found, PackedWeights.of(some_weight(), FORM))
    store.get(some_weight(1), FORM)  # warns once


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copy_store, "replace_file", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        CopyStore(tmp_path).get(some_weight(), FORM)
    assert not list(tmp_path.iterdir())


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    weight, found = some_weight(), []
    threads = [threading.Thread(target=lambda: found.append(CopyStore(tmp_path).get(weight, FORM))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(same(found[0], other) for other in found)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_engine_keeps_copies_where_that_is_asked_for(
    tmp_path: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, prompt = random_model(torch.bfloat16), list(range(20))
    outputs = []
    for keep, count in ((False, 17), (True, 17), (True, 0)):
        made.clear()
        result = Engine(model, method="low-bit", keep_copies=keep).generate(prompt, max_new_tokens=30, ignore_eos=True)
        outputs.append((result.token_ids, result.drafted, result.accepted))
        assert len(made) == count
        assert (tmp_path / "selfspec" / "copies").is_dir() == keep
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][2] > 0
    made.clear()
    Target(model, keep_copies=True).at(Precision(attention=4, mlp=8))
    assert len(made) == 8, "files are shared between precisions, product by product"
