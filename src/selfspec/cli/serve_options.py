"""Options of ``selfspec serve``."""

from pathlib import Path
from typing import Annotated

import typer

API_KEY = "SELFSPEC_API_KEY"
"""The environment variable with the key that requests need."""

_NETWORK, _LIMITS = "Network", "Limits"

Name = Annotated[list[str] | None, typer.Option(help="Name of the model for clients; repeatable. Default: --model's.")]
StateSeconds = Annotated[float, typer.Option(min=0.05, help="How often what was learned is saved while requests come.")]

Host = Annotated[str, typer.Option(help="Where to listen.", rich_help_panel=_NETWORK)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.", rich_help_panel=_NETWORK)]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Requests need this key; repeatable. Others see it in the list of processes: better set {API_KEY}.",
        rich_help_panel=_NETWORK,
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="Pages of this origin may call the server; repeatable.", rich_help_panel=_NETWORK),
]
Certificate = Annotated[Path | None, typer.Option(help="Certificate, for HTTPS.", rich_help_panel=_NETWORK)]
PrivateKey = Annotated[Path | None, typer.Option(help="Its private key.", rich_help_panel=_NETWORK)]

MaxBatch = Annotated[int, typer.Option(min=1, help="Most requests that run at a time.", rich_help_panel=_LIMITS)]
MaxWaiting = Annotated[
    int, typer.Option(min=1, help="Most requests that wait; more are refused (429).", rich_help_panel=_LIMITS)
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Most memory for keys and values, in GiB; requests wait for it. Default: half of what is free.",
        rich_help_panel=_LIMITS,
    ),
]
PrefixCache = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Most of it for texts that later prompts may begin with, in GiB; 0 keeps none. Default: half.",
        rich_help_panel=_LIMITS,
    ),
]
MaxPromptTokens = Annotated[int | None, typer.Option(min=1, help="Longest prompt.", rich_help_panel=_LIMITS)]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer.", rich_help_panel=_LIMITS)]
DefaultNewTokens = Annotated[
    int, typer.Option(min=1, help="Longest answer to a chat that sets no max_tokens.", rich_help_panel=_LIMITS)
]
MaxChoices = Annotated[int, typer.Option(min=1, help="Most prompts times n of a request.", rich_help_panel=_LIMITS)]
MaxBody = Annotated[float, typer.Option(min=0.001, help="Largest body of a request, in MiB.", rich_help_panel=_LIMITS)]
DrainSeconds = Annotated[
    float, typer.Option(min=0, help="Most time for running answers after SIGTERM.", rich_help_panel=_LIMITS)
]
