"""Writes a widened model as a folder that ``load_model`` takes."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec_lab.output_folder import check_disk, check_output_folder, written_whole


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
    with written_whole(folder) as partial:
        needed = sum(parameter.nbytes for parameter in model.parameters())
        check_disk(needed, partial, "choose a smaller factor or dtype, or another folder")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(_note(model, source, factor), encoding="utf-8")


def _note(model: Any, source: str, factor: int) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"# {source}, widened {factor} times\n\n"
        f"Made with `selfspec models widen {source} --factor {factor}`: hidden size, heads, key-value heads and MLP\n"
        f"of `{source}` are repeated {factor} times and its matrices divided by {factor}. The model has\n"
        f"{parameters:,} parameters and writes the same text as `{source}`, up to rounding. It is for timing.\n"
        "Source, data and licence are those of that model.\n"
    )
