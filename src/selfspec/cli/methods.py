"""``selfspec methods``: the drafting methods and their settings."""

import json
from collections.abc import Mapping
from typing import Any

import typer

from selfspec.cli import options


def methods(
    as_json: options.Json = False,
) -> None:
    """Lists the methods with their settings, defaults and sources, and the papers that --paper takes."""
    described, papers = describe_methods(), describe_papers()
    if as_json:
        described["paper"]["papers"] = papers
        typer.echo(json.dumps(described, allow_nan=False))
        return
    for name, method in described.items():
        typer.secho(name, bold=True, nl=False)
        typer.echo(f": {method['summary']}\n    source: {method['source']}")
        if method["learns"]:
            typer.echo("    learns from request to request; --state FILE saves what it has learned")
        for setting in method["settings"]:
            typer.echo(f"    --set {setting['name']}={_text(setting['default'])}  ({_type_and_range(setting)})")
            typer.echo(f"        {setting['help']}")
    for name, paper in papers.items():
        typer.secho(f"--paper {name}", bold=True, nl=False)
        typer.echo(f": {paper['source']}\n    {paper['method']} with {_assignments(paper['settings'])}")
        if paper["authors"]:
            typer.echo(f"    --authors, {paper['code']}: {_assignments(paper['authors'])}")


def describe_methods() -> dict[str, dict[str, Any]]:
    """Describes every method: its ``summary``, ``source``, ``learns`` (whether it has a state) and ``settings``.

    Includes those that take others in parentheses and the methods of entry points; a warning on standard error names
    methods that do not load.
    """
    from selfspec.methods import all_compositions, all_methods

    methods, errors = all_methods()
    made_of_others, more = all_compositions()
    for error in (*errors, *more):
        typer.echo(f"warning: {error}", err=True)
    return {
        name: {
            "summary": method.summary,
            "source": method.source,
            "learns": method.learns,
            "settings": method.Settings.describe(),
        }
        for name, method in (methods | made_of_others).items()
    }


def describe_papers() -> dict[str, dict[str, Any]]:
    """Describes every paper: its ``source``, ``method``, and by setting the ``value`` and its ``place`` in the paper.

    ``authors`` has the settings that differ in the authors' ``code``.
    """
    from selfspec.methods.papers import PAPERS

    return {
        name: {
            "source": paper.source,
            "method": paper.method,
            "settings": {setting: given._asdict() for setting, given in paper.settings.items()},
            "authors": {setting: given._asdict() for setting, given in paper.authors.items()},
            "code": paper.code,
        }
        for name, paper in PAPERS.items()
    }


def _assignments(values: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name}={_text(given['value'])}" for name, given in values.items())


def _type_and_range(setting: Mapping[str, Any]) -> str:
    minimum, maximum, choices = setting["minimum"], setting["maximum"], setting["choices"]
    bounds = [
        f"one of {', '.join(choices)}" if choices else setting["type"],
        "" if minimum is None else f"at least {minimum:g}",
        "" if maximum is None else f"at most {maximum:g}",
    ]
    return ", ".join(filter(None, bounds))


def _text(value: object) -> str:
    """A value in the syntax of ``--set``."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
