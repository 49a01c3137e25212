"""Models by name: a bundled checkpoint, a local folder, or a hub name."""

import contextlib
import textwrap
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from selfspec.errors import DeviceError, ModelLoadError, OutOfMemoryError, UnsupportedModelError
from selfspec.limits import is_out_of_memory
from selfspec.target.families import find_family
from selfspec.widening import check_factor, check_memory, widen_model

BUNDLED = {"tiny": "tiny", "tiny-early-exit": "tiny_early_exit"}
"""Checkpoints inside the package: name to folder under ``selfspec/models``."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    widen: int = 1,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer.

    Args:
        name: a bundled checkpoint (``tiny``, ``tiny-early-exit``), a local folder, or a name on the hub.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the one the checkpoint was saved in.
        device: as torch names it, or ``auto`` for an accelerator if there is one.
        widen: factor to widen a Llama model by, its text unchanged (see ``selfspec.widening``); 1 leaves it as it is.

    Returns:
        The model in eval mode on the device, and its tokenizer.

    Raises:
        InvalidParameterError: the widening factor is out of range.
        DeviceError: dtype or device are unknown or not there.
        UnsupportedModelError: the family is not supported (found out before any weights are read).
        ModelLoadError: there is no such model, or its files are missing or corrupt.
        OutOfMemoryError: there is no room for the (widened) weights.
    """
    check_factor(widen)
    chosen_dtype, chosen_device = parse_dtype(dtype), parse_device(device)
    source = resolve_name(name)
    with _explain_failure(name):
        _check_family(source)
    if widen > 1:
        with _explain_failure(name):
            config = AutoConfig.from_pretrained(source)
        check_memory(config, widen, _weights_dtype(config, chosen_dtype), chosen_device)
    with _explain_failure(name, "the tokenizer of "):
        tokenizer = AutoTokenizer.from_pretrained(source)
    with _explain_failure(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=chosen_dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model, report = loaded
        _check_weights(report)
        if widen > 1:
            model = widen_model(model, widen, device=chosen_device)
        return model.to(chosen_device).eval(), tokenizer


@contextlib.contextmanager
def _explain_failure(name: str | Path, part: str = "") -> Iterator[None]:
    """Turns whatever transformers, safetensors, torch and the hub client raise into one line."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"out of memory while loading '{name}'; load it in bfloat16") from None
        raise ModelLoadError(f"cannot load {part}'{name}': {_first_line(error)}") from error


def _check_family(source: str) -> None:
    """Refuses a family that is not supported, by its name also where transformers itself does not know it."""
    content, _ = PreTrainedConfig.get_config_dict(source)
    known = content.get("model_type") in (None, *CONFIG_MAPPING)
    config: Any = AutoConfig.from_pretrained(source) if known else SimpleNamespace(**content)
    find_family(config)


def _weights_dtype(config: PreTrainedConfig, dtype: Any) -> torch.dtype:
    """The dtype that the weights will have, where ``auto`` is the one they were saved in."""
    chosen = config.dtype if dtype == "auto" else dtype
    return chosen if isinstance(chosen, torch.dtype) else DTYPES.get(str(chosen), torch.float32)


def _check_weights(report: Mapping[str, Any]) -> None:
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, among them {missing[0]}")
    mismatched = sorted(report.get("mismatched_keys") or ())
    if mismatched:
        weight, found, expected = mismatched[0]
        raise ValueError(f"{weight} is {list(found)} in the weights, but {list(expected)} by config.json")


def resolve_name(name: str | Path) -> str:
    """Where a model's files are: the folder of a bundled checkpoint, or the name itself.

    Raises:
        ModelLoadError: the name looks like a folder, and there is none.
    """
    if str(name) in BUNDLED:
        folder = resources.files("selfspec") / "models" / BUNDLED[str(name)]
        if not folder.is_dir():
            raise ModelLoadError(f"the bundled checkpoint '{name}' is not in this installation; install selfspec anew")
        return str(folder)
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_absolute() or str(name).startswith((".", "~")) or path.exists() or str(name).count("/") != 1:
        raise ModelLoadError(f"there is no model folder '{name}' (bundled checkpoints: {', '.join(BUNDLED)})")
    return str(name)


def parse_dtype(dtype: str | torch.dtype) -> Any:
    """A dtype by its name; ``auto`` stays ``auto``.

    Raises:
        DeviceError: the name is unknown.
    """
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise DeviceError(f"unknown dtype '{dtype}'; choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device) -> torch.device:
    """A device by its name; ``auto`` is an accelerator if there is one, the CPU otherwise.

    Raises:
        DeviceError: the name is unknown, or there is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
        torch.empty(1, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(f"device '{device}' cannot be used: {_first_line(error)}") from error
    if parsed.type == "meta":
        raise DeviceError("device 'meta' holds no numbers; choose cpu or an accelerator")
    return parsed


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(lines) if lines[0].rstrip().endswith(":") else lines[0]
    return textwrap.shorten(text, 240, placeholder=" …")
