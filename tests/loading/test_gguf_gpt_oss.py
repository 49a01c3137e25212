"""A gpt-oss file of llama.cpp's quantiser, experts as MXFP4: its numbers stay, the text is the dequantised model's."""

from typing import Any

import pytest
import torch

from fixtures.make_gguf_mixtures import GPT_OSS, build_gpt_oss
from helpers.gguf_cases import read_model
from helpers.kernels import needs_kernels
from helpers.models import SMALLEST_GAP, prompt
from selfspec import Engine
from selfspec.loading import gguf_model
from selfspec.loading.gguf_file import GgufFile
from selfspec.runtimes.packed import LowBitExperts
from selfspec.runtimes.target import Target

IDS, NEW_TOKENS = prompt(30, seed=2), 24
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("uniform", {"skip_ratio": 0.4}),
    ("token-recycling", {}),
    ("auto", {}),
]


def load(dtype: torch.dtype, *, packed: bool = True) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # the file has no tokenizer
        patch.setattr(gguf_model, "read_tokenizer", lambda _: None)
        return gguf_model.read_gguf(GPT_OSS, dtype, packed=packed)[0]


@torch.inference_mode(mode=False)
def test_the_file_is_that_of_the_model_but_for_rounding() -> None:
    """The packed weights, the unpacked ones, and those that the package ``gguf`` reads are the same."""
    original, independent = build_gpt_oss(), read_model(GgufFile.open(GPT_OSS))
    unpacked = load(torch.float32, packed=False)
    for name, weight in original.named_parameters():
        own = unpacked.get_parameter(name)
        assert torch.equal(own, independent.get_parameter(name)), name
        bound = 0.0 if weight.dim() == 1 or "router" in name or name.endswith("bias") else 0.2
        assert torch.linalg.norm(own - weight) <= bound * torch.linalg.norm(weight), name
    experts = [module for module in load(torch.float32).modules() if isinstance(module, LowBitExperts)]
    assert len(experts) == original.config.num_hidden_layers
    for module, layer in zip(experts, unpacked.model.layers, strict=True):
        assert str(module.gate_up_proj.form) == str(module.down_proj.form) == "MXFP4"
        for kind in ("gate_up_proj", "down_proj"):
            weights = getattr(layer.mlp.experts, kind).transpose(1, 2)
            assert torch.equal(getattr(module, kind).packed.unpack().view(weights.shape), weights)


@needs_kernels
@torch.inference_mode(mode=False)
def test_in_float32_the_text_is_that_of_the_dequantised_model() -> None:
    dequantised = read_model(GgufFile.open(GPT_OSS))
    output = dequantised.generate(
        torch.tensor([IDS]),
        attention_mask=torch.ones(1, len(IDS), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > SMALLEST_GAP, "take another prompt"
    wanted = tuple(output.sequences[0, len(IDS) :].tolist())
    model = load(torch.float32)
    assert Target(model).at(None).path().native
    for method, settings in RUNS:
        found = Engine(model, method=method, settings=settings).generate([IDS, IDS[:9], IDS], max_new_tokens=NEW_TOKENS)
        assert found[0].token_ids == found[2].token_ids == wanted, method
        if method in ("uniform", "token-recycling"):
            assert found[0].drafted > 0, method
            assert found[0].accepted > 0, method
