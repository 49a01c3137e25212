"""GGUF files on the hub, by names such as ``OWNER/REPO:Q4_K_M``."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from selfspec.errors import ModelLoadError, explaining
from selfspec.loading.hub import hub_reason

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = re.compile(rf"(?P<repository>{_REPOSITORY.pattern}):(?P<kind>[\w.-]+)")
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODEL = re.compile(r"mmproj|(?:^|/)(?:mtp|eagle3|dflash)-")
"""In names of files that hold no whole model: projections of pictures, heads that draft."""
_SECOND = re.compile(r"imatrix|(?:^|/)mtp/|-mtp$")
"""The same of statistics of a quantiser, and of heads; a model may be named so, too, if there is no other file."""
_OTHER_WEIGHTS = (".safetensors", ".bin")
_MOST_SHOWN = 12


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
        return _find_downloaded(file, hub_reason(error))
    chosen = _choose(file, names)
    with explaining(ModelLoadError, f"cannot download '{chosen[0]}' of '{file.repository}'"):
        folder = snapshot_download(file.repository, allow_patterns=chosen)
    return Path(folder) / chosen[0]


def _choose(file: HubFile, names: list[str]) -> list[str]:
    """The names of a file and its parts, in order."""
    wanted = re.compile(rf"(?:^|[^0-9a-z]){re.escape(file.kind.lower())}(?:$|[^0-9a-z_])")
    found = sorted(name for name in names if wanted.search(_stem(name)) and not _NO_MODEL.search(_stem(name)))
    found = [name for name in found if not _SECOND.search(_model(name))] or found
    models = {_model(name) for name in found}
    if len(models) != 1:
        kind, shown = "several GGUF files" if found else "no GGUF file", _show(found or names)
        raise ModelLoadError(f"'{file.repository}' has {kind} of type '{file.kind}'; its files: {shown}")
    return found


def find_hint(name: str) -> str | None:
    """What to name in place of a repository that has GGUF files and no other weights; ``None`` for another one."""
    if not _REPOSITORY.fullmatch(name) or Path(name).exists():
        return None
    try:
        names = HfApi().list_repo_files(name)
    except Exception:  # offline, or the hub's own errors: there is nothing to say
        return None
    files = [each for each in names if each.lower().endswith(".gguf")]
    if not files or any(each.endswith(_OTHER_WEIGHTS) for each in names):
        return None
    return f"'{name}' holds GGUF files; name one by its type, as {name}:Q4_K_M (its files: {_show(files)})"


def _show(names: list[str]) -> str:
    return ", ".join(sorted(names)[:_MOST_SHOWN]) or "none"


def _model(name: str) -> str:
    """The name of a model's file, without its part."""
    return _PART.sub("", _stem(name))


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
