"""The bridge to llama-cpp-python: with an engine that behaves like its ``Llama``, without the package."""

import abc
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from selfspec.bridges import llama_cpp as bridge
from selfspec.bridges import versions
from selfspec.bridges.llama_cpp import LlamaSuffixDecoding
from selfspec.errors import EngineVersionWarning, InvalidParameterError, InvalidSettingError, MissingPackageError

VOCAB = 50


class FakeLlama:
    """What ``Llama`` does with a draft model; in place of a model, the last three tokens give the next one.

    ``generate`` is the loop of llama-cpp-python 0.3.36, in which a forward gives the tokens after each of its rows.
    """

    def __init__(self, draft_model: Any = None, n_ctx: int = 512, logits_all: bool = True) -> None:
        self.draft_model, self.n_tokens, self._n_ctx = draft_model, 0, n_ctx
        self.input_ids = np.zeros(n_ctx, dtype=np.intc)
        self.scores = np.zeros((n_ctx if logits_all else 64, 1))
        self.forwards: list[int] = []

    def n_ctx(self) -> int:
        return self._n_ctx

    def n_vocab(self) -> int:
        return VOCAB

    def reset(self) -> None:
        self.n_tokens = 0

    def eval(self, tokens: list[int]) -> None:
        assert all(0 <= token < VOCAB for token in tokens)
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)
        self.forwards.append(len(tokens))

    def _next(self, length: int) -> int:
        last = [int(token) for token in self.input_ids[max(0, length - 3) : length]]
        return (sum(last) + 1) % 3

    def generate(self, prompt: list[int], count: int) -> list[int]:
        self.reset()
        tokens, written, place = list(prompt), list[int](), len(prompt)
        while True:
            self.eval(tokens)
            while place <= self.n_tokens:
                token = self._next(place)
                written.append(token)
                if len(written) == count:
                    return written
                tokens = [token]
                if place < self.n_tokens and token != self.input_ids[place]:
                    self.n_tokens = place
                    place += 1
                    break
                place += 1
            if self.draft_model is not None:
                self.input_ids[self.n_tokens : self.n_tokens + 1] = tokens
                drafted = self.draft_model(self.input_ids[: self.n_tokens + 1])
                assert drafted.dtype == np.intc
                tokens += drafted.astype(int)[: self._n_ctx - self.n_tokens - 1].tolist()


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The names that the bridge imports."""
    module = types.ModuleType("llama_cpp.llama_speculative")
    module.LlamaDraftModel = abc.ABCMeta("LlamaDraftModel", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", module)
    monkeypatch.setattr(versions, "version", lambda _: bridge.TESTED)
    versions._warned.clear()
    yield module
    versions._warned.clear()


def test_the_text_is_the_same_and_most_drafts_are_accepted() -> None:
    llama, plain = FakeLlama(), FakeLlama()
    llama.draft_model = LlamaSuffixDecoding(row_costs={1: 1.0, 32: 1.05})
    for prompt in ([1, 2, 3], [4, 5], [1, 2, 3]):
        assert llama.generate(prompt, 200) == plain.generate(prompt, 200)
    drafts = llama.draft_model.drafts
    assert drafts.drafted > drafts.accepted > 0.5 * drafts.drafted
    assert len(llama.forwards) < 0.6 * len(plain.forwards)


def test_nothing_is_drafted_where_rows_are_dear() -> None:
    llama = FakeLlama()
    llama.draft_model = LlamaSuffixDecoding(row_costs={1: 1.0, 2: 3.0, 32: 96.0})
    llama.generate([1, 2, 3], 200)
    assert llama.draft_model.drafts.drafted == 0
    assert llama.draft_model.drafts.rounds == 199


def test_no_more_tokens_are_drafted_than_asked() -> None:
    model = LlamaSuffixDecoding(3, row_costs={1: 1.0, 32: 1.0})
    llama = FakeLlama(model)
    llama.generate([1, 2, 3], 300)
    assert max(llama.forwards[1:]) == 4


def test_it_is_a_draft_model_of_the_package(package: Any) -> None:
    assert isinstance(LlamaSuffixDecoding(), package.LlamaDraftModel)


def test_costs_are_measured_with_the_model_that_it_drafts_for() -> None:
    model = LlamaSuffixDecoding()
    llama = FakeLlama(model)
    costs = model.measure(llama, row_counts=(1, 2, 8), repeats=2)
    assert list(costs) == [1, 2, 8]
    assert all(seconds > 0 for seconds in costs.values())
    assert llama.forwards == [64, 1, 2, 8, 1, 2, 8]
    assert llama.n_tokens == 0
    shape = model.drafts.costs(8) / model.drafts.costs(1)
    assert shape == pytest.approx(costs[8] / costs[1])
    again = LlamaSuffixDecoding(row_costs=costs)
    assert again.drafts.costs(2) / again.drafts.costs(1) == pytest.approx(costs[2] / costs[1])


@pytest.mark.parametrize(
    ("llama", "message"),
    [(FakeLlama(logits_all=False), "logits_all=True"), (FakeLlama(n_ctx=32), "n_ctx of at least 80")],
)
def test_a_model_that_cannot_be_measured_is_refused(llama: FakeLlama, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        LlamaSuffixDecoding().measure(llama)
    assert llama.forwards == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pred_tokens": 0}, "max_draft_tokens must be at least 1 and at most 32, not 0"),
        ({"num_pred_tokens": 33}, "at most 32, not 33"),
        ({"memory_tokens": -1}, "memory_tokens must be at least 0"),
        ({"delta": 2.0}, "delta must be at least 0 and at most 1"),
        ({"credit": -1.0}, "credit must be at least 0 and at most 1000"),
        ({"length": 3}, "no option length"),
        ({"row_costs": {2: 1.0}}, "1 among them"),
        ({"row_costs": {1: 0.0}}, "costs above 0"),
        ({"row_costs": {1: 1.0, "2": 2.0}}, "must map numbers of rows"),
        ({"row_costs": [1.0]}, "row_costs must map numbers of rows"),
        ({"num_pred_tokens": 4.0}, r"max_draft_tokens must be a whole number, not 4\.0"),
        ({"memory_tokens": 2e4}, r"memory_tokens must be a whole number, not 20000\.0"),
        ({"credit": "4"}, "credit must be a finite number, not '4'"),
        ({"delta": True}, "delta must be a finite number, not True"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        LlamaSuffixDecoding(**options)


def test_another_version_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "0.4.0")
    with pytest.warns(EngineVersionWarning, match=r"llama-cpp-python is 0\.4\.0, and the bridge was tested with 0\.3"):
        LlamaSuffixDecoding()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LlamaSuffixDecoding()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(MissingPackageError, match="pip install llama-cpp-python"):
        LlamaSuffixDecoding()


def test_bridges_do_not_import_torch() -> None:
    program = "import selfspec.bridges.llama_cpp, selfspec.bridges.vllm, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
