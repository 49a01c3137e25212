"""The committed GGUF files that llama.cpp's quantiser wrote: what is in them, and that they load."""

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants

from fixtures.make_gguf import FIXTURES, FOLDER, build_fixture, fixture_path
from helpers.gguf_files import CHAT_TEMPLATE
from selfspec import load_model

LARGEST_ERROR = {
    **{"F32": 1e-6, "F16": 0.001, "BF16": 0.01, "Q8_0": 0.02, "Q6_K": 0.05, "Q5_K": 0.08, "Q5_0": 0.08, "Q5_1": 0.08},
    **{"Q4_K": 0.15, "Q4_0": 0.15, "Q4_1": 0.15, "IQ4_NL": 0.15, "IQ4_XS": 0.15, "Q3_K": 0.25, "Q2_K": 0.45},
}
"""Largest ratio of the size of a matrix's rounding error to that of the matrix, by type.

Not 0 where nothing is rounded: torch draws random weights that differ in the last bit between processors.
"""


def matrices(name: str) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in GGUFReader(fixture_path(name)).tensors if len(tensor.shape) > 1}


def values(tensor: Any) -> torch.Tensor:
    numbers = quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(numbers, np.float32).reshape(tuple(reversed(tensor.shape.tolist()))))


def test_every_file_has_its_line_in_the_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.gguf")} == FIXTURES.keys()


@pytest.mark.parametrize("name", FIXTURES)
def test_the_matrices_have_the_types_and_finite_numbers(name: str) -> None:
    found = matrices(name)
    assert {tensor.tensor_type.name for tensor in found.values()} == set(FIXTURES[name].types)
    assert ("output.weight" in found) != FIXTURES[name].tied
    for tensor in found.values():
        assert torch.isfinite(values(tensor)).all(), tensor.name


@pytest.mark.parametrize("name", FIXTURES)
def test_the_file_loads_with_the_weights_it_was_made_from_but_for_rounding(name: str) -> None:
    fixture = FIXTURES[name]
    model, tokenizer = load_model(fixture_path(name), dtype="float32", unpack=True)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    worst = max(LARGEST_ERROR[kind] for kind in fixture.types)
    loaded = model.state_dict()
    for key, weight in build_fixture(fixture).state_dict().items():
        bound = worst if weight.dim() > 1 else LARGEST_ERROR["F32"]
        assert torch.linalg.norm(loaded[key] - weight) <= bound * torch.linalg.norm(weight), key
