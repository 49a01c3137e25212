"""Weights of a GGUF file that are laid out while their model is being made."""

import threading
from typing import Any

import pytest
import torch

from fixtures.make_gguf import fixture_path
from selfspec.errors import UnsupportedModelError
from selfspec.loading import gguf_early, gguf_model, load_model
from selfspec.loading.gguf_early import EarlyLayout
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_header import GgufTensor
from selfspec.runtimes.formats import GGUF_FORMATS
from selfspec.runtimes.packed import PackedWeights

FIRST, SECOND = "token_embd.weight", "blk.0.ffn_down.weight"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("selfspec-layout")]


def test_early_weights_are_those_that_are_laid_out_late() -> None:
    with GgufFile.open(fixture_path("Q4_K_M")) as file, EarlyLayout(file.tensors, None) as early:
        taken = {name: early._begun[name].result() and early.take(name) for name in list(early._begun)}
        assert {FIRST, SECOND} <= taken.keys()
        assert not any(".attn_q" in name or ".attn_k" in name or "norm" in name for name in taken)
        for name, found in taken.items():
            tensor = file.tensors[name]
            data, form = tensor.data().reshape(tensor.shape[0], -1), GGUF_FORMATS[tensor.type]
            assert found is not None
            assert torch.equal(found.tiles, PackedWeights.of_gguf(data, form, found_shape(tensor)).tiles), name
            assert early.take(name) is None


def found_shape(tensor: GgufTensor) -> tuple[int, int]:
    outputs, inputs = tensor.shape
    return outputs, inputs


def test_nothing_is_laid_out_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GgufTensor, "data", lambda _: pytest.fail("a tensor is read"))
    with GgufFile.open(fixture_path("Q4_K_M")) as file, EarlyLayout(file.tensors, 10_000) as early:
        assert early.take(FIRST) is None


def test_what_is_not_begun_is_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, lay_out = threading.Event(), threading.Event(), gguf_early._lay_out

    def waiting(tensor: GgufTensor) -> PackedWeights:
        begun.set()
        assert go_on.wait(60)
        return lay_out(tensor)

    monkeypatch.setattr(gguf_early, "_lay_out", waiting)
    with GgufFile.open(fixture_path("Q4_K_M")) as file, EarlyLayout(file.tensors, None) as early:
        assert begun.wait(60)
        first, *others = early._begun
        assert all(early.take(name) is None for name in others)
        assert early.take(first, others[0]) is None
        go_on.set()
        assert early.take(first) is not None


def test_an_error_of_the_model_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def failing(*_: Any) -> None:
        seen.extend(threads())
        raise UnsupportedModelError("no such family")

    monkeypatch.setattr(gguf_model, "build_on_meta", failing)
    with pytest.raises(UnsupportedModelError, match="no such family"):
        load_model(fixture_path("Q4_K_M"))
    assert seen
    assert not threads()


def test_an_error_of_the_thread_is_raised_where_the_weights_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GgufTensor, "data", lambda _: (_ for _ in ()).throw(MemoryError("no more")))
    with GgufFile.open(fixture_path("Q4_K_M")) as file, EarlyLayout(file.tensors, None) as early:
        early._begun[FIRST].exception()
        with pytest.raises(MemoryError, match="no more"):
            early.take(FIRST)
