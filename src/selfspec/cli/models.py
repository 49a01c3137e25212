"""``selfspec models``: the bundled checkpoints, and wider ones made of them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli import options
from selfspec.cli.terminal import silence_libraries

models = typer.Typer(no_args_is_help=True, help="Lists the bundled checkpoints and makes wider ones of them.")


@models.command("list")
def list_models(
    as_json: options.Json = False,
) -> None:
    """Lists the bundled checkpoints: layers, hidden size, dtype, parameters."""
    from transformers import AutoConfig

    from selfspec.loading import BUNDLED, resolve_name
    from selfspec.widening import parameter_count

    silence_libraries()
    described = {}
    for name in BUNDLED:
        config = AutoConfig.from_pretrained(resolve_name(name))
        described[name] = {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocabulary": config.vocab_size,
            "context": config.max_position_embeddings,
            "dtype": str(config.dtype).removeprefix("torch."),
            "parameters": parameter_count(config),
        }
    if as_json:
        typer.echo(json.dumps(described))
        return
    for name, facts in described.items():
        texts = (f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
        typer.echo(f"{name}: {', '.join(texts)}")


@models.command()
def widen(
    model: Annotated[str, typer.Argument(help="A bundled checkpoint, a local folder, or a name on the hub: a Llama.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write to, new or empty.")],
    factor: options.Widen,
    dtype: options.Dtype = "auto",
) -> None:
    """Writes a model that is FACTOR times as wide and writes the same text up to rounding."""
    from selfspec.loading import load_model
    from selfspec.widening import check_factor, check_output_folder, save_widened

    check_factor(factor)
    check_output_folder(out)
    silence_libraries()
    widened, tokenizer = load_model(model, dtype=dtype, device="cpu", widen=factor)
    save_widened(widened, tokenizer, out, source=model, factor=factor)
    parameters = sum(parameter.numel() for parameter in widened.parameters())
    typer.echo(f"{model}, widened {factor} times, {parameters:,} parameters: {out}")
