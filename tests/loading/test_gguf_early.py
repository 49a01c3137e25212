"""Weights of a GGUF file that are laid out while their model is being made."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make_gguf import fixture_path
from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading import gguf_early, gguf_model, load_model
from selfspec.loading.gguf_early import EarlyLayout
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_header import GgufTensor
from selfspec.runtimes.formats import GGUF_FORMATS
from selfspec.runtimes.packed import PackedWeights

FIRST, SECOND = "token_embd.weight", "blk.0.ffn_down.weight"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("selfspec-layout")]


@contextmanager
def laying_out(room: int | None) -> Iterator[tuple[GgufFile, EarlyLayout]]:
    with GgufFile.open(fixture_path("Q4_K_M")) as file, closing(EarlyLayout(file.tensors, room)) as early:
        yield file, early


def test_early_weights_are_those_that_are_laid_out_late() -> None:
    with laying_out(None) as (file, early):
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
    with laying_out(10_000) as (_, early):
        assert early.take(FIRST) is None


def test_what_is_not_begun_is_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, lay_out = threading.Event(), threading.Event(), gguf_early._lay_out

    def waiting(tensor: GgufTensor) -> PackedWeights:
        begun.set()
        assert go_on.wait(60)
        return lay_out(tensor)

    monkeypatch.setattr(gguf_early, "_lay_out", waiting)
    with laying_out(None) as (_, early):
        assert begun.wait(60)
        first, *others = early._begun
        assert all(early.take(name) is None for name in others)
        assert early.take(first, others[0]) is None
        go_on.set()
        assert early.take(first) is not None


def test_an_error_of_the_model_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    failed, lay_out = threading.Event(), gguf_early._lay_out

    def waiting(tensor: GgufTensor) -> PackedWeights:
        assert failed.wait(60)
        return lay_out(tensor)

    def failing(*_: Any) -> None:
        seen.extend(threads())
        failed.set()
        raise UnsupportedModelError("no such family")

    monkeypatch.setattr(gguf_early, "_lay_out", waiting)
    monkeypatch.setattr(gguf_model, "build_on_meta", failing)
    with pytest.raises(UnsupportedModelError, match="no such family"):
        load_model(fixture_path("Q4_K_M"))
    assert seen
    assert not threads()


def test_an_error_of_the_thread_is_raised_where_the_weights_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GgufTensor, "data", lambda _: (_ for _ in ()).throw(MemoryError("no more")))
    with laying_out(None) as (_, early):
        early._begun[FIRST].exception()
        with pytest.raises(MemoryError, match="no more"):
            early.take(FIRST)


def begin(
    name: str, *, dtype: str = "auto", device: str = "cpu", weights: str | None = None, unpack: bool = False
) -> None:
    gguf_early.begin(name, dtype=dtype, device=device, weights=weights, unpack=unpack)


@pytest.fixture(autouse=True)
def nothing_begun() -> Iterator[None]:
    yield
    gguf_early.forget()


def test_a_model_is_made_of_the_file_that_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(fixture_path("Q4_K_M"))
    plain = load_model(path)[0].state_dict()
    begin(path)
    (begun,) = gguf_early._begun
    laid_out = {name: begun.early._begun[name].result() for name in (FIRST, SECOND)}
    monkeypatch.setattr(GgufFile, "open", lambda _: pytest.fail("it is opened again"))
    found = load_model(path)[0].state_dict()
    assert not gguf_early._begun
    assert not threads()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    addresses = {each.data_ptr() for each in found.values()}
    assert all(each.tiles.data_ptr() in addresses for each in laid_out.values())


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"unpack": True}, {"weights": "int8"}],
    ids=["dtype", "unpack", "weights"],
)
def test_a_file_that_was_begun_otherwise_is_opened_again(options: dict[str, Any]) -> None:
    path = str(fixture_path("Q4_K_M"))
    begin(path)
    found = load_model(path, device="cpu", **options)[0].state_dict()
    assert gguf_early._begun, "what was begun was taken for another model"
    gguf_early.forget()
    expected = load_model(path, device="cpu", **options)[0].state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "options", [{"unpack": True}, {"weights": "int4"}, {"device": "nowhere"}, {"dtype": "float8"}, {"device": "meta"}]
)
def test_nothing_is_begun_that_would_not_be_taken(options: dict[str, Any]) -> None:
    begin(str(fixture_path("Q4_K_M")), **options)
    assert not gguf_early._begun


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"no file of weights at all"])
def test_what_is_wrong_with_a_file_is_said_by_the_load(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    begin(str(path))
    assert not gguf_early._begun
    with pytest.raises(ModelLoadError):
        load_model(path)


def test_a_file_is_begun_before_transformers_is_imported_and_closed_when_the_process_ends() -> None:
    code = (
        "import sys; from selfspec.loading.gguf_early import begin;"
        f"begin({str(fixture_path('Q4_K_M'))!r}, dtype='auto', device='cpu', weights=None, unpack=False);"
        "from selfspec.loading import gguf_early; assert gguf_early._begun; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
