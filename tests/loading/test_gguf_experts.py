"""Mixtures of experts in GGUF files keep the file's own numbers; the text is that of the dequantised model."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from helpers.gguf_families import save_family
from helpers.kernels import needs_kernels
from helpers.models import SMALLEST_GAP, VARIANTS, make
from selfspec import Engine
from selfspec.loading import gguf_model
from selfspec.runtimes.packed import LowBitExperts
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

CASES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3-moe": {"mlp_only_layers": [], "head_dim": 32},
    "qwen2-moe": {"use_sliding_window": False, "layer_types": None, "shared_expert_intermediate_size": 96},
    "olmoe": {},
    "granite-moe": {},
    "gpt-oss": {"head_dim": 32},
}
EXPERTS = pytest.mark.parametrize("name", CASES)
EXPERTS_AND_TYPES = pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in CASES for kind in ("Q4_0", "Q8_0")),
        *(("qwen3-moe", "Q4_K"), ("qwen2-moe", "Q6_K"), ("gpt-oss", "MXFP4"), ("qwen3-moe", "MXFP4")),
    ],
)
PROMPT, NEW_TOKENS = [3, 9, 14, 3, 9, 14, 3, 9], 24


@functools.cache
@torch.inference_mode(mode=False)
def built(name: str, width: int = 64) -> Any:
    """A model whose heads have 32 entries, as kernels need, and experts of 64; or all sizes are the width's."""
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64}
    config = VARIANTS[name](**{**heads, **CASES[name], "hidden_size": width})
    for size in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if hasattr(config, size) and (width > 64 or not size.startswith("shared")):
            setattr(config, size, width)
    return make(config, name)


def load(name: str, kind: str, folder: Path, dtype: torch.dtype, *, packed: bool) -> Any:
    """With blocks of 256 inputs where the type needs them."""
    model = built(name, 256 if kind.endswith("_K") else 64)
    path = save_family(model, folder / "model.gguf", quantised=GGMLQuantizationType[kind])
    with pytest.MonkeyPatch.context() as patch:  # the file has no tokenizer
        patch.setattr(gguf_model, "read_tokenizer", lambda _: None)
        model, _ = gguf_model.read_gguf(path, dtype, packed=packed)
    return model


def by_transformers(model: Any) -> tuple[int, ...]:
    output = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > SMALLEST_GAP, "take another prompt"
    return tuple(output.sequences[0, len(PROMPT) :].tolist())


@EXPERTS_AND_TYPES
def test_in_float32_the_text_is_that_of_the_dequantised_model(name: str, kind: str, tmp_path: Path) -> None:
    plain = load(name, kind, tmp_path, torch.float32, packed=False)
    model = load(name, kind, tmp_path, torch.float32, packed=True)
    assert any(isinstance(module, LowBitExperts) for module in model.modules())
    target = Target(model)
    assert target.independent_rows
    wanted = by_transformers(plain)
    assert by_transformers(model) == wanted
    for method, settings in {"autoregressive": {}, "uniform": {"skip_ratio": 0.4}, "suffix": {}, "auto": {}}.items():
        engine = Engine(model, method=method, settings=settings)
        found = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS)
        assert found.token_ids == wanted, method
        if method == "uniform":
            assert found.drafted > 0
            assert found.accepted > 0
    together = Engine(model).generate([PROMPT, [5, 6], PROMPT], max_new_tokens=NEW_TOKENS)
    assert together[0].token_ids == together[2].token_ids == wanted


@EXPERTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_experts_have_the_numbers_of_the_file_and_rows_are_independent(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = load(name, "Q4_0", tmp_path, dtype, packed=False)
    model = load(name, "Q4_0", tmp_path, dtype, packed=True)
    wanted = dict(plain.named_parameters())
    experts = {path: module for path, module in model.named_modules() if isinstance(module, LowBitExperts)}
    assert len(experts) == model.config.num_hidden_layers
    for path, module in experts.items():
        for kind in ("gate_up_proj", "down_proj"):
            values, parameter = getattr(module, kind).packed.unpack().to(dtype), wanted[f"{path}.{kind}"]
            by_outputs = parameter.transpose(1, 2) if name == "gpt-oss" else parameter
            assert torch.equal(values.view(by_outputs.shape), by_outputs)
    target, ids = Target(model), torch.arange(3, 43)

    def run(*chunks: int) -> torch.Tensor:
        state, states = target.new_sequence(len(ids), len(ids), len(ids)), []
        for part in ids.split(list(chunks)):
            forward = target.lay_out(state, len(part))
            states.append(target.run(target.embed(part), range(target.sublayer_count), forward).hidden_states)
            state.cache.commit(range(len(part)))
        return torch.cat(states)

    alone = run(*[1] * len(ids))
    for chunks in ([len(ids)], [8] * 5, [1, 2, 3, 4, 5, 6, 7, 12]):
        assert torch.equal(run(*chunks), alone)
