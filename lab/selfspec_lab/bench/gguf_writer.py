"""Writes a model's weights as a GGUF file for llama.cpp, with the same values in the same dtype or at fewer bits.

Without a tokenizer the file has ``no_vocab`` and the size of the vocabulary; prompts and outputs are token ids then.
Tensors are written one by one; at most one is copied at a time.
"""

import importlib
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec_lab.bench.gguf_names import ARCHITECTURES, TYPES, gguf_name, head_dim
from selfspec_lab.bench.gguf_vocabulary import add_vocabulary

QUANTISED = ("Q8_0", "Q4_0")
BITS = ("BF16", *QUANTISED)
"""Types that matrices of any dtype can be written in."""

_BLOCK = 32
_AT_BOTH_ENDS = ("token_embd.weight", "output.weight")
_ROPE_FREQUENCIES = "rope_freqs.weight"


def gguf_bytes(model: PreTrainedModel) -> int:
    """Upper bound of the file's size, in bytes."""
    aligned = 32
    norms = 4 * sum(weight.numel() for weight in model.parameters() if weight.dim() == 1)
    header = 2**20
    return header + norms + sum(weight.nbytes + aligned for weight in model.parameters())


def write_gguf(model: PreTrainedModel, path: Path, tokenizer: Any = None, bits: str | None = None) -> None:
    """Writes a model that has passed ``check_writable``.

    Vectors (norms and biases) are float32, as llama.cpp requires.

    Args:
        model: the model, on any device.
        path: the file.
        tokenizer: a byte-level one whose rules ``name_splitting`` knows, or ``None``.
        bits: type of the matrices, one of ``BITS``, or the model's dtype if ``None``. With Q4_0 the embedding and the
            head are Q8_0; a matrix whose rows are not of whole blocks of 32 is BF16.

    Raises:
        SelfSpecError: the package ``gguf`` is not installed.
        InvalidParameterError: there is too little space, or the file cannot be written.
        UnsupportedModelError: the tokenizer cannot be written.
    """
    free, needed = shutil.disk_usage(path.parent).free, gguf_bytes(model)
    if free < needed:
        raise InvalidParameterError(
            f"the GGUF file takes {needed / 2**20:.0f} MiB, but only {free / 2**20:.0f} MiB are free in "
            f"'{path.parent}'; make room, or set TMPDIR to a folder elsewhere"
        )
    gguf = import_gguf()
    config: Any = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type].name)
    try:
        with closing(writer):
            _write(writer, model, tokenizer, bits, gguf)
    except OSError as error:
        raise InvalidParameterError(
            f"the GGUF file cannot be written to '{path}': {error.strerror or error}; make room, or set TMPDIR to a "
            "folder elsewhere"
        ) from error


def _write(writer: Any, model: PreTrainedModel, tokenizer: Any, bits: str | None, gguf: Any) -> None:
    """Writes the header, the list of tensors, and the tensors."""
    _add_config(writer, model, bits or TYPES[model.dtype], gguf)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_vocabulary(writer, tokenizer, model.config.vocab_size, gguf.TokenType)
    for name, tensor in _tensors(model):
        kind = gguf.GGMLQuantizationType[_type_of(name, tensor, bits)]
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.int16), tensor.numel() // block * nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _tensors(model):
        kind = _type_of(name, tensor, bits)
        array = _to_array(_permuted(name, tensor, model), kind)
        if kind in QUANTISED:
            array = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
        writer.write_tensor_data(array)


def _type_of(name: str, tensor: torch.Tensor, bits: str | None) -> str:
    """GGUF's name of the type that a tensor is written in."""
    if tensor.dim() == 1:
        return "F32"
    if bits in QUANTISED and tensor.shape[-1] % _BLOCK:
        return "BF16"
    if bits == "Q4_0" and name in _AT_BOTH_ENDS:
        return "Q8_0"
    return bits or TYPES[tensor.dtype]


def import_gguf() -> Any:
    """The package ``gguf``.

    Raises:
        SelfSpecError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise SelfSpecError("writing a GGUF file needs gguf; run: pip install 'selfspec[gguf]'") from error


def _add_config(writer: Any, model: PreTrainedModel, kind: str, gguf: Any) -> None:
    config: Any = model.config
    rope = config.rope_parameters
    writer.add_name(config.model_type)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config.vocab_size)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors with their names in GGUF, in the order of the file."""
    config: Any = model.config
    if config.rope_parameters["rope_type"] == "llama3":
        yield _ROPE_FREQUENCIES, _frequency_factors(config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        yield gguf_name(name), tensor


def _frequency_factors(config: Any) -> torch.Tensor:
    """Divisors of the rope frequencies in llama.cpp, ``[head_dim / 2]``."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = head_dim(config)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return torch.pow(config.rope_parameters["rope_theta"], -exponents) / scaled.float()


def _permuted(name: str, tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """The tensor with rows in llama.cpp's order, which differs for ``q`` and ``k``, ``[heads * head_dim, ...]``."""
    config: Any = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or not ARCHITECTURES[config.model_type].permuted:
        return tensor
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _to_array(tensor: torch.Tensor, kind: str) -> npt.NDArray[Any]:
    """The tensor's numbers, 16-bit floats as the integers of the same bits, what is to be quantised as float32."""
    dtype = next((dtype for dtype, name in TYPES.items() if name == kind), torch.float32)
    tensor = tensor.detach().to("cpu", dtype).contiguous()
    array: npt.NDArray[Any] = (tensor if dtype == torch.float32 else tensor.view(torch.int16)).numpy()
    return array
