"""What is in the committed GGUF files, read by the package ``gguf``: the oracle of our own reader and kernels."""

import functools
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFReader, quants
from transformers import PreTrainedModel

from fixtures.make_gguf import FIXTURES, build_fixture, fixture_path

_ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2}


@functools.cache
def weights(name: str) -> dict[str, torch.Tensor]:
    """The weights of a fixture in float32, by their names in transformers; shared ones once."""
    model, tensors = build_fixture(FIXTURES[name]), {each.name: each for each in GGUFReader(fixture_path(name)).tensors}
    names = gguf.get_tensor_name_map(_ARCHITECTURES[FIXTURES[name].family], FIXTURES[name].layers)
    found = {}
    for parameter, like in model.named_parameters():
        module, _, kind = parameter.rpartition(".")
        tensor: Any = tensors[f"{names.get_name(module)}.{kind}"]
        values = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type), np.float32))
        found[parameter] = _own_order(parameter, values.reshape(like.shape), model.config)
    return found


def kinds(name: str) -> dict[str, str]:
    """The number types of a fixture's tensors, by their names in the file."""
    return {each.name: each.tensor_type.name for each in GGUFReader(fixture_path(name)).tensors}


@functools.cache
def dequantised(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' model with these weights. Shared by all tests: nobody may change it."""
    model = build_fixture(FIXTURES[name])
    model.load_state_dict(weights(name), strict=False)  # a tied head has the embedding's
    model.tie_weights()
    cast: Any = model
    made: PreTrainedModel = cast.to(dtype).eval()
    return made


def _own_order(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of Llama's queries and keys as transformers has them; llama.cpp interleaves the halves of a head."""
    if config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    half, inputs = config.hidden_size // config.num_attention_heads // 2, values.shape[1]
    return values.view(-1, half, 2, inputs).transpose(1, 2).reshape(values.shape).contiguous()
