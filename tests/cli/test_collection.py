"""The garbage collector while a command starts."""

import atexit
import gc
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from helpers.commands import run
from selfspec.cli import collection


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_it_is_off_until_an_engine_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atexit, "register", lambda function: function)
    collection.pause()
    assert not gc.isenabled()
    assert run("generate", "Once", "--model", "tiny", "--max-new-tokens", "1").exit_code == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_it_is_on_after_an_engine_that_cannot_be_loaded() -> None:
    gc.disable()
    assert run("generate", "Once", "--model", "no/such/folder").exit_code == 2
    assert gc.isenabled()


def test_one_that_is_on_is_left_alone() -> None:
    gc.unfreeze()
    collection.resume()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("loaded", [[], ["triton._C.libtriton"]])
def test_the_end_of_a_process_collects_nothing(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """But where Triton is loaded, whose binding writes a page of warnings about objects that are not collected."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    for name in loaded:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    collection.pause()
    collection.resume()
    (leave,) = registered
    leave()
    assert (gc.get_freeze_count() == 0) == bool(loaded)
