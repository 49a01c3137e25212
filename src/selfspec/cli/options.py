"""Options and arguments that several commands take, each with its one help text."""

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = "smollm2, tiny, tiny-early-exit (see `selfspec models list`), a folder, a GGUF file, or a name on the hub."
METHOD_HELP = "What drafts; `selfspec methods` lists them."
WIDEN_HELP = "Repeat the widths of a Llama model this often, its text unchanged; for timing."
DTYPE_HELP = "float32, bfloat16, float16, or auto: as the checkpoint was saved."
DEVICE_HELP = "As torch names it, or auto: an accelerator if there is one."
RUNTIME_HELP = (
    "How the model runs: auto (the fastest measured), compiled (CPU), graphs (CUDA), fused, or eager (transformers' "
    "modules)."
)
JSON_HELP = "Print one JSON object and nothing else."
METHODS_HELP = "Names with commas between, or all."
METHOD_SETTINGS_HELP = "A setting of a method; repeatable. Fixed exit layers are 6 of 16 layers unless set."
REPEATS_HELP = "How often everything is measured."

Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; from standard input if there is neither this nor a file.")
]
PromptFile = Annotated[Path | None, typer.Option(help="UTF-8 file with the prompt, taken as it is.")]

Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Widen = Annotated[int, typer.Option(help=WIDEN_HELP)]
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]
Device = Annotated[str, typer.Option(help=DEVICE_HELP)]
Runtime = Annotated[str, typer.Option(help=RUNTIME_HELP)]

Method = Annotated[str, typer.Option(help=METHOD_HELP)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; repeatable.")
]
Methods = Annotated[str, typer.Option(help=METHODS_HELP)]
MethodSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="METHOD.KEY=VALUE", help=METHOD_SETTINGS_HELP)
]

Repeats = Annotated[int, typer.Option(help=REPEATS_HELP)]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]

CHOOSING, OUTPUT = "How tokens are chosen", "Output"
"""Headings in the help of the commands that generate."""

Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=CHOOSING)]
TopP = Annotated[float, typer.Option(help="Keep this probability mass.", rich_help_panel=CHOOSING)]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=CHOOSING)]
MinP = Annotated[float, typer.Option(help="Drop tokens under this share of the best one.", rich_help_panel=CHOOSING)]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 makes tokens seen before less likely.", rich_help_panel=CHOOSING)
]
Seed = Annotated[
    int | None, typer.Option(help="Fixes a sampled text, whichever method drafts.", rich_help_panel=CHOOSING)
]
State = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Keep there what the method learns; if the file exists, start from it."),
]
ShowDrafts = Annotated[
    bool, typer.Option("--show-drafts", help="Colour the text that drafts got right.", rich_help_panel=OUTPUT)
]
