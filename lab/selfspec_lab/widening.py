"""Function-preserving widening: the same text from a model of any size, for timing trained behaviour at real traffic.

Hidden size, heads, key-value heads and MLP are repeated ``k`` times. The widened residual stream is the old one ``k``
times over, so its root mean square is the old one, and a matrix ``tile(W, (k, k)) / k`` gives every copy what ``W``
gave: ``k`` equal terms, each divided by ``k``. Attention runs in whole blocks of the old heads, so that each query head
meets the key-value head it met before. In exact arithmetic the logits are the same; computed, they differ by rounding.
"""

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import InvalidParameterError, ModelLoadError, OutOfMemoryError, UnsupportedModelError

LARGEST_FACTOR = 64
_REPEATED_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def check_factor(factor: object) -> int:
    """A widening factor, if it is one.

    Raises:
        InvalidParameterError: it is no whole number from 1 to ``LARGEST_FACTOR``.
    """
    if isinstance(factor, bool) or not isinstance(factor, int) or not 1 <= factor <= LARGEST_FACTOR:
        raise InvalidParameterError(f"the widening factor must be a whole number from 1 to {LARGEST_FACTOR}: {factor}")
    return factor


def widened_config(config: PreTrainedConfig, factor: int) -> Any:
    """The config of a widened model.

    Args:
        config: of a Llama model.
        factor: ``k``, 1 to ``LARGEST_FACTOR``.

    Returns:
        A copy with the sizes ``k`` times as large, the head dimension as it was, and an untied head.

    Raises:
        InvalidParameterError: the factor is out of range.
        UnsupportedModelError: the model is of another architecture.
    """
    check_factor(factor)
    if config.model_type != "llama":
        raise UnsupportedModelError(
            f"only Llama models can be widened, not '{config.model_type}'; take a bundled checkpoint"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("a quantised model cannot be widened; take the checkpoint that it was made of")
    widened: Any = copy.deepcopy(config)
    # Not every config says what the head dimension is, and from the new sizes it would come out the same only by luck.
    widened.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _REPEATED_SIZES:
        setattr(widened, name, factor * getattr(config, name))
    widened.tie_word_embeddings = False
    return widened


def parameter_count(config: PreTrainedConfig) -> int:
    """Parameters of a model with this config, counted without making any of them."""
    model = _empty_model(config)
    return sum(parameter.numel() for parameter in model.parameters())


def check_memory(config: PreTrainedConfig, factor: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a widened model that the device has no room for, before anything is loaded.

    Args:
        config: of the model as it is.
        factor: ``k``.
        dtype: of the widened weights.
        device: where they are to be.

    Raises:
        OutOfMemoryError: more bytes are needed than are free; the message has both.
        UnsupportedModelError: the model cannot be widened.
    """
    needed = parameter_count(widened_config(config, factor)) * dtype.itemsize
    free = free_bytes(device)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"widened by {factor} this model takes {needed:,} bytes in {str(dtype).removeprefix('torch.')}, "
            f"but {free:,} are free on {device}; choose a smaller factor or dtype"
        )


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated, in bytes; ``None`` where nothing tells."""
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
    """A model ``factor`` times as wide that writes the same text.

    Its tensors are made one by one, directly in the dtype and on the device they are to have.

    Args:
        model: a Llama model; it is left as it is.
        factor: ``k``, 1 to 64.
        dtype: of the new weights; the model's own if not given.
        device: where they are to be; where the model is if not given.

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
        # Repeating comes last: the copies are made of numbers that are rounded already.
        repeated = tensor.repeat(*(new // old for new, old in zip(shape, tensor.shape, strict=True)))
        owner = widened.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(repeated, requires_grad=False))
    # Frequencies are no weights: they depend on the head dimension, which stays as it is.
    widened.model.rotary_emb = type(source.model.rotary_emb)(config).to(chosen_device)
    widened.generation_config = copy.deepcopy(source.generation_config)
    result: PreTrainedModel = widened.eval()
    return result


def _empty_model(config: PreTrainedConfig, **options: Any) -> Any:
    """The model of a config, without any numbers in it."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config, **options)


def _named_weights(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by name, the head also where it is tied to the embedding."""
    for name, weight in source.named_parameters():
        if name != "lm_head.weight":
            yield name, weight
    yield "lm_head.weight", source.lm_head.weight


def _widen(name: str, weight: torch.Tensor, factor: int) -> torch.Tensor:
    """What is repeated: matrices that sum over the stream are divided by ``k``; embedding, gains and biases are not."""
    return weight if weight.dim() == 1 or name == "model.embed_tokens.weight" else weight.float() / factor


def check_output_folder(folder: Path) -> None:
    """Refuses a place that a model cannot be written to.

    Raises:
        ModelLoadError: it is a file, a folder with something in it, or below a file.
    """
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ModelLoadError(f"the folder '{folder}' is not empty; name a new or an empty one")
        return
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ModelLoadError(f"'{existing}' is a file; name a new or an empty folder")
    if not os.access(existing, os.W_OK):
        raise ModelLoadError(f"no permission to write in '{existing}'; name another folder")


def save_widened(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, source: str, factor: int
) -> None:
    """Writes a widened model as a folder that ``load_model`` takes: all of it, or nothing.

    Args:
        model: from ``widen_model``.
        tokenizer: the source's.
        folder: where to; new or empty.
        source: name of the model that was widened.
        factor: ``k``.

    Raises:
        ModelLoadError: the folder cannot be written to, or the disk has not the room.
    """
    check_output_folder(folder)
    partial = folder.absolute().with_name(f".{folder.absolute().name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _check_disk(model, partial)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(_note(model, source, factor), encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for file in partial.iterdir():
            file.rename(folder / file.name)
    except OSError as error:
        raise ModelLoadError(f"cannot write '{folder}': {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_disk(model: Any, folder: Path) -> None:
    needed = sum(parameter.nbytes for parameter in model.parameters())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelLoadError(
            f"the widened model takes {needed:,} bytes, but {free:,} are free on the disk; "
            "choose a smaller factor or dtype, or another place"
        )


def _note(model: Any, source: str, factor: int) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"# {source}, widened {factor} times\n\n"
        f"Made with `selfspec models widen {source} --factor {factor}`: hidden size, heads, key-value heads and MLP\n"
        f"of `{source}` are repeated {factor} times and its matrices divided by {factor}, so that the model has\n"
        f"{parameters:,} parameters and writes the same text up to rounding. It knows nothing more than `{source}`;\n"
        "it is for timing. Source, data and licence are those of that model.\n"
    )
