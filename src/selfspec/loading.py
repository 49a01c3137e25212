"""Models by name: a bundled checkpoint, a local folder, or a hub name."""

from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import DeviceError, ModelLoadError, UnsupportedModelError
from selfspec.target.families import find_family

BUNDLED = {"tiny": "tiny", "tiny-early-exit": "tiny_early_exit"}
"""Checkpoints inside the package: name to folder under ``selfspec/models``."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer.

    Args:
        name: a bundled checkpoint (``tiny``, ``tiny-early-exit``), a local folder, or a name on the hub.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the one the checkpoint was saved in.
        device: as torch names it, or ``auto`` for an accelerator if there is one.

    Returns:
        The model in eval mode on the device, and its tokenizer.

    Raises:
        DeviceError: dtype or device are unknown or not there.
        UnsupportedModelError: the family is not supported (found out before any weights are read).
        ModelLoadError: there is no such model, or its files are missing or corrupt.
    """
    chosen_dtype, chosen_device = parse_dtype(dtype), parse_device(device)
    source = resolve_name(name)
    try:
        find_family(AutoConfig.from_pretrained(source))
        tokenizer = AutoTokenizer.from_pretrained(source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=chosen_dtype, output_loading_info=True)
    except UnsupportedModelError:
        raise
    except Exception as error:  # transformers, safetensors and the hub client raise whatever they like
        raise ModelLoadError(f"cannot load '{name}': {_first_line(error)}") from error
    model, report = loaded
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise ModelLoadError(f"cannot load '{name}': {len(missing)} weights are missing, among them {missing[0]}")
    return model.to(chosen_device).eval(), tokenizer


def resolve_name(name: str | Path) -> str:
    """Where a model's files are: the folder of a bundled checkpoint, or the name itself.

    Raises:
        ModelLoadError: the name looks like a folder, and there is none.
    """
    if str(name) in BUNDLED:
        return str(resources.files("selfspec") / "models" / BUNDLED[str(name)])
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
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
