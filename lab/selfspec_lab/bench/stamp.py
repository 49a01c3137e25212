"""The stamp of a result: commit, versions and hardware, so that it can be reproduced."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import selfspec

_GIT_SECONDS = 20


def make_stamp(device: torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Makes the stamp of a result.

    Args:
        device: the device of the measurement.
        packages: further packages whose versions belong to the result.

    Returns:
        ``date`` (UTC), ``commit`` and ``dirty`` (``None`` outside of a checkout), ``versions``, ``hardware``,
        ``threads``, and the ``load_average`` of the last minute, a sign of other work on the machine (``None`` if
        the system has none).
    """
    commit, dirty = git_state(Path(selfspec.__file__))
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "versions": {
            "selfspec": selfspec.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
            **{package: package_version(package) for package in packages},
        },
        "hardware": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": _memory_bytes(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def package_version(name: str) -> str | None:
    """The version of an installed package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(file: Path) -> tuple[str | None, bool | None]:
    """The commit of a file's checkout, and whether the checkout has changes or new files.

    Args:
        file: a file of the package. If the repository does not track it, for instance in a virtual environment inside
            another checkout, both results are ``None``.
    """
    folder = file.parent
    if _git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return None, None
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
