"""``selfspec methods``: what can draft, and what can be set."""

import json
from collections.abc import Mapping
from typing import Any

import typer

from selfspec.cli import options


def methods(
    as_json: options.Json = False,
) -> None:
    """Lists the methods with their settings, defaults and sources."""
    described = describe_methods()
    if as_json:
        typer.echo(json.dumps(described, allow_nan=False))
        return
    for name, method in described.items():
        typer.secho(name, bold=True, nl=False)
        typer.echo(f": {method['summary']}\n    source: {method['source']}")
        if method["learns"]:
            typer.echo("    learns from one request to the next; --state FILE keeps it")
        for setting in method["settings"]:
            typer.echo(f"    --set {setting['name']}={_text(setting['default'])}  ({_type_and_range(setting)})")
            typer.echo(f"        {setting['help']}")


def describe_methods() -> dict[str, dict[str, Any]]:
    """Every method by its name: ``summary``, ``source``, ``learns`` (whether it keeps a state) and ``settings``."""
    from selfspec.methods import METHODS
    from selfspec.methods.settings import describe_settings

    return {
        name: {
            "summary": method.summary,
            "source": method.source,
            "learns": method.learns,
            "settings": describe_settings(method.Settings),
        }
        for name, method in METHODS.items()
    }


def _type_and_range(setting: Mapping[str, Any]) -> str:
    minimum, maximum, choices = setting["minimum"], setting["maximum"], setting["choices"]
    bounds = [
        f"one of {', '.join(choices)}" if choices else setting["type"],
        "" if minimum is None else f"at least {minimum:g}",
        "" if maximum is None else f"at most {maximum:g}",
    ]
    return ", ".join(filter(None, bounds))


def _text(value: object) -> str:
    """A value as ``--set`` takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
