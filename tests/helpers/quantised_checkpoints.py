"""Tiny checkpoints as GPTQ, AWQ, compressed-tensors and bitsandbytes write them, and a slow reader of each.

Bits are packed here through Python's whole numbers, one after the other; the readers shift and mask words in torch.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from helpers.checkpoints import make_tokenizer

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Kind:
    """How a checkpoint is quantised.

    Attributes:
        method: its ``quant_method``, and what a 4-bit one of bitsandbytes is.
        bits: of a code.
        group: inputs that share a scale; all of a row where it is 0.
        symmetric: the zero point is in the middle.
        shuffled: the inputs of a group are spread over the row.
        settings: more of the config.
    """

    method: str
    bits: int = 4
    group: int = 128
    symmetric: bool = False
    shuffled: bool = False
    dtype: torch.dtype = torch.float16
    settings: Mapping[str, Any] = field(default_factory=dict)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as rows of int32 words, the first code in the lowest bits; a code can go on in the next word."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        words = -(-len(row) * bits // 32)
        rows.append([(number >> (32 * word) & 0xFFFFFFFF) for word in range(words)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


@dataclass(frozen=True, eq=False)
class Rounded:
    """The integers that a weight is rounded to: ``codes`` ``[outputs, inputs]``, the others ``[outputs, groups]``."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor


def round_weight(weight: torch.Tensor, kind: Kind, seed: int) -> Rounded:
    outputs, inputs = weight.shape
    group = kind.group or inputs
    places = torch.arange(inputs)
    if kind.shuffled:
        places = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
    groups = torch.empty(inputs, dtype=torch.long)
    groups[places] = torch.arange(inputs) // group
    ordered, most = weight[:, places].reshape(outputs, -1, group), (1 << kind.bits) - 1
    low, high = ordered.amin(-1).clamp(max=0), ordered.amax(-1).clamp(min=0)
    if kind.symmetric:
        scales = (2 * ordered.abs().amax(-1) / most).to(kind.dtype)
        zeros = torch.full_like(scales, (most + 1) // 2, dtype=torch.long)
    else:
        scales = ((high - low) / most).to(kind.dtype)
        zeros = (-low / scales.float()).round().long().clamp(1, most)
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most).long()
    return Rounded(codes, scales, zeros, groups)


def write_gptq(weight: torch.Tensor, kind: Kind, name: str, seed: int) -> Tensors:
    made = round_weight(weight, kind, seed)
    stored = made.zeros - int(kind.settings.get("checkpoint_format") != "gptq_v2")
    return {
        f"{name}.qweight": pack_bits(made.codes, kind.bits).T.contiguous(),
        f"{name}.qzeros": pack_bits(stored.T, kind.bits),
        f"{name}.scales": made.scales.T.contiguous(),
        f"{name}.g_idx": made.groups.to(torch.int32),
    }


def read_gptq(tensors: Tensors, kind: Kind, name: str) -> torch.Tensor:
    words, zeros = tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"]
    index, scales = tensors[f"{name}.g_idx"].long(), tensors[f"{name}.scales"].float()
    codes = _unpack_slowly(words.T, kind.bits).T
    found = _unpack_slowly(zeros, kind.bits) + int(kind.settings.get("checkpoint_format") != "gptq_v2")
    return ((codes - found[index]).float() * scales[index]).T.contiguous()


