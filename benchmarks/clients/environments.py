"""Virtual environments, one for each client, since their dependencies clash with each other and with ours."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path


def make(folder: Path, packages: Sequence[str]) -> Path:
    """Makes an environment with packages, unless it is there with the same ones.

    Args:
        folder: of the environment.
        packages: what pip installs, in this order, one call each: torch first, so that no other package chooses it.

    Returns:
        Its Python.

    Raises:
        subprocess.CalledProcessError: pip failed; its output says why.
    """
    python, stamp = folder / "bin" / "python", folder / "packages.json"
    wanted = json.dumps([sys.version, *packages])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=True)
    for package in packages:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *package.split()], check=True)
    stamp.write_text(wanted)
    return python


def versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    """The versions of packages in an environment.

    Args:
        python: of the environment.
        names: of packages.
    """
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    printed = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True).stdout
    found: dict[str, str] = json.loads(printed)
    return found


def make_node(folder: Path, package: str) -> tuple[Path, str]:
    """Makes an environment with a package of npm, unless it is there.

    Args:
        folder: of the environment.
        package: with its version, as ``NAME@VERSION``.

    Returns:
        Where a Python would be beside its programs, and the version that is there.

    Raises:
        subprocess.CalledProcessError: npm failed; its output says why.
    """
    name, _, wanted = package.rpartition("@")
    found = folder / "node_modules" / name / "package.json"
    if not found.is_file() or json.loads(found.read_text())["version"] != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", folder, package], check=True
        )
    return folder / "node_modules" / ".bin" / "python", str(json.loads(found.read_text())["version"])
