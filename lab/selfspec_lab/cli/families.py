"""``selfspec families``: what holds for each decoder-only family of transformers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.api import options, silence_libraries
from selfspec.errors import InvalidParameterError


def families(
    names: Annotated[list[str] | None, typer.Argument(help="Families, by `model_type`; all if none is given.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the table into this page, between its marks.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Builds a tiny random model of each family and shows what holds for it; all take about 90 seconds.

    A family's layers are split by its row of a table, by looking, or run as a whole. What it writes with drafts, alone,
    in a batch, with trees and with a multi-token-prediction head, is compared with transformers' `generate`.

    Example: selfspec families gpt2 qwen3_next
    """
    import transformers

    from selfspec_lab.families.examine import examine
    from selfspec_lab.families.page import line, table, with_table
    from selfspec_lab.families.tiny import family_names

    silence_libraries()
    known = family_names()
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise InvalidParameterError(f"transformers has no decoder-only family '{unknown[0]}'; leave it out to see all")
    if page is not None and names:
        raise InvalidParameterError("a page shows all families; leave out the names, or --page")
    every = []
    for name in names or known:
        every.append(examine(name))
        if as_json:
            typer.echo(json.dumps(vars(every[-1]), allow_nan=False))
        else:
            typer.echo(line(every[-1]))
    if page is not None:
        text = page.read_text(encoding="utf-8")
        page.write_text(with_table(text, table(every, transformers.__version__)), encoding="utf-8")
