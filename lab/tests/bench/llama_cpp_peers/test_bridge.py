"""The bridge to llama-cpp-python, with the package: in float32 the texts are those of transformers."""

from pathlib import Path
from typing import Any

import pytest

from helpers.models import build, plain_text, prompt
from selfspec.bridges.llama_cpp import LlamaSuffixDecoding
from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.llama_cpp import WeightsFile, import_library, is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python and gguf")

LENGTH = 48


def load(path: Path, **options: Any) -> Any:
    library = import_library()
    cache = library.GGML_TYPE_F32
    return library.Llama(
        str(path), n_ctx=256, n_threads=1, n_threads_batch=1, type_k=cache, type_v=cache, verbose=False, **options
    )


def written(llama: Any, ids: list[int]) -> tuple[int, ...]:
    llama.reset()
    tokens = llama.generate(ids, temp=0.0)
    found = tuple(int(next(tokens)) for _ in range(LENGTH))
    tokens.close()
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_tokens_are_those_of_transformers_and_drafts_are_accepted(name: str) -> None:
    with WeightsFile(build(name), 256) as weights:
        bridge = LlamaSuffixDecoding(row_costs={1: 1.0, 32: 1.1})
        llama = load(weights.path, logits_all=True, draft_model=bridge)
        for ids in (prompt(20) * 3, prompt(9), prompt(20) * 3):
            assert written(llama, ids) == plain_text(name, ids, LENGTH)
        llama.close()
    assert bridge.drafts.drafted >= bridge.drafts.accepted > LENGTH // 2
    assert bridge.drafts.rounds < 3 * LENGTH - LENGTH // 2


def test_costs_are_measured_and_a_model_without_logits_is_refused() -> None:
    with WeightsFile(build("llama"), 256) as weights:
        bridge = LlamaSuffixDecoding()
        llama = load(weights.path, logits_all=True, draft_model=bridge)
        costs = bridge.measure(llama)
        assert list(costs) == [1, 2, 4, 8, 16]
        ids = prompt(20)
        assert written(llama, ids) == plain_text("llama", ids, LENGTH)
        llama.close()
        without = load(weights.path, n_batch=64, draft_model=bridge)
        with pytest.raises(InvalidParameterError, match="logits_all=True"):
            bridge.measure(without)
        with pytest.raises(ValueError, match="broadcast"):  # llama-cpp-python's own, for which the above is the remedy
            written(without, prompt(70))
        without.close()
