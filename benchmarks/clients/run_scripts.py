"""Clients that a script of checks uses: ``openai`` and ``langchain-openai``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from client import HERE, Client, Setting


def checks_of(script: str) -> Callable[[Setting], dict[str, Any]]:
    """Runs a script in the client's environment.

    Args:
        script: in this folder.
    """

    def run(setting: Setting) -> dict[str, Any]:
        made = json.loads(setting.run(setting.python, HERE / script, setting.server.url, setting.name))
        return {"holds": all(check["holds"] for check in made), "checks": made}

    return run


FLOAT32 = ("--dtype", "float32")

OPENAI = Client("openai", ["openai==3.54.0"], checks_of("with_openai.py"), options=(*FLOAT32, "--method", "low-bit"))
LANGCHAIN = Client("langchain-openai", ["langchain-openai==1.7.3"], checks_of("with_langchain.py"), options=FLOAT32)
