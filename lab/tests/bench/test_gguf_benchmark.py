"""``benchmarks/gguf_files.py``: its figures, its processes on a tiny file, and the sizes of ``model_sizes.py``."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoTokenizer

from selfspec.files import cache_folder
from selfspec.runtimes.kernels import find
from selfspec_lab.bench.llama_cpp import is_installed

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "gguf"

Modules = Callable[[str], ModuleType]


def test_ratios_are_of_the_same_repeat(benchmarks: Modules) -> None:
    found = benchmarks("gguf_sides.figures").figures(
        {"speed": {"plain": [2.0, 6.0, 9.0], "llama.cpp": [1.0, 2.0, 9.0]}}
    )
    assert found["speed"]["plain"]["median"] == 6
    assert found["speed"]["plain"]["to_llama_cpp"] == {"median": 2, "lowest": 1, "highest": 3}
    assert "to_llama_cpp" not in found["speed"]["llama.cpp"]
    assert found["speed"]["llama.cpp"]["to_plain"]["median"] == 0.5


SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 3}


def test_perplexities_are_compared_window_by_window(benchmarks: Modules) -> None:
    windows = {"plain": [20.0, 40.0], "reference": [10.0, 30.0]}
    found = benchmarks("gguf_sides.figures").perplexity(windows, 10, "reference")
    assert found["reference"] == {"perplexity": pytest.approx(math.exp(2))}
    assert found["plain"]["ratio"] == pytest.approx(math.e)
    assert found["plain"]["standard_error"] == pytest.approx(0)


def test_the_likelihood_is_that_of_all_tokens_but_the_first(benchmarks: Modules) -> None:
    logits = torch.zeros(200, 8)
    found = benchmarks("gguf_sides.likelihood").negative_log_likelihood(logits, [3] * 200)
    assert found == pytest.approx(199 * math.log(8))


def test_the_table_has_a_row_for_what_was_measured(benchmarks: Modules) -> None:
    module = benchmarks("gguf_sides.figures")
    names = ["plain", "auto", "llama.cpp"]
    samples = {
        "tokens_per_second": {"plain": [30.0, 40.0, 50.0], "auto": [40.0] * 3, "llama.cpp": [20.0] * 3},
        "edit_tokens_per_second": {"auto": [60.0, 90.0, 80.0], "plain": [40.0] * 3},
        "read_bytes_per_second": {"machine": [4e9] * 3},
        "peak_bytes": {"plain": [2.0**30], "llama.cpp": [2.0**29]},
    }
    result = {"candidates": names, "figures": module.figures(samples), "file": {"step_bytes": 10**8}}
    assert module.table(result).splitlines() == [
        "| | plain | auto | llama.cpp |",
        "| --- | --- | --- | --- |",
        "| chat answers, tokens/s | 40.0 (30.0 to 50.0); **2.00** | 40.0; **2.00** | 20.0 |",
        "| edits and extraction, tokens/s | 40.0 | 80.0 (60.0 to 90.0) |  |",
        "| resident at the peak, MiB | 1,024; **2.00** |  | 512 |",
        "| chat answers, ÷ plain |  | 1.00 (0.80 to 1.33) |  |",
        "| edits and extraction, ÷ plain |  | 2.00 (1.50 to 2.25) |  |",
        "| bytes of a step × tokens/s ÷ read bandwidth | 1.00 | 1.00 | 0.50 |",
        "",
        "Read bandwidth: 4.0 GB/s.",
    ]


def test_options_keep_their_types(benchmarks: Modules) -> None:
    parse = benchmarks("gguf_files").parse_option
    assert parse("weights=int8") == ("weights", "int8")
    assert parse("max_batch=4") == ("max_batch", 4)
    assert parse("unpack=true") == ("unpack", True)


@pytest.mark.parametrize(("name", "read"), [("Q4_1", 1.0), ("Q4_0", 0.9)])
def test_a_step_does_not_read_an_embedding_of_its_own(benchmarks: Modules, name: str, read: float) -> None:
    found = benchmarks("gguf_files").describe_file(FIXTURES / f"{name}.gguf")
    assert set(found["bytes_by_type"]) == {"F32", name}
    assert found["step_bytes"] <= read * sum(found["bytes_by_type"].values())


def test_a_process_answers(benchmarks: Modules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find()
    (tmp_path / "selfspec").mkdir()
    for built in cache_folder().glob("kernels-*.so"):  # to build them again takes half a minute
        (tmp_path / "selfspec" / built.name).symlink_to(built)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file, ids = FIXTURES / "Q8_0.gguf", list(range(5, 25))
    with benchmarks("gguf_sides.process").Process(
        "Selfspec", 1, path=str(file), method="autoregressive", options={"dtype": "float32", "runtime": "fused"}
    ) as side:
        memory = side.ask("memory")
        assert 0 < memory["resident_bytes"] <= memory["peak_bytes"]
        assert len(side.ask("generate", token_ids=ids, max_new_tokens=4, eos_ids=[])["token_ids"]) == 4
        sampled = [side.ask("generate", token_ids=ids, max_new_tokens=9, eos_ids=[], **SAMPLED) for _ in range(2)]
        assert sampled[0]["token_ids"] == sampled[1]["token_ids"]
        assert len(side.ask("rows", token_ids=ids, context=8, row_counts=[1, 2])) == 2
        own = side.ask("likelihood", token_ids=ids)
        with pytest.raises(RuntimeError, match="Selfspec: AttributeError"):
            side.ask("sing")
    dequantised = benchmarks("gguf_sides.worker").make_side("Dequantised", {"path": str(file)})
    assert dequantised.likelihood(ids) == pytest.approx(own, rel=1e-4)


@pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python and gguf")
def test_llama_cpp_answers(benchmarks: Modules) -> None:
    """Alike in a process that imports little and in one that has torch."""
    file, question = str(FIXTURES / "F32.gguf"), {"token_ids": [5, 6, 7], "max_new_tokens": 4, "eos_ids": []}
    with benchmarks("gguf_sides.process").Process("LeanLlamaCpp", 1, path=file, context=64) as side:
        outputs = [side.ask("generate", **question) for _ in range(2)]
    side = benchmarks("gguf_sides.worker").make_side("LlamaCpp", {"path": file})
    outputs.append(side.generate(**question))
    outputs.append(side.generate(**question, **(SAMPLED | {"top_k": 1})))
    others = [side.generate(**question, **SAMPLED)["token_ids"] for _ in range(2)]
    assert others[0] == others[1] != outputs[0]["token_ids"]
    assert outputs[2]["token_ids"] == outputs[3]["token_ids"]
    assert len(outputs[0]["token_ids"]) == 4
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"] == outputs[2]["token_ids"]


@pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python and gguf")
@pytest.mark.parametrize(("side", "options"), [("LlamaCpp", {}), ("Selfspec", {"method": "auto", "options": {}})])
def test_both_write_a_call_of_a_tool(benchmarks: Modules, side: str, options: dict[str, Any]) -> None:
    """However random the model, its text begins with what the schema forces."""
    path, questions = FIXTURES / "F32.gguf", benchmarks("gguf_sides.questions")
    schema = questions.call_schema("look", {"at": {"enum": ["the sky", "the sea"]}})
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    answers = benchmarks("gguf_sides.worker").make_side(side, {"path": str(path), **options})
    output = answers.generate([5, 6, 7], 64, [tokenizer.eos_token_id], json_schema=schema)
    text = "".join(tokenizer.decode(output["token_ids"], skip_special_tokens=True).split())
    assert text.startswith('{"name":"look","arguments":{"at":"the'[: len(text)])
    assert len(text) > 3


def test_a_process_that_cannot_load_says_why(benchmarks: Modules) -> None:
    with pytest.raises(RuntimeError, match="Selfspec: TypeError"):
        benchmarks("gguf_sides.process").Process("Selfspec", 1, path="none.gguf")


@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q5_K_M", "Q6_K"])
def test_sizes_are_those_of_files_that_llama_cpp_wrote(benchmarks: Modules, mixture: str) -> None:
    module = benchmarks("model_sizes")
    tensors = {tensor.name: tensor for tensor in GGUFReader(FIXTURES / f"{mixture}.gguf").tensors}
    layers = sum(name.endswith("attn_q.weight") for name in tensors)
    sizes = module.Sizes("tiny", layers, 256, 4, 1, 64, 256, 100, tied="output.weight" not in tensors)
    assert sizes.matrix_bytes(mixture) == sum(int(each.n_bytes) for each in tensors.values() if len(each.shape) > 1)


def test_the_page_has_the_table_of_the_sizes(benchmarks: Modules) -> None:
    assert benchmarks("model_sizes").table() in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