def write_awq(weight: torch.Tensor, kind: Kind, name: str, seed: int) -> Tensors:
    made = round_weight(weight, kind, seed)

    def pack(by_output: torch.Tensor) -> torch.Tensor:
        rows, outputs = by_output.shape
        return pack_bits(by_output.reshape(rows, outputs // 8, 8)[:, :, AWQ_ORDER].reshape(rows, outputs), 4)

    return {
        f"{name}.qweight": pack(made.codes.T),
        f"{name}.qzeros": pack(made.zeros.T),
        f"{name}.scales": made.scales.T.contiguous(),
    }


def read_awq(tensors: Tensors, kind: Kind, name: str) -> torch.Tensor:
    def unpack(words: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(words), words.shape[1] * 8, dtype=torch.long)
        for place, output in enumerate(AWQ_ORDER):
            found[:, output::8] = words.long() >> 4 * place & 15
        return found

    scales = tensors[f"{name}.scales"].float()
    each = len(tensors[f"{name}.qweight"]) // len(scales)
    zeros = unpack(tensors[f"{name}.qzeros"]).repeat_interleave(each, 0)
    codes = unpack(tensors[f"{name}.qweight"])
    return ((codes - zeros).float() * scales.repeat_interleave(each, 0)).T.contiguous()


def write_compressed(weight: torch.Tensor, kind: Kind, name: str, seed: int) -> Tensors:
    made, half = round_weight(weight, kind, seed), 1 << (kind.bits - 1)
    tensors = {f"{name}.weight_scale": made.scales}
    if kind.settings["format"] == "pack-quantized":
        tensors[f"{name}.weight_packed"] = pack_bits(made.codes, kind.bits)
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        if not kind.symmetric:
            tensors[f"{name}.weight_zero_point"] = pack_bits(made.zeros.T, kind.bits).T.contiguous()
    else:
        tensors[f"{name}.weight"] = (made.codes - half).to(torch.int8)
        if not kind.symmetric:
            tensors[f"{name}.weight_zero_point"] = (made.zeros - half).to(torch.int8)
    if kind.shuffled:
        tensors[f"{name}.weight_g_idx"] = made.groups.to(torch.int32)
    return tensors


def read_compressed(tensors: Tensors, kind: Kind, name: str) -> torch.Tensor:
    scales, half = tensors[f"{name}.weight_scale"].float(), 1 << (kind.bits - 1)
    packed, zeros = tensors.get(f"{name}.weight_packed"), tensors.get(f"{name}.weight_zero_point")
    if packed is None:
        codes = tensors[f"{name}.weight"].long()
        distances = torch.zeros(len(codes), scales.shape[1]).long() if zeros is None else zeros.long()
    else:
        codes = _unpack_slowly(packed, kind.bits) - half
        distances = torch.zeros_like(scales).long() if zeros is None else _unpack_slowly(zeros.T, kind.bits).T - half
    each = codes.shape[1] // scales.shape[1]
    index = tensors.get(f"{name}.weight_g_idx", torch.arange(codes.shape[1]) // each).long()
    return (codes - distances[:, index]).float() * scales[:, index]


def write_bitsandbytes(weight: torch.Tensor, kind: Kind, name: str, seed: int) -> Tensors:
    if kind.bits == 8:
        largest = weight.abs().amax(1)
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        return {
            f"{name}.weight": codes,
            f"{name}.SCB": largest.float(),
            f"{name}.weight_format": torch.zeros((), dtype=torch.uint8),
        }
    table = torch.tensor(NF4)
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    codes = (blocks[..., None] / largest[:, None, None] - table).abs().argmin(-1).view(-1)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    key = f"{name}.weight"
    tensors = {key: (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], f"{key}.quant_map": table}
    if kind.settings.get("bnb_4bit_use_double_quant"):
        nested = torch.linspace(-1, 1, 256)
        added = float(largest.mean())
        outer = torch.stack([each.abs().amax() for each in (largest - added).split(256)])
        own = (largest - added) / outer.repeat_interleave(256)[: len(largest)]
        tensors[f"{key}.absmax"] = (own[:, None] - nested).abs().argmin(-1).to(torch.uint8)
        tensors |= {f"{key}.nested_absmax": outer, f"{key}.nested_quant_map": nested}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": added}
    else:
        tensors[f"{key}.absmax"] = largest.float()
    text = json.dumps(state).encode()
    return tensors | {f"{key}.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8)}


def read_bitsandbytes(tensors: Tensors, kind: Kind, name: str) -> torch.Tensor:
    key = f"{name}.weight"
    if kind.bits == 8:
        return tensors[key].float() * (tensors[f"{name}.SCB"] / 127)[:, None]
    state = json.loads(bytes(tensors[f"{key}.quant_state.bitsandbytes__nf4"].tolist()))
    scales = tensors[f"{key}.absmax"]
    if f"{key}.nested_absmax" in tensors:
        outer = tensors[f"{key}.nested_absmax"]
        own = [tensors[f"{key}.nested_quant_map"][int(code)] * outer[i // 256] for i, code in enumerate(scales)]
        scales = torch.stack(own) + torch.tensor(state["nested_offset"])
    codes = torch.stack([tensors[key].long() >> 4, tensors[key].long() & 15], -1).view(-1)
    return (tensors[f"{key}.quant_map"][codes] * scales.repeat_interleave(64)).view(state["shape"])


def _unpack_slowly(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The whole numbers that rows of words are, taken apart."""
    rows = []
    for row in words.tolist():
        number = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(row))
        rows.append([number >> (bits * place) & ((1 << bits) - 1) for place in range(len(row) * 32 // bits)])
    return torch.tensor(rows)


Writer = Callable[[torch.Tensor, Kind, str, int], Tensors]
Reader = Callable[[Tensors, Kind, str], torch.Tensor]
METHODS: dict[str, tuple[Writer, Reader]] = {
    "gptq": (write_gptq, read_gptq),
    "awq": (write_awq, read_awq),
    "compressed-tensors": (write_compressed, read_compressed),
    "bitsandbytes": (write_bitsandbytes, read_bitsandbytes),
}


def config_of(kind: Kind) -> dict[str, Any]:
    """What the method writes as ``quantization_config``."""
    made: dict[str, Any] = {"quant_method": kind.method, **kind.settings}
    if kind.method == "gptq":
        made |= {"bits": kind.bits, "group_size": kind.group or -1, "desc_act": kind.shuffled, "sym": kind.symmetric}
    if kind.method == "awq":
        made |= {"bits": 4, "group_size": kind.group, "zero_point": True, "version": "gemm"}
    if kind.method == "compressed-tensors":
        weights = {"num_bits": kind.bits, "type": "int", "symmetric": kind.symmetric, "group_size": kind.group or None}
        weights |= {"strategy": "group" if kind.group else "channel"}
        made["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return made


def fits(kind: Kind, layer: nn.Linear) -> bool:
    """Whether a layer has whole groups of inputs and whole words of outputs; writers leave others as they are."""
    return layer.in_features % (kind.group or 1) == 0 and layer.out_features % 8 == 0


def random_llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def save_quantised(
    folder: Path,
    kind: Kind,
    *,
    model: PreTrainedModel | None = None,
    shards: int = 1,
    change: Callable[[Tensors], None] | None = None,
) -> Path:
    """Writes a checkpoint whose linear layers but the head, and those that do not fit, are quantised.

    Args:
        folder: where to.
        kind: how.
        model: whose weights; those of ``random_llama`` if not given.
        shards: files.
        change: what is done to the tensors at last.
    """
    model = model or random_llama()
    head = model.get_output_embeddings()
    linear = {name: each for name, each in model.named_modules() if type(each) is nn.Linear and each is not head}
    layers = [name for name, each in linear.items() if fits(kind, each)]
    tensors = {name: each.detach().to(kind.dtype) for name, each in model.named_parameters()}
    write, _ = METHODS[kind.method]
    of_input = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # have an order together
    for name in layers:
        weight = tensors.pop(f"{name}.weight").float()
        last = name.rpartition(".")[2]
        tensors |= write(weight, kind, name, layers.index(name.replace(last, of_input.get(last, last))))
    if change is not None:
        change(tensors)
    model.config.dtype = kind.dtype
    model.config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": config_of(kind)}))
    make_tokenizer(int(model.config.vocab_size)).save_pretrained(folder)
    _save_tensors(folder, tensors, shards)
    return folder


def _save_tensors(folder: Path, tensors: Tensors, shards: int) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        own = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def dequantised(folder: Path, kind: Kind) -> PreTrainedModel:
    """transformers' model of the float32 weights that the slow readers find in a checkpoint."""
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    config: Any = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config.dtype = torch.float32
    make: Any = AutoModelForCausalLM
    model: PreTrainedModel = make.from_config(config)
    _, read = METHODS[kind.method]
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        dense = name in tensors and tensors[name].is_floating_point()
        parameter.data = tensors[name].float() if dense else read(tensors, kind, layer)
    return model.float().eval()
