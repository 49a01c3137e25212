"""``selfspec models widen``: writes a model that is several times as wide and writes the same text."""

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.api import options, silence_libraries


def widen(
    model: Annotated[str, typer.Argument(help=f"A Llama model: {options.MODEL_HELP}")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write to, new or empty.")],
    factor: Annotated[int, typer.Option(help="How many times as wide: 1 to 64.")],
    dtype: options.Dtype = "auto",
) -> None:
    """Writes a model that is FACTOR times as wide and writes the same text, up to rounding.

    The folder can be the --model of any command, to time the command at a larger size.

    Example: selfspec models widen tiny tiny-wide --factor 8
    """
    from selfspec_lab.output_folder import check_output_folder
    from selfspec_lab.widened_folder import save_widened
    from selfspec_lab.widening import check_factor, load_model

    check_factor(factor)
    check_output_folder(out)
    silence_libraries()
    widened, tokenizer = load_model(model, dtype=dtype, device="cpu", widen=factor)
    save_widened(widened, tokenizer, out, source=model, factor=factor)
    parameters = sum(parameter.numel() for parameter in widened.parameters())
    typer.echo(f"{model}, widened {factor} times, {parameters:,} parameters: {out}")
