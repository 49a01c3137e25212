"""``selfspec train``: training of models of one's own."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.api import options, silence_libraries
from selfspec.errors import InvalidParameterError

train = typer.Typer(no_args_is_help=True, help="Trains models of one's own to draft well.")

_HELD_OUT = 0.1
"""Share of the texts, their end, that is measured and not trained on."""

_CURVE_TOKENS = 2_048
"""Held-out tokens that a point of the curve is measured on."""


@train.callback()
def _group() -> None:
    """Trains models of one's own to draft well."""


@train.command("early-exit", epilog="Example: selfspec train early-exit --model smollm2 --texts texts.txt --out exits")
def early_exit(
    texts: Annotated[Path, typer.Option(help="UTF-8 file of texts like those that the model will write.")],
    out: Annotated[Path, typer.Option(help="Folder to write the checkpoint into, new or empty.")],
    model: options.Model = "smollm2",
    exit_layer: Annotated[int | None, typer.Option(help="Layers that draft; a third of them by default.")] = None,
    steps: Annotated[int, typer.Option(help="Updates.", min=1)] = 400,
    rows: Annotated[int, typer.Option(help="Texts of a step.", min=1)] = 8,
    length: Annotated[int, typer.Option(help="Tokens of each.", min=2)] = 128,
    rank: Annotated[int, typer.Option(help="Rank of the change of a weight matrix.", min=1)] = 16,
    rate: Annotated[float, typer.Option(help="Learning rate, which falls to zero.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Of the changes and of what is read.")] = 0,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the changes alone, as a PEFT adapter.")] = False,
    work: Annotated[Path | None, typer.Option(help="Folder of the state to continue from, and of curve.jsonl.")] = None,
    every: Annotated[int, typer.Option(help="Steps between points of the curve.", min=1)] = 20,
) -> None:
    """Trains the first layers to draft (`--method layerskip`, `del`) while the model keeps writing what it wrote.

    The model itself is the teacher. Its layers get low-rank changes, which are merged into the checkpoint or, with
    `--adapter`, written alone. Interrupted, a command with `--work` continues from there; with fewer `--steps` than it
    has done it writes what there is.
    """
    import torch

    from selfspec.loading import load_model
    from selfspec_lab.output_folder import check_output_folder
    from selfspec_lab.training.adapter_folder import write_adapter
    from selfspec_lab.training.early_exit import EarlyExit, ExitTraining
    from selfspec_lab.training.progress import train_resumable

    check_output_folder(out)
    text = _read(texts)
    silence_libraries()
    loaded, tokenizer = load_model(model, device="cpu", unpack=True)
    layers = int(loaded.config.num_hidden_layers)
    exit_layer = max(1, layers // 3) if exit_layer is None else exit_layer
    training = ExitTraining(exit_layer, steps=steps, rows=rows, length=length, rank=rank, rate=rate, seed=seed)
    if tokenizer is None:
        raise InvalidParameterError(f"'{model}' has no tokenizer, which texts need")
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    held_out = int(len(tokens) * _HELD_OUT)
    if held_out < length:
        raise InvalidParameterError(
            f"'{texts}' has {len(tokens):,} tokens, but rows of {length} need {int(length / _HELD_OUT):,}; give more "
            "texts or a smaller --length"
        )
    exits = EarlyExit(loaded, training)
    measured = tokens[-held_out:]
    curve = train_resumable(
        exits,
        tokens[:-held_out],
        measured[: max(length, _CURVE_TOKENS)],
        every,
        work,
        lambda point: typer.echo(json.dumps(point), err=True),
    )
    with exits.unchanged():
        before = exits.measure(measured)
    figures = {"training": asdict(training), "before": before, "after": exits.measure(measured), "curve": curve}
    if adapter:
        out.mkdir(parents=True, exist_ok=True)
        write_adapter(exits.changes, str(getattr(loaded.config, "_name_or_path", "") or model), out)
    else:
        merged: Any = exits.merge()
        merged.save_pretrained(out)
        tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps({name: figures[name] for name in ("training", "before", "after")}))


def _read(texts: Path) -> str:
    try:
        return texts.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"cannot read '{texts}': {error}") from error
