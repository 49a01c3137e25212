"""The same guarantees on a CUDA device. Skipped where there is none."""

import copy

import pytest
import torch

from models import FAMILY_NAMES, build
from selfspec import METHODS, Engine, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = [5, 17, 3, 99, 42, 8]


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_generate(name: str, method: str) -> None:
    model = copy.deepcopy(build(name)).cuda()
    expected = model.generate(torch.tensor([PROMPT], device="cuda"), max_new_tokens=40, do_sample=False)
    result = Engine(model, method=method).generate(PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_the_text_depends_on_the_seed_alone(method: str) -> None:
    model = copy.deepcopy(build("llama")).cuda()
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=40)
    plain = Engine(model).generate(PROMPT, params)
    assert Engine(model, method=method).generate(PROMPT, params).token_ids == plain.token_ids
    assert plain.peak_memory_bytes > 0
