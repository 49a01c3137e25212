"""``selfspec models widen``: writes a model that is several times as wide and writes the same text."""

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli import options
from selfspec.cli.terminal import silence_libraries


def widen(
    model: Annotated[str, typer.Argument(help=f"{options.MODEL_HELP} It has to be a Llama.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write to, new or empty.")],
    factor: options.Widen,
    dtype: options.Dtype = "auto",
) -> None:
    """Writes a model that is FACTOR times as wide and writes the same text up to rounding."""
    from selfspec.loading import load_model
    from selfspec_lab.widening import check_factor, check_output_folder, save_widened

    check_factor(factor)
    check_output_folder(out)
    silence_libraries()
    widened, tokenizer = load_model(model, dtype=dtype, device="cpu", widen=factor)
    save_widened(widened, tokenizer, out, source=model, factor=factor)
    parameters = sum(parameter.numel() for parameter in widened.parameters())
    typer.echo(f"{model}, widened {factor} times, {parameters:,} parameters: {out}")
