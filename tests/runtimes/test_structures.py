"""The structures and constants that C++ and Python share: a library with others is refused by name, not run."""

from collections.abc import Iterator, Mapping
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from pathlib import Path
from typing import Any

import pytest

from helpers.kernels import found_again, needs_kernels
from helpers.low_bit_model import random_model
from selfspec.runtimes import kernels, structures
from selfspec.runtimes.kernels import KernelBuildError
from selfspec.runtimes.target import Target

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def loaded_again() -> Iterator[None]:
    with found_again():
        yield


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, fields: tuple[Any, ...]) -> None:
    """Gives a structure other fields."""
    other = type(name, (Structure,), {"_fields_": fields})
    monkeypatch.setattr(structures, "STRUCTURES", {**structures.STRUCTURES, name: other})


@pytest.mark.parametrize("name", structures.STRUCTURES)
def test_every_structure_of_another_size_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, name, (*structures.STRUCTURES[name]._fields_, ("added", c_long)))
    with pytest.raises(KernelBuildError, match=rf"another version of selfspec: {name}\b.*; delete .*\.so"):
        kernels.find()


def test_fields_are_those_of_the_headers() -> None:
    norm = [("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float), ("kind", c_int), ("rounds", c_int)]
    assert structures.Norm._fields_ == [*norm, ("added", c_float)]
    chain = dict(structures.NativeChain._fields_)
    assert (chain["forward"], chain["windows"]) == (POINTER(structures.NativeCall), POINTER(c_long))
    assert (chain["follow"], chain["plan"]) == (structures.Follow, structures.PlanForward)
    part = dict(structures.Part._fields_)
    assert (part["caches"], part["first_row"]) == (POINTER(c_void_p), c_long)


def test_functions_are_those_of_the_source() -> None:
    library = kernels.load()
    numbers = [c_long, c_long, c_long, c_int]
    assert library.product_bfloat16.argtypes == [POINTER(structures.Linear), c_void_p, c_void_p, *numbers]
    assert library.product_bfloat16.restype is None
    assert (library.most_rows_float32.argtypes, library.most_rows_float32.restype) == ([], c_long)


@pytest.mark.parametrize("name", structures.CONSTANTS)
def test_another_constant_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: Mapping[str, int] = {**structures.CONSTANTS, name: 48}
    monkeypatch.setattr(structures, "CONSTANTS", changed)
    with pytest.raises(KernelBuildError, match=f"{name} is [0-9]+ in the library and 48 here"):
        kernels.find()


def test_a_library_that_does_not_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_with_openmp", lambda path: object())
    with pytest.raises(KernelBuildError, match=r"cannot be loaded: .*layout.*; delete .*\.so"):
        kernels.find()


def test_so_is_one_of_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = kernels.find()
    (tmp_path / f"kernels-{found.level}.so").write_bytes(Path(found.library._name).read_bytes())
    kernels.find.cache_clear()
    monkeypatch.setattr(kernels, "BUILT_FOLDER", tmp_path)
    replaced(monkeypatch, "Head", structures.NativeHead._fields_[:-2])
    with pytest.raises(KernelBuildError, match=rf"Head is .*; delete {tmp_path}.*install selfspec again"):
        kernels.find()


def test_a_model_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target falls back to fused blocks, and its warning names the structure."""
    replaced(monkeypatch, "Forward", structures.NativeCall._fields_[:-1])
    with pytest.warns(RuntimeWarning, match=r"falls back to fused blocks: .* Forward is [0-9]+ in the library"):
        assert Target(random_model(), "compiled").at(None).native is None


def test_constants_come_from_the_library() -> None:
    constants = kernels.find().constants
    assert constants["VERIFIED"] == 128
    assert {constants["SILU"], constants["GELU_TANH"]} == {0, 1}
    assert constants["MOST_DIM"] % constants["DIM_STEP"] == 0
