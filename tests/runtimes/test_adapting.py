"""Low-rank products in the kernels: against torch's, and rows of several adapters together and alone, bit for bit."""

import copy
import functools

import pytest
import torch

from helpers.adapters import native
from helpers.kernels import needs_kernels
from helpers.models import prompt
from selfspec.errors import AdapterError
from selfspec.model.low_rank import Adapter
from selfspec.runtimes.adapting import adaptable_layers, fit_adapter
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
RANKS = (3, 8, 40, None)
"""Of the sequences of a forward; the last one has no adapter."""


@functools.cache
def target(dtype: torch.dtype, runtime: str = "compiled", family: str = "llama") -> Target:
    return Target(copy.deepcopy(native(family)).to(dtype), runtime)


def random_adapter(target: Target, rank: int | None, seed: int = 0) -> Adapter | None:
    if rank is None:
        return None
    generator = torch.Generator().manual_seed(seed)

    def factor(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=generator)

    layers = adaptable_layers(target.model, target.sublayers)
    factors = {
        name: (factor(rank, linear.in_features), factor(linear.out_features, rank), 1.5)
        for name, linear in layers.items()
        if rank != 8 or "q_proj" not in name  # one of them leaves some layers out
    }
    return fit_adapter(f"rank {rank}", f"{rank}", factors, target.model, target.sublayers)


@torch.inference_mode()
def run(target: Target, rows: int, adapters: list[Adapter | None]) -> list[torch.Tensor]:
    """The stream after all sublayers, of the rows of a sequence for each of the adapters, in one forward."""
    states = [target.new_sequence(rows, rows, rows, adapter) for adapter in adapters]
    tokens = torch.cat([torch.tensor(prompt(rows, seed=index)) for index in range(len(adapters))])
    forwards = [target.lay_out(state, rows) for state in states]
    forward = forwards[0].join(forwards)
    output = target.run(target.embed(tokens), range(target.sublayer_count), forward).hidden_states
    return list(output.split(rows))


@DTYPES
@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "phi3", "starcoder2"])
@pytest.mark.parametrize("rows", [1, 3, 7, 97])
def test_the_kernels_add_what_torch_adds(dtype: torch.dtype, family: str, rows: int) -> None:
    outputs = {}
    for runtime in ("compiled", "fused"):
        made = target(dtype, runtime, family)
        adapters = [random_adapter(made, rank, index) for index, rank in enumerate(RANKS)]
        outputs[runtime] = torch.stack(run(made, rows, adapters)).float()
    plain = torch.stack(run(target(dtype, "fused", family), rows, [None] * len(RANKS))).float()
    changed = (outputs["fused"] - plain).norm()
    assert (outputs["compiled"] - outputs["fused"]).norm() < (1e-4 if dtype == torch.float32 else 0.1) * changed


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_rows_of_several_adapters_are_what_each_is_alone(dtype: torch.dtype, rows: int) -> None:
    made = target(dtype)
    adapters = [random_adapter(made, rank, index) for index, rank in enumerate((3, 3, None, 8, 40))]
    adapters[1] = adapters[0]  # neighbours with one adapter go together
    together = run(made, rows, adapters)
    for index, adapter in enumerate(adapters):
        alone = run(made, rows, [None] * index + [adapter])[index]
        assert torch.equal(together[index], alone), f"sequence {index}"


def test_another_model_is_refused_with_the_layer() -> None:
    made = target(torch.float32)
    name = "model.layers.1.mlp.down_proj"
    factors = {name: (torch.ones(2, 5), torch.ones(6, 2), 1.0)}
    with pytest.raises(AdapterError, match=rf"of another model: for '{name}', which has 96 inputs and 128 outputs"):
        fit_adapter("a", "", factors, made.model, made.sublayers)
    with pytest.raises(AdapterError, match=r"of another model: there is no 'model.layers.9.mlp.up_proj'"):
        fit_adapter("a", "", {"model.layers.9.mlp.up_proj": factors[name]}, made.model, made.sublayers)


@pytest.mark.parametrize(("family", "layer"), [("llama", "lm_head"), ("mixtral", "model.layers.0.mlp.gate")])
def test_layers_without_low_rank_products_are_refused(family: str, layer: str) -> None:
    made = target(torch.float32, family=family)
    factors = {layer: (torch.ones(1, 128), torch.ones(4, 1), 1.0)}
    with pytest.raises(AdapterError, match=f"changes '{layer}', which has no low-rank products here"):
        fit_adapter("a", "", factors, made.model, made.sublayers)


def test_a_hook_that_came_later_is_noticed() -> None:
    made = Target(native("llama"))
    adapter = random_adapter(made, 4)
    module = native("llama").get_submodule("model.layers.2.mlp.up_proj")
    handle = module.register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(AdapterError, match=r"'rank 4' changes sublayer 5, which runs by transformers' own module"):
            made.new_sequence(1, 4, 4, adapter)
    finally:
        handle.remove()
