"""What ``run.py`` knows of a client."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from served import Served

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """What a client runs in.

    Attributes:
        python: of the client's environment; of npm's, where it would be.
        server: to ask.
        name: of the model that is served.
        tokenizer: folder with the served model and its tokenizer.
        folder: for files.
        quick: make a short run, whose figures are not for the report.
    """

    python: Path
    server: Served
    name: str
    tokenizer: Path
    folder: Path
    quick: bool

    def program(self, name: str) -> Path:
        """A program of the client's environment."""
        return self.python.parent / name

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None, **options: Any) -> str:
        """Runs a command without network but the server; gives what it prints.

        Args:
            *command: program and arguments.
            env: more environment variables.
            **options: of ``subprocess.run``.
        """
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hub"), "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            command,
            env={**clean, **offline, **(env or {})},
            stdout=subprocess.PIPE,
            text=True,
            **{"check": True, **options},
        )
        return str(done.stdout)


@dataclass(frozen=True)
class Client:
    """A client and what is done with it.

    Attributes:
        name: of its package; of npm's, with its version.
        packages: what pip installs; the first calls of pip come first.
        run: asks the server; gives ``holds`` (whether all is as it has to be) and figures.
        model: that is served; or what makes one in a folder.
        options: of ``selfspec serve``.
        program: Python's arguments for ``selfspec``.
    """

    name: str
    packages: Sequence[str]
    run: Callable[[Setting], dict[str, Any]]
    model: str | Callable[[Path], Path] = "smollm2"
    options: Sequence[str] = field(default=())
    program: Sequence[str] = ("-m", "selfspec")

    @property
    def is_node(self) -> bool:
        """Whether it is a package of npm: then ``name`` has its version, and there are no ``packages``."""
        return not self.packages
