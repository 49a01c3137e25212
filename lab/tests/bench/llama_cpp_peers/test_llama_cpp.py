"""llama.cpp as a peer: it writes what transformers writes, and what is done where it is not there."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.models import build, plain_text, prompt
from selfspec.errors import ContextLengthError, SelfSpecError
from selfspec_lab.bench.gguf_writer import write_gguf
from selfspec_lab.bench.llama_cpp import (
    LlamaCpp,
    LlamaCppLookup,
    WeightsFile,
    describe_build,
    import_library,
    is_installed,
    library,
    obstacle,
)
from selfspec_lab.bench.llama_cpp.library import missing_features
from selfspec_lab.bench.run.options import RunOptions
from selfspec_lab.bench.run.peers import LLAMA_CPP_PEERS, Peers

LENGTH = 24
INFORMATION = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | FMA = 0 | OPENMP = 1 | REPACK = 1 | "

installed = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python and gguf")


# With the package


@installed
@pytest.mark.parametrize(
    "name", ["llama", "llama-tied-biases", "llama-multi-query", "llama-llama3-rope", "mistral", "qwen2", "qwen3"]
)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    with WeightsFile(build(name), 128) as weights, LlamaCpp(weights) as llama:
        for length in (1, 20, 70):  # the second and third start anew, with an empty cache
            output = llama.generate(prompt(length), LENGTH)
            assert output.token_ids == plain_text(name, prompt(length), LENGTH)
            assert output.prefill_seconds > 0
            assert output.seconds > 0


@installed
def test_lookup_tokens_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    speculative: Any = pytest.importorskip("llama_cpp.llama_speculative")
    find, drafted = speculative.LlamaPromptLookupDecoding.__call__, []

    def noted(*arguments: Any, **options: Any) -> Any:
        draft = find(*arguments, **options)
        drafted.extend(draft.tolist())
        return draft

    monkeypatch.setattr(speculative.LlamaPromptLookupDecoding, "__call__", noted)
    with WeightsFile(build("llama"), 128) as weights:
        llama = LlamaCppLookup(weights)
        for ids in (prompt(20) * 3, prompt(9)):
            output = llama.generate(ids, LENGTH)
            assert output.token_ids == plain_text("llama", ids, LENGTH)
            assert output.prefill_seconds > 0
            assert output.seconds > 0
        llama.close()
    assert len(drafted) > 0


@installed
@pytest.mark.parametrize("kind", [LlamaCpp, LlamaCppLookup])
def test_an_output_ends_at_an_end_of_sequence(kind: Any) -> None:
    expected = plain_text("llama", prompt(20), LENGTH)
    end = expected[5]
    with WeightsFile(build("llama"), 128) as weights:
        llama = kind(weights)
        assert llama.generate(prompt(20), LENGTH, {end}).token_ids == expected[: expected.index(end) + 1]
        assert llama.generate(prompt(20), 1).token_ids == expected[:1]
        llama.close()


@installed
def test_logits_are_those_of_transformers() -> None:
    model, ids = build("llama"), prompt(40)
    with WeightsFile(model, 128) as weights, LlamaCpp(weights) as llama, torch.inference_mode():
        llama.generate(ids, 3)  # what is in the cache before does not count
        assert torch.allclose(llama.logits(ids), model(torch.tensor([ids])).logits[0], atol=0.05)


@installed
def test_rows_are_decoded_at_one_context() -> None:
    with WeightsFile(build("llama"), 64) as weights, LlamaCpp(weights) as llama:
        seconds = llama.rows_seconds(prompt(5), 40)
        assert seconds.keys() == {1, 2, 4, 8, 16}
        assert all(value > 0 for value in seconds.values())
        assert llama.generate(prompt(20), LENGTH).token_ids == plain_text("llama", prompt(20), LENGTH)


@installed
@pytest.mark.parametrize("kind", [LlamaCpp, LlamaCppLookup])
def test_more_than_the_context_is_an_error_and_not_the_end_of_the_process(kind: Any) -> None:
    with WeightsFile(build("llama"), 44) as weights:
        llama = kind(weights)
        with pytest.raises(ContextLengthError, match=r"45 tokens do not fit llama\.cpp's context of 44"):
            llama.generate(prompt(21), LENGTH)
        assert llama.generate(prompt(20), LENGTH).token_ids == plain_text("llama", prompt(20), LENGTH)
        llama.close()


@installed
def test_it_takes_as_many_threads_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    made: list[Any] = []
    own = import_library()
    make = own.llama_init_from_model

    def noted(model: Any, params: Any) -> Any:
        made.append((params.n_threads, params.n_threads_batch))
        return make(model, params)

    monkeypatch.setattr(own, "llama_init_from_model", noted)
    with WeightsFile(build("llama"), 64) as weights, LlamaCpp(weights):
        assert made == [(1, 1)]


@installed
def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with WeightsFile(build("llama"), 64) as weights, LlamaCpp(weights) as llama:
        llama.generate(prompt(5), 4)
        LlamaCppLookup(weights).close()
    assert capfd.readouterr() == ("", "")


@installed
def test_the_build_is_described() -> None:
    build_of_it = describe_build()
    assert build_of_it["version"]
    assert "=" in build_of_it["system_info"]
    assert isinstance(build_of_it["missing"], list)


@installed
def test_a_file_that_is_broken_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF and nothing else")
    weights: Any = SimpleNamespace(path=tmp_path / "model.gguf", context=64, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="cannot load the GGUF file"):
        LlamaCpp(weights)
    with pytest.raises(ValueError, match=r"model\.gguf"):
        LlamaCppLookup(weights)


# Without it


def test_features_that_the_build_lacks() -> None:
    flags = {"avx", "avx2", "fma", "f16c", "avx512f", "sse3", "ht"}
    assert missing_features(INFORMATION, flags) == ["F16C", "FMA", "AVX512"]
    assert missing_features(INFORMATION, {"avx", "avx2"}) == []
    assert missing_features(INFORMATION, set()) == []


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(SelfSpecError, match=r"pip install './lab\[peers\]'"):
        import_library()


def test_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: True)
    assert obstacle("cpu", 0.0) is None
    assert "use --device cpu" in str(obstacle("cuda"))
    assert "use --temperature 0" in str(obstacle("cpu", 0.7))
    monkeypatch.setattr(library, "is_installed", lambda: False)
    assert "pip install './lab[peers]'" in str(obstacle())


def test_peers_that_cannot_be_made_say_why_and_leave_the_others() -> None:
    pytest.importorskip("gguf")
    names = ["transformers", *LLAMA_CPP_PEERS]
    with Peers(names, build("gemma2"), 64) as peers:
        assert peers.names == ["transformers"]
        assert peers.build is None
        assert set(peers.failures) == set(LLAMA_CPP_PEERS)
        assert all("not for gemma2" in why for why in peers.failures.values())
        output = peers.write("transformers", prompt(9), 4, eos_ids=(), temperature=0.0)
        assert len(output.token_ids) == 4


@installed
def test_a_model_in_the_numbers_of_its_file_is_measured_beside_llama_cpp_on_that_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(build("qwen2"), path)
    options = RunOptions(str(path), peers=("llama-cpp",))
    assert options.file == path
    assert replace(options, unpack=True).file is None
    assert replace(options, peers=("none",)).file is None
    assert replace(options, model="tiny").file is None
    with Peers(["llama-cpp"], build("llama"), 64, options.file) as peers:  # whose weights it has no use for
        output = peers.write("llama-cpp", prompt(20), LENGTH, eos_ids=(), temperature=0.0)
    assert output.token_ids == plain_text("qwen2", prompt(20), LENGTH)
    assert path.is_file()


def test_one_peer_that_fails_leaves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    closed: list[str] = []

    class Fake:
        def __init__(self, weights: WeightsFile) -> None:
            assert weights.path.is_file()
            assert weights.context >= 64

        def generate(self, prompt_ids: Any, max_new_tokens: int, eos_ids: Any) -> str:
            return f"{len(prompt_ids)} {max_new_tokens} {eos_ids}"

        def close(self) -> None:
            closed.append("fake")

    def broken(_: WeightsFile) -> Any:
        raise OSError("library is broken")

    monkeypatch.setitem(LLAMA_CPP_PEERS, "llama-cpp", Fake)
    monkeypatch.setitem(LLAMA_CPP_PEERS, "llama-cpp-prompt-lookup", broken)
    monkeypatch.setattr("selfspec_lab.bench.run.peers.describe_build", lambda: {"version": "1"})
    with Peers(list(LLAMA_CPP_PEERS), build("llama"), 64) as peers:
        assert peers.build == {"version": "1"}
        assert peers.names == ["llama-cpp"]
        assert peers.failures == {"llama-cpp-prompt-lookup": "OSError: library is broken"}
        assert peers.write("llama-cpp", [1, 2], 7, eos_ids={3}, temperature=0.0) == "2 7 {3}"
    assert closed == ["fake"]
