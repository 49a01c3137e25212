"""``selfspec export-draft``: a tuned draft as a checkpoint for other engines."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.api import options, own_warnings, read_settings, silence_libraries

if TYPE_CHECKING:
    from selfspec import Prompt


def export_draft(
    method: Annotated[str, typer.Option(help="knapspec, clasp, swift, self-spec, or low-bit (GGUF only).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to, new or empty.")],
    model: options.Model = options.DEFAULT_MODEL,
    texts: Annotated[
        Path | None,
        typer.Option(
            help='UTF-8 file of prompts to tune and measure on: one per line, or .jsonl with a string "prompt" per '
            "line. The default are prompts of the package."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user message of a chat.")] = False,
    form: Annotated[str, typer.Option("--format", help="transformers (for vLLM and SGLang, too) or gguf.")] = (
        "transformers"
    ),
    bits: Annotated[
        str | None, typer.Option(metavar="BF16|Q8_0|Q4_0", help="Of a GGUF file. [default: Q8_0; low-bit: Q4_0]")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; repeatable.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take what the method has found before (`selfspec tune`), and search nothing."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 96,
    iterations: Annotated[int, typer.Option(help="Sets of sublayers that self-spec measures.")] = 25,
    halves: Annotated[
        bool,
        typer.Option(
            "--halves",
            help="Export the method's set as it is: a layer of which one sublayer is skipped stays, with zero weights "
            "there, and costs what it did. The default leaves out as many whole layers.",
        ),
    ] = False,
    dtype: options.Dtype = "auto",
    unpack: options.Unpack = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in DIR.")] = False,
    as_json: options.Json = False,
) -> None:
    """Writes a tuned kept set as an ordinary checkpoint, which transformers, llama.cpp, vLLM and SGLang draft with.

    Measures its acceptance and its cost, and says which speedup to expect and how to use it.

    Example: selfspec export-draft --model tiny --method clasp --out tiny-draft
    """
    from rich.console import Console

    from selfspec_lab.export.exporting import export_draft as run
    from selfspec_lab.export.request import Request

    chosen = read_settings(method, settings, state, writes_state=False)
    request = Request(
        model,
        method,
        out,
        form,
        bits,
        dtype,
        unpack,
        settings=dict(chosen),
        state=state,
        max_new_tokens=max_new_tokens,
        iterations=iterations,
        halves=halves,
        force=force,
    )
    silence_libraries()
    request.check()
    prompts = _prompts(texts, chat)
    console = Console(stderr=True, highlight=False)
    with own_warnings(), console.status("starting") as status:
        export = run(request, prompts, status.update)
    if as_json:
        typer.echo(json.dumps(export.to_dict(), allow_nan=False))
        return
    for line in export.lines():
        typer.echo(line)
    for engine, command in export.usage.items():
        typer.echo(f"\n{engine}:\n{command}")
    if export.warning:
        typer.echo(f"\nwarning: {export.warning}", err=True)


def _prompts(texts: Path | None, chat: bool) -> "list[Prompt]":
    from selfspec_lab.prompts import CHAT_PROMPTS, PROMPTS
    from selfspec_lab.tuning import read_prompts

    if texts is not None:
        found = read_prompts(texts)
    else:
        found = list(CHAT_PROMPTS.values()) if chat else [text for domain in PROMPTS.values() for text in domain[:4]]
    return [[{"role": "user", "content": text}] for text in found] if chat else list(found)
