"""GGUF files on the hub, by names such as ``OWNER/REPO:Q4_K_M``."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from selfspec.errors import ModelLoadError, first_line

_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<kind>[\w.-]+)")
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class HubFile:
    """A GGUF file of a repository on the hub, by what stands in its name for its number type (``Q4_K_M``)."""

    repository: str
    kind: str


def parse_hub_file(name: str) -> HubFile | None:
    """``OWNER/REPO:Q4_K_M``; ``None`` for a name of another form."""
    found = _NAME.fullmatch(name)
    return HubFile(found["repository"], found["kind"]) if found else None


def download(file: HubFile) -> Path:
    """The path of a file, or of the first part of a split one; downloaded, with progress, where it is not there yet."""
    try:
        names = [name for name in HfApi().list_repo_files(file.repository) if name.lower().endswith(".gguf")]
    except Exception as error:  # offline, or the hub's own errors: what was downloaded before may do
        return _find_downloaded(file, first_line(error))
    chosen = _choose(file, names)
    try:
        folder = snapshot_download(file.repository, allow_patterns=chosen)
    except Exception as error:  # the hub's client has many errors
        raise ModelLoadError(f"cannot download '{chosen[0]}' of '{file.repository}': {first_line(error)}") from error
    return Path(folder) / chosen[0]


def _choose(file: HubFile, names: list[str]) -> list[str]:
    """The names of a file and its parts, in order; projections of images are no models."""
    wanted = re.compile(rf"(?:^|[^0-9a-z]){re.escape(file.kind.lower())}(?:$|[^0-9a-z_])")
    found = sorted(name for name in names if wanted.search(_stem(name)) and "mmproj" not in name)
    models = {_PART.sub("", _stem(name)) for name in found}
    if len(models) != 1:
        shown = ", ".join(sorted(name for name in (found or names))[:12]) or "none"
        kind = "several GGUF files" if found else "no GGUF file"
        raise ModelLoadError(f"'{file.repository}' has {kind} of type '{file.kind}'; its files: {shown}")
    return found


def _stem(name: str) -> str:
    return name.lower().removesuffix(".gguf")


def _find_downloaded(file: HubFile, reason: str) -> Path:
    """The same from the local cache."""
    try:
        folder = Path(snapshot_download(file.repository, local_files_only=True, allow_patterns="*.gguf"))
    except Exception as error:  # nothing of the repository is there
        raise ModelLoadError(f"cannot list the files of '{file.repository}': {reason}") from error
    try:
        return folder / _choose(file, [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.gguf"))])[0]
    except ModelLoadError as error:
        raise ModelLoadError(
            f"cannot list the files of '{file.repository}': {reason}; of those downloaded before: {error}"
        ) from error
