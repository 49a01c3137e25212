"""Writes a model's weights as a GGUF file for llama.cpp, with the same values in the same dtype.

Prompts and outputs are token ids, so without a tokenizer the file has ``no_vocab`` and the size of the vocabulary.
Tensors are written one by one; at most one is copied at a time.
"""

import importlib
import json
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

_ROPE_FREQUENCIES = "rope_freqs.weight"


def gguf_bytes(model: PreTrainedModel) -> int:
    """Upper bound of the file's size, in bytes."""
    aligned = 32
    norms = 4 * sum(weight.numel() for weight in model.parameters() if weight.dim() == 1)
    header = 2**20
    return header + norms + sum(weight.nbytes + aligned for weight in model.parameters())


def write_gguf(model: PreTrainedModel, path: Path, tokenizer: Any = None) -> None:
    """Writes a model that has passed ``check_writable``.

    Matrices keep the model's dtype; vectors (norms and biases) are float32, as llama.cpp requires.

    Args:
        model: the model, on any device.
        path: the file.
        tokenizer: a byte-level one whose words are those of Qwen2's, or ``None``.

    Raises:
        SelfSpecError: the package ``gguf`` is not installed.
        InvalidParameterError: there is too little space, or the file cannot be written.
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
            _write(writer, model, tokenizer, gguf)
    except OSError as error:
        raise InvalidParameterError(
            f"the GGUF file cannot be written to '{path}': {error.strerror or error}; make room, or set TMPDIR to a "
            "folder elsewhere"
        ) from error


def _write(writer: Any, model: PreTrainedModel, tokenizer: Any, gguf: Any) -> None:
    """Writes the header, the list of tensors, and the tensors."""
    _add_config(writer, model, gguf)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_tokenizer(writer, tokenizer, gguf.TokenType)
    for name, tensor in _tensors(model):
        kind = TYPES[torch.float32 if tensor.dim() == 1 else tensor.dtype]
        array = np.dtype(np.float32) if kind == "F32" else np.dtype(np.int16)
        nbytes = tensor.numel() * array.itemsize
        writer.add_tensor_info(name, tensor.shape, array, nbytes, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _tensors(model):
        writer.write_tensor_data(_to_array(_permuted(name, tensor, model)))


def import_gguf() -> Any:
    """The package ``gguf``.

    Raises:
        SelfSpecError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise SelfSpecError("writing a GGUF file needs gguf; run: pip install 'selfspec[gguf]'") from error


def _add_config(writer: Any, model: PreTrainedModel, gguf: Any) -> None:
    config: Any = model.config
    rope = config.rope_parameters
    files = gguf.LlamaFileType
    writer.add_name(config.model_type)
    writer.add_file_type({"F32": files.ALL_F32, "BF16": files.MOSTLY_BF16, "F16": files.MOSTLY_F16}[TYPES[model.dtype]])
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


def _add_tokenizer(writer: Any, tokenizer: Any, kinds: Any) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {*tokenizer.all_special_ids}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(True)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


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


def _to_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's numbers, 16-bit floats as the integers of the same bits."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dim() == 1:
        tensor = tensor.float()
    array: npt.NDArray[Any] = (tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)).numpy()
    return array
