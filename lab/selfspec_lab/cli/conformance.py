"""``selfspec conformance``: whether a server's text depends on how it is asked."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.api import make_console, options
from selfspec.errors import InvalidParameterError

if TYPE_CHECKING:
    from selfspec_lab.conformance.report import Report, Settings
    from selfspec_lab.conformance.run import Progress

DIVERGED, FAILED = 1, 2
"""Exit codes: a text was another one; a check could not be made."""


def conformance(
    url: Annotated[str, typer.Argument(help="The server, as http://127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Option(help="Name of the model. The default is the first one listed.")] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="URL", help="A server of the same engine and model without speculation.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Number of prompts, for completions and for chats.")] = 8,
    tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    at_once: Annotated[str, typer.Option(help="Numbers of requests at a time, separated by commas.")] = "2,4,8,16",
    engine: Annotated[
        str | None, typer.Option(help="Name and version of the engine, where the server does not say them.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SELFSPEC_API_KEY", help="Key of the servers, if they want one.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which an answer has to be complete.", min=0.1)] = 120.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write the report to this file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Checks that greedy text is the same alone and among others, streamed, cached, and with speculation.

    Works with any server that has the interface of OpenAI's API. Exit code 1: a text was another one.

    Example: selfspec conformance http://127.0.0.1:8000 --out report.json
    """
    from selfspec.files import replace_file
    from selfspec_lab.conformance.report import Settings
    from selfspec_lab.conformance.run import check_settings
    from selfspec_lab.out_file import check_out

    settings = Settings(prompts, tokens, _parse_counts(at_once))
    check_settings(settings)
    if out is not None:
        check_out(out)
    report = _run(url, reference, model, api_key, timeout, settings, engine)
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
    if out is not None:
        replace_file(out, text + "\n")
    if as_json:
        typer.echo(text)
    else:
        from selfspec_lab.cli.conformance_text import print_report

        print_report(make_console(), report)
    if report.diverged or report.failed:
        raise typer.Exit(DIVERGED if report.diverged else FAILED)


def _run(
    url: str,
    reference: str | None,
    model: str | None,
    api_key: str | None,
    timeout: float,
    settings: "Settings",
    engine: str | None,
) -> "Report":
    from rich.console import Console

    from selfspec_lab.conformance.client import Client
    from selfspec_lab.conformance.run import run_checks

    def client(address: str) -> Client:
        return Client(address, model=model or "", api_key=api_key, timeout=timeout)

    async def run(progress: "Progress") -> "Report":
        async with client(url) as tested:
            if reference is None:
                return await run_checks(tested, None, settings, engine, progress)
            async with client(reference) as other:
                return await run_checks(tested, other, settings, engine, progress)

    with Console(stderr=True).status("") as status:
        return asyncio.run(run(status.update))


def _parse_counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidParameterError(f"--at-once has numbers separated by commas, not '{text}'") from error
