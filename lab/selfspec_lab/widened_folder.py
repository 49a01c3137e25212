"""Writes a widened model as a folder that ``load_model`` takes."""

import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import ModelLoadError


def check_output_folder(folder: Path) -> None:
    """Checks that a model can be written to a folder.

    Raises:
        ModelLoadError: the path is a file, a folder that is not empty, or inside of a file.
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
    """Writes a widened model as a folder that ``load_model`` takes. A failure leaves no files behind.

    Args:
        model: from ``widen_model``.
        tokenizer: the source's.
        folder: a new or empty folder.
        source: name of the model that was widened.
        factor: ``k``.

    Raises:
        ModelLoadError: the folder cannot be written to, or the disk is too small.
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
            "choose a smaller factor or dtype, or another folder"
        )


def _note(model: Any, source: str, factor: int) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"# {source}, widened {factor} times\n\n"
        f"Made with `selfspec models widen {source} --factor {factor}`: hidden size, heads, key-value heads and MLP\n"
        f"of `{source}` are repeated {factor} times and its matrices divided by {factor}. The model has\n"
        f"{parameters:,} parameters and writes the same text as `{source}`, up to rounding. It is for timing.\n"
        "Source, data and licence are those of that model.\n"
    )
