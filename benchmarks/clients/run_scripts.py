"""Clients that a script of checks uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agent_model import make_chat_model
from client import HERE, Client, Setting


def checks_of(script: str) -> Callable[[Setting], dict[str, Any]]:
    """Runs a script in the client's environment.

    Args:
        script: in this folder.
    """

    def run(setting: Setting) -> dict[str, Any]:
        printed = setting.run(setting.python, HERE / script, setting.server.url, setting.name)
        made = json.loads(printed.splitlines()[-1])  # some clients print more than the checks
        return {"holds": all(check["holds"] for check in made), "checks": made}

    return run


FLOAT32 = ("--dtype", "float32")

OPENAI = Client("openai", ["openai==3.54.0"], checks_of("with_openai.py"), options=(*FLOAT32, "--method", "low-bit"))
LANGCHAIN = Client(
    "langchain-openai",
    ["langchain-openai==1.7.3"],
    checks_of("with_langchain.py"),
    model=make_chat_model,
    options=FLOAT32,
)
ANTHROPIC = Client("anthropic", ["anthropic==2.12.0"], checks_of("with_anthropic.py"), model=make_chat_model)
LITELLM = Client("litellm", ["litellm<1.109 mcp"], checks_of("with_litellm.py"), model=make_chat_model)
INSTRUCTOR = Client("instructor", ["instructor==1.17.0"], checks_of("with_instructor.py"), model=make_chat_model)
