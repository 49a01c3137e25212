"""The least seconds of a forward, from published numbers."""

import pytest
from transformers import LlamaConfig

from selfspec.errors import InvalidParameterError
from selfspec_lab.roofline import DEVICES, MODELS, find_device, find_shape, forward_work, shape_of, step_seconds

PARAMETERS = {  # billions, of the models' cards; input embeddings included
    "Llama-2-7B": 6.74,
    "Llama-2-13B": 13.02,
    "Llama-2-70B": 68.98,
    "CodeLlama-34B": 33.74,
    "Llama-3-8B": 8.03,
    "Llama-3.1-70B": 70.55,
    "Llama-3.1-405B": 405.85,
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.77,
    "Qwen3-32B": 32.76,
}
TIED = ("Llama-3.2-1B", "Llama-3.2-3B", "Qwen3-4B")


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_give_the_published_numbers_of_parameters(name: str) -> None:
    shape = MODELS[name]
    embeddings = shape.head_weights * (1 if name in TIED else 2)
    assert (shape.layers * shape.layer_weights + embeddings) / 1e9 == pytest.approx(PARAMETERS[name], rel=0.004)


def test_a_step_of_one_row_reads_all_weights_and_the_context() -> None:
    shape, device = find_shape("llama-2-7b"), find_device("a100")
    weights = 2 * (shape.layers * shape.layer_weights + shape.head_weights)
    assert step_seconds(shape, device) == pytest.approx(weights / device.bytes_per_second)
    read = weights + 1024 * 2 * shape.slot_numbers
    assert step_seconds(shape, device, context=1024) == pytest.approx(read / device.bytes_per_second)


@pytest.mark.parametrize("name", DEVICES)
def test_few_rows_cost_one_and_many_cost_their_operations(name: str) -> None:
    shape, known = MODELS["Llama-3-8B"], DEVICES[name]
    one = step_seconds(shape, known, context=512)
    assert step_seconds(shape, known, 8, context=512) == pytest.approx(one)
    many = sum(work.operations for work in forward_work(shape, 4096)) / known.operations_per_second
    assert step_seconds(shape, known, 4096) == pytest.approx(many)
    assert step_seconds(shape, known, bits=4) == pytest.approx(4.5 / 16 * step_seconds(shape, known))


def test_a_draft_that_skips_sublayers_reads_the_others() -> None:
    shape, device = MODELS["Llama-2-13B"], DEVICES["H100"]
    skipped = step_seconds(shape, device, attentions=0.5, mlps=0.5)
    head = step_seconds(shape, device, attentions=0, mlps=0)
    assert skipped - head == pytest.approx((step_seconds(shape, device) - head) / 2)
    assert head == pytest.approx(2 * shape.head_weights / device.bytes_per_second)


def test_a_config_gives_the_sizes() -> None:
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008, vocab_size=32000
    )
    assert shape_of(config) == MODELS["Llama-2-7B"]


def test_unknown_names_and_bad_numbers_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="A100 40GB"):
        find_device("abacus")
    with pytest.raises(InvalidParameterError, match="Llama-2-7B"):
        find_shape("llama-7")
    for arguments in ({"bits": 5}, {"rows": 0}, {"context": -1}, {"mlps": 1.5}):
        with pytest.raises(InvalidParameterError, match="a forward needs"):
            step_seconds(MODELS["Llama-2-7B"], DEVICES["A100"], **arguments)  # type: ignore[arg-type]
