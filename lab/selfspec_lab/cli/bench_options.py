"""The options of ``selfspec bench run``, and what the texts of benchmarks' options say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli import options
from selfspec.cli.generate import parse_assignments
from selfspec.errors import InvalidSettingError

_WHAT, _HOW = "What is measured", "How it is measured"

Out = Annotated[Path, typer.Option(help="Folder of the results.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")]

Model = Annotated[str, typer.Option(help=options.MODEL_HELP, rich_help_panel=_WHAT)]
Widen = Annotated[int, typer.Option(help=options.WIDEN_HELP, rich_help_panel=_WHAT)]
Methods = Annotated[str, typer.Option(help=options.METHODS_HELP, rich_help_panel=_WHAT)]
Peers = Annotated[
    str,
    typer.Option(
        help="transformers' own: transformers, transformers-early-exit, transformers-prompt-lookup; llama-cpp, "
        "llama-cpp-prompt-lookup (greedy, on the processor; need the extra 'peers'); "
        "all; none.",
        rich_help_panel=_WHAT,
    ),
]
Suite = Annotated[
    str,
    typer.Option(
        help="mini (bundled); spec-bench:FILE, gsm8k:FILE, humaneval:FILE (their JSONL); text:FILE (continue passages "
        "of --context tokens); prompts:FILE; stream:A+B (one after another); hub:NAME.",
        rich_help_panel=_WHAT,
    ),
]
Limit = Annotated[int | None, typer.Option(help="At most so many questions of a category.", rich_help_panel=_WHAT)]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Ask through the chat template, or let texts go on. Without either: chat for a model whose template "
        "marks turns by special tokens (the bundled ones are no chat models), and for Spec-Bench.",
        rich_help_panel=_WHAT,
    ),
]
Context = Annotated[int, typer.Option(help="Tokens of a passage of text:FILE.", rich_help_panel=_WHAT)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="METHOD.KEY=VALUE", help=options.METHOD_SETTINGS_HELP, rich_help_panel=_WHAT),
]

MaxNewTokens = Annotated[int, typer.Option(help="Longest output.", rich_help_panel=_HOW)]
Temperature = Annotated[
    float, typer.Option(help="0 is greedy; else all methods sample with one seed.", rich_help_panel=_HOW)
]
Repeats = Annotated[int, typer.Option(help=options.REPEATS_HELP, rich_help_panel=_HOW)]
Seed = Annotated[int, typer.Option(help="Of the order, of sampling, of the suite.", rich_help_panel=_HOW)]
Dtype = Annotated[str, typer.Option(help=options.DTYPE_HELP, rich_help_panel=_HOW)]
Device = Annotated[str, typer.Option(help=options.DEVICE_HELP, rich_help_panel=_HOW)]
Runtime = Annotated[str, typer.Option(help=options.RUNTIME_HELP, rich_help_panel=_HOW)]


def parse_names(text: str) -> tuple[str, ...]:
    """Names with commas between."""
    return tuple(name.strip() for name in text.split(","))


def parse_method_settings(assignments: Sequence[str]) -> dict[str, dict[str, str]]:
    """Settings of several methods as ``--set`` gives them.

    Args:
        assignments: each ``method.key=value``.

    Returns:
        By method the values by key, still text.

    Raises:
        InvalidSettingError: one has no ``=`` or no ``.`` before it, or a key comes twice.
    """
    settings: dict[str, dict[str, str]] = {}
    for name, value in parse_assignments(assignments).items():
        method, dot, key = name.partition(".")
        if not method or not dot or not key:
            raise InvalidSettingError(f"--set takes METHOD.KEY=VALUE here, not '{name}={value}'")
        settings.setdefault(method, {})[key] = value
    return settings
