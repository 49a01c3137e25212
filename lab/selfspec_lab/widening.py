"""Function-preserving widening: a larger model that writes the same text, for timing trained behaviour at real traffic.

Hidden size, heads, key-value heads and MLP are repeated ``k`` times. The widened residual stream is ``k`` copies of the
source's, so its root mean square is unchanged. Each matrix ``W`` becomes ``tile(W, (k, k)) / k``: a copy of the output
is then a sum of ``k`` equal terms, each divided by ``k``. Heads are repeated in whole blocks, so each query head keeps
its key-value head. In exact arithmetic the logits are the same; in floating point they differ by rounding.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from selfspec import loading
from selfspec.errors import InvalidParameterError, OutOfMemoryError, UnsupportedModelError
from selfspec.limits import is_out_of_memory

LARGEST_FACTOR = 64
_REPEATED_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    widen: int = 1,
    unpack: bool = False,
    activations: str = "auto",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model, widened if asked for, and its tokenizer.

    The factor, the architecture and the free memory are checked before any weights are read.

    Args:
        name: what ``selfspec.load_model`` takes.
        dtype: of the weights, as ``selfspec.load_model`` takes it.
        device: where the model runs, as ``selfspec.load_model`` takes it.
        widen: factor to widen a Llama model by; 1 loads it unchanged.
        unpack: as ``selfspec.load_model`` takes it; a model that is widened is always unpacked.
        activations: as ``selfspec.load_model`` takes it; ``int8`` needs a model that is not unpacked.

    Returns:
        The model in eval mode on the device, and its tokenizer.

    Raises:
        InvalidParameterError: the factor is out of range.
        UnsupportedModelError: the model cannot be widened, or its family is not supported.
        OutOfMemoryError: the widened weights do not fit into the free memory.
        SelfSpecError: as ``selfspec.load_model`` raises it.
    """
    if check_factor(widen) == 1:
        return loading.load_model(name, dtype=dtype, device=device, unpack=unpack, activations=activations)
    chosen_dtype, chosen_device = loading.parse_dtype(dtype), loading.parse_device(device)
    config = loading.load_config(name)
    check_memory(config, widen, _weights_dtype(config, chosen_dtype), chosen_device)
    model, tokenizer = loading.load_model(name, dtype=chosen_dtype, device="cpu", unpack=True, activations=activations)
    try:
        return widen_model(model, widen, device=chosen_device), tokenizer
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"out of memory while widening '{name}' by {widen}; choose a smaller factor or dtype"
            ) from None
        raise


def check_factor(factor: object) -> int:
    """Checks a widening factor and returns it.

    Raises:
        InvalidParameterError: the factor is not a whole number from 1 to ``LARGEST_FACTOR``.
    """
    if isinstance(factor, bool) or not isinstance(factor, int) or not 1 <= factor <= LARGEST_FACTOR:
        raise InvalidParameterError(f"the widening factor must be a whole number from 1 to {LARGEST_FACTOR}: {factor}")
    return factor


def widened_config(config: PreTrainedConfig, factor: int) -> Any:
    """Makes the config of a widened model.

    Args:
        config: of a Llama model.
        factor: ``k``, 1 to ``LARGEST_FACTOR``.

    Returns:
        A copy with the sizes multiplied by ``k``, the same head dimension, and an untied head.

    Raises:
        InvalidParameterError: the factor is out of range.
        UnsupportedModelError: the model is of another architecture.
    """
    check_factor(factor)
    if config.model_type != "llama":
        raise UnsupportedModelError(
            f"only Llama models can be widened, not '{config.model_type}'; use the checkpoint tiny"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("a quantised model cannot be widened; use the unquantised checkpoint")
    widened: Any = copy.deepcopy(config)
    # Some configs leave the head dimension out; it must not be computed from the new sizes.
    widened.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _REPEATED_SIZES:
        setattr(widened, name, factor * getattr(config, name))
    widened.tie_word_embeddings = False
    return widened


def check_memory(config: PreTrainedConfig, factor: int, dtype: torch.dtype, device: torch.device) -> None:
    """Checks that a widened model fits into the free memory of a device, before anything is loaded.

    Args:
        config: of the model before widening.
        factor: ``k``.
        dtype: of the widened weights.
        device: where the widened model will run.

    Raises:
        OutOfMemoryError: more bytes are needed than are free; the message names both.
        UnsupportedModelError: the model cannot be widened.
    """
    needed = loading.count_parameters(widened_config(config, factor)) * dtype.itemsize
    free = free_bytes(device)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"widened by {factor} this model takes {needed:,} bytes in {str(dtype).removeprefix('torch.')}, "
            f"but {free:,} are free on {device}; choose a smaller factor or dtype"
        )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; ``None`` where the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if available is None else 1024 * int(available)


@torch.no_grad()
def widen_model(
    model: PreTrainedModel,
    factor: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Makes a model ``factor`` times as wide that writes the same text.

    Its tensors are made one by one, directly in their final dtype and on their final device.

    Args:
        model: a Llama model; it is not changed.
        factor: ``k``, 1 to 64.
        dtype: of the new weights; default: the model's.
        device: of the new weights; default: the model's.

    Returns:
        The widened model, in eval mode.

    Raises:
        InvalidParameterError: the factor is out of range.
        UnsupportedModelError: the model is of another architecture.
    """
    source: Any = model
    config = widened_config(model.config, factor)
    chosen_dtype, chosen_device = dtype or source.dtype, torch.device(device or source.device)
    config.dtype = chosen_dtype
    widened = _empty_model(config, dtype=chosen_dtype)
    for name, weight in _named_weights(source):
        tensor = _widen(name, weight.to(chosen_device), factor).to(chosen_dtype)
        shape = widened.get_parameter(name).shape
        # Repeating comes last, so all copies hold the same rounded numbers.
        repeated = tensor.repeat(*(new // old for new, old in zip(shape, tensor.shape, strict=True)))
        owner = widened.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(repeated, requires_grad=False))
    # Rope frequencies are not parameters. They depend on the head dimension, which does not change.
    widened.model.rotary_emb = type(source.model.rotary_emb)(config).to(chosen_device)
    widened.generation_config = copy.deepcopy(source.generation_config)
    result: PreTrainedModel = widened.eval()
    return result


def _weights_dtype(config: PreTrainedConfig, dtype: Any) -> torch.dtype:
    """The dtype of the loaded weights; ``auto`` is the dtype that the checkpoint was saved in."""
    chosen = config.dtype if dtype == "auto" else dtype
    return chosen if isinstance(chosen, torch.dtype) else loading.DTYPES.get(str(chosen), torch.float32)


def _empty_model(config: PreTrainedConfig, **options: Any) -> Any:
    """Makes the model of a config on the meta device."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config, **options)


def _named_weights(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by name, including a head that is tied to the embedding."""
    for name, weight in source.named_parameters():
        if name != "lm_head.weight":
            yield name, weight
    yield "lm_head.weight", source.lm_head.weight


def _widen(name: str, weight: torch.Tensor, factor: int) -> torch.Tensor:
    """Divides matrices that sum over the residual stream by ``k``; embedding, gains and biases stay unchanged."""
    return weight if weight.dim() == 1 or name == "model.embed_tokens.weight" else weight.float() / factor
