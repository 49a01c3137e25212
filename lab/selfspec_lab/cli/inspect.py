"""``selfspec inspect``: kept sublayers, drafts and times of each round."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.api import (
    make_console,
    options,
    own_warnings,
    read_prompt,
    read_settings,
    silence_libraries,
    summary,
)

if TYPE_CHECKING:
    from selfspec_lab.inspection import Inspection


@options.with_engine_options
def inspect(
    engine: options.EngineChoice,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest output, in tokens.")] = 128,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Load what the method has learned from this file; the file is not written."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PICTURE", help="Also save a picture, as .png, .pdf or .svg.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Generates greedily and shows the kept sublayers, the accepted tokens and the time of each round.

    Example: selfspec inspect "Why?" --model tiny --method swift --out rounds.png
    """
    text = read_prompt(prompt, prompt_file)
    settings = read_settings(engine.method, engine.settings, state, writes_state=False)
    if out is not None:
        from selfspec_lab.plots import check_picture

        check_picture(out)

    from selfspec_lab.inspection import Inspection

    silence_libraries()
    loaded = engine.load(settings=settings)
    with own_warnings():
        if state is not None:
            loaded.load_state(state)
        generation = loaded.generate(text, max_new_tokens=max_new_tokens)
    target = loaded.target
    inspection = Inspection(engine.model, target.weights, str(target.device), target.sublayer_count, generation)
    if as_json:
        typer.echo(json.dumps(inspection.to_dict(), allow_nan=False))
    else:
        _print(inspection)
    if out is not None:
        from selfspec_lab.plots import save_picture

        save_picture(inspection, out)
        if not as_json:
            typer.echo(f"picture: {out}")


def _print(inspection: "Inspection") -> None:
    from selfspec_lab.cli.inspection_text import print_inspection

    typer.echo(summary(inspection.generation))
    print_inspection(make_console(), inspection)
