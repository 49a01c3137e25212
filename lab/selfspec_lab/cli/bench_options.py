"""The options of the benchmark commands."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.api import options, parse_assignments
from selfspec.errors import InvalidParameterError, InvalidSettingError

_WHAT, _HOW = "What is measured", "How it is measured"
_SETTINGS_HELP = "A setting of a method; repeatable. Fixed exit layers are 6 of 16 layers unless set."

Out = Annotated[Path, typer.Option(help="Folder of the results.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")]

Dirty = Annotated[
    bool,
    typer.Option("--dirty", help="Measure in a checkout with uncommitted changes; the result and its pages say so."),
]

Model = Annotated[str, typer.Option(help=options.MODEL_HELP, rich_help_panel=_WHAT)]
Widen = Annotated[
    int,
    typer.Option(
        help="Widen a Llama model this many times, its text unchanged; for timing.",
        rich_help_panel=_WHAT,
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Names of methods, separated by commas, or all. Without it and --paper, all.",
        rich_help_panel=_WHAT,
    ),
]
Papers = Annotated[
    str | None,
    typer.Option(
        "--paper",
        metavar="NAMES",
        help="Methods of papers as published, separated by commas, as --paper of `selfspec generate`; their names "
        "here are paper(NAME).",
        rich_help_panel=_WHAT,
    ),
]
Authors = Annotated[
    bool, typer.Option("--authors", help="With --paper: as in the authors' code.", rich_help_panel=_WHAT)
]
Peers = Annotated[
    str,
    typer.Option(
        help="transformers' own: transformers, transformers-early-exit, transformers-prompt-lookup; llama-cpp, "
        "llama-cpp-prompt-lookup (greedy, on the processor; need the extra peers of ./lab); "
        "all; none.",
        rich_help_panel=_WHAT,
    ),
]
Suite = Annotated[
    str,
    typer.Option(
        help="mini (bundled); spec-bench:FILE, gsm8k:FILE, humaneval:FILE (their JSONL); text:FILE (continue passages "
        "of --context tokens); prompts:FILE; stream:A+B (one after another); only:CATEGORY:SUITE; shots:N:SUITE; "
        "summary:SUITE; hub:NAME.",
        rich_help_panel=_WHAT,
    ),
]
Limit = Annotated[int | None, typer.Option(help="At most this many questions of each category.", rich_help_panel=_WHAT)]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Use the chat template, or continue the prompts as texts. Default: chat for Spec-Bench, and for models "
        "whose chat template has special tokens (not for the bundled ones).",
        rich_help_panel=_WHAT,
    ),
]
Context = Annotated[int, typer.Option(help="Prompt tokens of each passage of text:FILE.", rich_help_panel=_WHAT)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="METHOD.KEY=VALUE", help=_SETTINGS_HELP, rich_help_panel=_WHAT),
]

MaxNewTokens = Annotated[int, typer.Option(help="Longest output.", rich_help_panel=_HOW)]
Temperature = Annotated[
    float, typer.Option(help="0 is greedy; otherwise all methods sample with the same seed.", rich_help_panel=_HOW)
]
TopP = Annotated[
    float, typer.Option(help="Sample from the most probable tokens up to this total.", rich_help_panel=_HOW)
]
Sampling = Annotated[
    str,
    typer.Option(
        metavar="coupled|speculative",
        help="With --temperature: coupled writes the text of plain decoding with the same seed; speculative is "
        "Leviathan's rejection sampling, that of the papers.",
        rich_help_panel=_HOW,
    ),
]
Repeats = Annotated[int, typer.Option(help="Number of measurements of everything.", rich_help_panel=_HOW)]
Seed = Annotated[int, typer.Option(help="Seed of the order, of sampling and of the suite.", rich_help_panel=_HOW)]
Dtype = Annotated[str, typer.Option(help=options.DTYPE_HELP, rich_help_panel=_HOW)]
Unpack = Annotated[bool, typer.Option("--unpack", help=options.UNPACK_HELP, rich_help_panel=_HOW)]
Activations = Annotated[
    str, typer.Option(metavar="auto|exact|int8", help=options.ACTIVATIONS_HELP, rich_help_panel=_HOW)
]
Device = Annotated[str, typer.Option(help=options.DEVICE_HELP, rich_help_panel=_HOW)]
Runtime = Annotated[str, typer.Option(help=options.RUNTIME_HELP, rich_help_panel=_HOW)]


def parse_names(text: str) -> tuple[str, ...]:
    """Splits names at commas, but not at those between the parts of a method: ``suffix,cascade(suffix, low-bit)``."""
    return tuple(name.strip() for name in re.split(r",(?![^()]*\))", text))


def chosen_methods(methods: str | None, default: str, papers: str | None, authors: bool) -> tuple[str, ...]:
    """The methods that ``--methods``, ``--paper`` and ``--authors`` name together; ``default`` without any.

    Raises:
        InvalidParameterError: ``--authors`` without ``--paper``.
    """
    if papers is None:
        if authors:
            raise InvalidParameterError("--authors takes the authors' form of a paper's method; give --paper too")
        return parse_names(default if methods is None else methods)
    from selfspec.methods.papers import paper_method

    own = () if methods is None else parse_names(methods)
    return (*own, *(paper_method(name, authors) for name in parse_names(papers)))


def parse_method_settings(assignments: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parses the values of ``--set`` for several methods.

    Args:
        assignments: each ``method.key=value``; ``method.part.key=value`` for a part of a method that has parts.

    Returns:
        Values by method and key, as text.

    Raises:
        InvalidSettingError: an assignment has no ``=`` or no ``.`` before it, or a key is given twice.
    """
    settings: dict[str, dict[str, str]] = {}
    for name, value in parse_assignments(assignments).items():
        found = re.fullmatch(r"((?:[\w.]+:)?[^.()]+(?:\([^()]*\))?)\.(.+)", name)
        if found is None:
            raise InvalidSettingError(f"--set takes METHOD.KEY=VALUE here, not '{name}={value}'")
        settings.setdefault(found[1], {})[found[2]] = value
    return settings
