"""Options and arguments that several commands share, and the engine that they describe."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.choices import Choice as Choice
from selfspec.choices import option as option
from selfspec.cli import collection
from selfspec.errors import InvalidParameterError

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
DTYPE_HELP = "float32, bfloat16, float16, or auto: the dtype of the checkpoint."
DEVICE_HELP = "A torch device, or auto: an accelerator if there is one."
RUNTIME_HELP = (
    "How the model runs: auto (the fastest that is right), compiled (CPU), graphs (CUDA), triton, fused, or eager "
    "(transformers' modules)."
)
WEIGHTS_HELP = "int8 or int4: run the model with low-bit weights (CPU; CUDA with Triton). Default: its own weights."
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
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]

OUTPUT = "Output"
"""A heading in the help of the commands that generate text."""

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
class ModelChoice(Choice):
    """The model that a command line describes, and how it runs."""

    model: Model = DEFAULT_MODEL
    dtype: Dtype = "auto"
    weights: Weights = None
    unpack: Unpack = False
    activations: str = option("auto", ACTIVATIONS_HELP, metavar="auto|exact|int8")
    device: Device = "auto"
    runtime: str = option("auto", RUNTIME_HELP)
    cache_bits: int | None = option(None, CACHE_HELP, metavar="8")

    def begin(self) -> None:
        """Begins to read a GGUF file, which goes on while Python imports what ``load`` needs."""
        from selfspec.loading.gguf_early import begin

        begin(self.model, dtype=self.dtype, device=self.device, weights=self.weights, unpack=self.unpack)

    def load(self, **others: Any) -> "Engine":
        """Loads the model, with what other options of the engine a command sets, its method among them."""
        from selfspec.engine import Engine

        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            return Engine.from_pretrained(chosen.pop("model"), **{**chosen, **others})
        finally:
            collection.resume()


def chosen_method(method: str, paper: str | None, authors: bool) -> str:
    """The method that ``--method``, ``--paper`` and ``--authors`` name together."""
    if paper is None and not authors:
        return method
    from selfspec.engine_options import EngineOptions
    from selfspec.methods import find_method

    chosen = EngineOptions(paper=paper, authors=authors).chosen(method)
    return find_method(chosen).name


@dataclass(frozen=True)
class EngineChoice(ModelChoice):
    """The model, method and options of the engine that a command line describes."""

    method: str = option(
        DEFAULT_METHOD,
        "Drafting method; auto selects the fastest. `selfspec methods` lists all.",
    )
    paper: str | None = option(
        None,
        "The method of a paper as published, in place of --method: swift-v1, swift-v2, clasp, del, knapspec, "
        "self-spec, layerskip.",
        metavar="NAME",
    )
    authors: bool = option(False, "With --paper: as in its authors' code, where that differs.", "--authors")
    settings: list[str] | None = option(
        None, "A setting of the method; of a cascade, STAGE.KEY=VALUE; repeatable.", "--set", metavar="KEY=VALUE"
    )
    cache_dir: Path | None = option(
        None,
        "Keep texts with their keys and values in this folder: later runs draft from them, and read prompts that "
        "begin alike only once.",
        metavar="DIR",
        file_okay=False,
    )
    cache_dir_limit: float = option(4.0, "Maximum size of --cache-dir, in GiB.", metavar="GIB", min=0.001)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_dir is None and self.cache_dir_limit != EngineChoice.cache_dir_limit:
            raise InvalidParameterError("--cache-dir-limit needs --cache-dir; give it, or leave this out")
        chosen = chosen_method(self.method, self.paper, self.authors)
        for name, value in (("method", chosen), ("paper", None), ("authors", False)):
            object.__setattr__(self, name, value)

    def load(self, **others: Any) -> "Engine":
        """As for ``ModelChoice``, with ``settings`` in ``others``."""
        from selfspec.cli.terminal import own_warnings

        with own_warnings():
            return super().load(cache_dir_limit=int(self.cache_dir_limit * 2**30), **others)


@dataclass(frozen=True)
class AdapterChoice(Choice):
    """Adapters beside the model's weights."""

    adapter: list[str] | None = option(
        None,
        "A LoRA adapter that PEFT has saved: a folder, or a name on the hub. NAME= names it; repeatable.",
        metavar="[NAME=]DIR",
    )

    @property
    def named(self) -> dict[str, str]:
        """Their folders by their names."""
        from selfspec.loading.adapter_files import name_adapters

        return name_adapters(self.adapter or ())


@dataclass(frozen=True)
class SamplingChoice(Choice):
    """How tokens are chosen, as names of ``SamplingParams``."""

    panel = "How tokens are chosen"

    max_new_tokens: int = option(128, "Longest output, in tokens.")
    temperature: float = option(0.0, "Divides the logits; 0 is greedy.")
    top_p: float = option(1.0, "Sample from the most probable tokens up to this total.")
    top_k: int = option(0, "Sample from the k most probable tokens; 0 for all.")
    min_p: float = option(0.0, "Drop tokens below this share of the largest probability.")
    repetition_penalty: float = option(1.0, "Above 1 makes earlier tokens less likely.")
    seed: int | None = option(None, "Makes sampling reproducible, with any method.")


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: each parameter of a command that a ``Choice`` annotates becomes the options of that choice."""
    signature = inspect.signature(command)
    choices: dict[str, type[Choice]] = {
        each.name: each.annotation
        for each in signature.parameters.values()
        if isinstance(each.annotation, type) and issubclass(each.annotation, Choice)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name in choices:
            parameters += _options_of(choices[parameter.name])
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: choice(**{field.name: given.pop(field.name) for field in fields(choice)})
            for name, choice in choices.items()
        }
        command(**made, **given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(choice: type[Choice]) -> list[inspect.Parameter]:
    parameters = []
    for each in fields(choice):
        annotation: Any = each.type
        if each.metadata:
            others = {"rich_help_panel": choice.panel, **each.metadata["others"]}
            annotation = Annotated[annotation, typer.Option(*each.metadata["names"], **others)]
        parameters.append(
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=annotation)
        )
    return parameters
