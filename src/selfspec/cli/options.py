"""Options and arguments that several commands share, and the engine that they describe."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli import collection

if TYPE_CHECKING:
    from selfspec.engine import Engine

DEFAULT_MODEL = "smollm2"
"""The default model; `selfspec models install smollm2` installs it."""

DEFAULT_METHOD = "auto"
"""The default method: `selfspec.methods.registry.DEFAULT_METHOD`, without importing the methods."""

MODEL_HELP = (
    "A name that `selfspec models list` lists, a folder, a GGUF file, or a name on the hub: OWNER/REPO, or "
    "OWNER/REPO:Q4_K_M for a GGUF file."
)
METHOD_HELP = (
    "Drafting method; auto selects the fastest. Several: 'cascade(suffix, low-bit)'. `selfspec methods` lists all."
)
DTYPE_HELP = "float32, bfloat16, float16, or auto: the dtype of the checkpoint."
DEVICE_HELP = "A torch device, or auto: an accelerator if there is one."
RUNTIME_HELP = (
    "How the model runs: auto (the fastest measured), compiled (CPU), graphs (CUDA), fused, or eager (transformers' "
    "modules)."
)
WEIGHTS_HELP = "int8 or int4: run the model with low-bit weights (CPU). The default is the checkpoint's own weights."
UNPACK_HELP = "Turn the weights of a quantised GGUF file or checkpoint into numbers of the dtype: slower, more memory."
ACTIVATIONS_HELP = (
    "exact, or int8: round what is multiplied with weights of few bits to 8 bits; faster, with a text of its own. "
    "auto is int8 for a quantised GGUF file or checkpoint in bfloat16."
)
CACHE_HELP = "8: keep keys and values in 8 bits, which halves their memory. The default is the model's dtype."
JSON_HELP = "Print one JSON object and nothing else."

Prompt = Annotated[
    str | None, typer.Argument(help="The prompt. Without it and without --prompt-file, standard input is read.")
]
PromptFile = Annotated[Path | None, typer.Option(help="UTF-8 file with the prompt; it is used unchanged.")]

Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]
Device = Annotated[str, typer.Option(help=DEVICE_HELP)]
Weights = Annotated[str | None, typer.Option(metavar="int8|int4", help=WEIGHTS_HELP)]
Unpack = Annotated[bool, typer.Option("--unpack", help=UNPACK_HELP)]
Activations = Annotated[str, typer.Option(metavar="auto|exact|int8", help=ACTIVATIONS_HELP)]
CacheBits = Annotated[int | None, typer.Option(metavar="8", help=CACHE_HELP)]
KeepCopies = Annotated[
    bool,
    typer.Option("--keep-copies", help="Keep low-bit draft weights in the user's cache folder, for later runs."),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        help="Keep texts with their keys and values in this folder: later runs draft from them, and read prompts that "
        "begin alike only once.",
    ),
]
CacheDirLimit = Annotated[float, typer.Option(metavar="GIB", min=0.001, help="Maximum size of --cache-dir, in GiB.")]
Runtime = Annotated[str, typer.Option(help=RUNTIME_HELP)]

Method = Annotated[str, typer.Option(help=METHOD_HELP)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the method; of a cascade, STAGE.KEY=VALUE; repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]

CHOOSING, OUTPUT = "How tokens are chosen", "Output"
"""Headings in the help of the commands that generate text."""

MaxNewTokens = Annotated[int, typer.Option(help="Longest output, in tokens.", rich_help_panel=CHOOSING)]
Temperature = Annotated[float, typer.Option(help="Divides the logits; 0 is greedy.", rich_help_panel=CHOOSING)]
TopP = Annotated[
    float,
    typer.Option(help="Sample from the most probable tokens up to this total.", rich_help_panel=CHOOSING),
]
TopK = Annotated[int, typer.Option(help="Sample from the k most probable tokens; 0 for all.", rich_help_panel=CHOOSING)]
MinP = Annotated[
    float, typer.Option(help="Drop tokens below this share of the largest probability.", rich_help_panel=CHOOSING)
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 makes earlier tokens less likely.", rich_help_panel=CHOOSING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Above 0 makes tokens of the output less likely.", rich_help_panel=CHOOSING)
]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, for each occurrence.", rich_help_panel=CHOOSING)]
MinTokens = Annotated[
    int, typer.Option(help="No end-of-sequence token before this many tokens.", rich_help_panel=CHOOSING)
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write JSON that the JSON schema in this file allows.", rich_help_panel=CHOOSING),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Makes sampling reproducible, with any method.", rich_help_panel=CHOOSING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="A string that ends the output; repeatable.", rich_help_panel=CHOOSING),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.", rich_help_panel=CHOOSING)
]
State = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Load what the method has learned from this file if it exists, and save it there afterwards.",
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Send the prompt as a user message of a chat.")]
Stats = Annotated[
    bool, typer.Option("--stats", help="Print speed and drafts to standard error.", rich_help_panel=OUTPUT)
]
JsonOutput = Annotated[bool, typer.Option("--json", help=JSON_HELP, rich_help_panel=OUTPUT)]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --json: log-probabilities of the tokens, and of the N most probable tokens at each position.",
        rich_help_panel=OUTPUT,
    ),
]
ShowDrafts = Annotated[
    bool, typer.Option("--show-drafts", help="Colour the text of accepted draft tokens.", rich_help_panel=OUTPUT)
]


@dataclass(frozen=True)
class ModelChoice:
    """The model that a command line describes, and how it runs."""

    model: Model = DEFAULT_MODEL
    dtype: Dtype = "auto"
    weights: Weights = None
    unpack: Unpack = False
    activations: Activations = "auto"
    device: Device = "auto"
    runtime: Runtime = "auto"
    cache_bits: CacheBits = None

    def load(self, **others: Any) -> "Engine":
        """Loads the model, with what other options of the engine a command sets, its method among them."""
        from selfspec.engine import Engine

        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            return Engine.from_pretrained(chosen.pop("model"), **{**chosen, **others})
        finally:
            collection.resume()


@dataclass(frozen=True)
class EngineChoice(ModelChoice):
    """The model, method and options of the engine that a command line describes."""

    method: Method = DEFAULT_METHOD
    settings: Settings = None
    keep_copies: KeepCopies = False
    cache_dir: CacheDir = None
    cache_dir_limit: CacheDirLimit = 4.0

    def load(self, **others: Any) -> "Engine":
        """As for ``ModelChoice``, with ``settings`` in ``others``."""
        return super().load(cache_dir_limit=int(self.cache_dir_limit * 2**30), **others)


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: the parameter ``engine`` of a command becomes the options of the choice that annotates it."""
    signature = inspect.signature(command)
    choice: type[ModelChoice] = signature.parameters["engine"].annotation
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name == "engine":
            parameters += [
                inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
                for field in fields(choice)
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        engine = choice(**{field.name: given.pop(field.name) for field in fields(choice)})
        command(engine=engine, **given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
