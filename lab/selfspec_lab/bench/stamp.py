"""The stamp of a result: commit, versions and hardware, so that it can be reproduced."""

import argparse
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import selfspec
from selfspec.errors import InvalidParameterError
from selfspec.runtimes.accelerators import device_name
from selfspec.runtimes.kernel_build import choose_level, processor_name

DIRTY_HELP = "measure in a checkout with uncommitted changes; the result and its pages say so"

_GIT_SECONDS = 20
_RESULTS = (":(top,exclude)benchmarks/results", ":(top,exclude)docs")
"""What benchmarks write. Changes there do not change what is measured."""
_FOLDERS = re.compile(r"(?:(?<=[\s=:+,'])|^)/(?:[^\s/]+/)+")
"""Absolute paths, up to the name of the file."""


def check_clean(dirty: bool) -> None:
    """Refuses to measure in a checkout with uncommitted changes: its results could not be reproduced.

    Every command that writes a result calls it before it loads a model.

    Args:
        dirty: measure all the same (``--dirty``).

    Raises:
        InvalidParameterError: there are changes or new files outside of results and pages.
    """
    if not dirty and git_state(Path(selfspec.__file__))[1]:
        raise InvalidParameterError(
            "the checkout has uncommitted changes, so the result could not be reproduced; commit them, or insist with "
            "--dirty"
        )


def parse_and_check(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    writes: Callable[[argparse.Namespace], bool] = lambda _: True,
) -> argparse.Namespace:
    """Parses the options of a script, with ``--dirty``; checks the checkout if the script then writes a result."""
    parser.add_argument("--dirty", action="store_true", help=DIRTY_HELP)
    options = parser.parse_args(arguments)
    try:
        check_clean(options.dirty or not writes(options))
    except InvalidParameterError as error:
        parser.error(str(error))
    return options


def commit_text(stamp: Mapping[str, Any], digits: int = 12) -> str:
    """The commit of a result, as pages show it."""
    commit = stamp["commit"][:digits] if stamp["commit"] else "none (not a checkout)"
    return f"{commit}, with uncommitted changes" if stamp["dirty"] else commit


def make_stamp(device: torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Makes the stamp of a result, with the versions of further packages.

    Returns:
        ``date`` (UTC), ``command``, ``commit`` and ``dirty`` (``None`` outside of a checkout), ``versions``,
        ``hardware``, ``threads``, and the ``load_average`` of the last minute, a sign of other work on the machine
        (``None`` if the system has none).
    """
    commit, dirty = git_state(Path(selfspec.__file__))
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shown_command(sys.argv),
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
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "memory_bytes": _memory_bytes(),
            "device": device_name(device),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "kernels": choose_level().name,
        },
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def shown_command(arguments: Sequence[str]) -> str:
    """A command line to measure the same again, without the folders of this machine.

    Args:
        arguments: the program's name and its arguments.
    """
    program, rest = _FOLDERS.sub("", arguments[0]), arguments[1:]
    by_module = program == "__main__.py"  # python -m selfspec
    return _FOLDERS.sub("", shlex.join(["selfspec" if by_module else program, *rest]))


def package_version(name: str) -> str | None:
    """The version of an installed package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(file: Path) -> tuple[str | None, bool | None]:
    """The commit of a file's checkout, and whether it has changes or new files beside results and pages.

    Both are ``None`` if the repository does not track the file, as in a virtual environment inside another checkout.
    """
    folder = file.parent
    if _git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return None, None
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--", ":/", *_RESULTS)
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
