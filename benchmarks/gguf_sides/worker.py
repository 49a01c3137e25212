"""A process with one side: ``python -m gguf_sides.worker NAME JSON``, a question a line in, an answer a line out."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def make_side(name: str, arguments: dict[str, Any]) -> Any:
    """Loads a side by name; only its own modules are imported."""
    if name == "LeanLlamaCpp":
        from gguf_sides.lean import LeanLlamaCpp

        return LeanLlamaCpp(**arguments)
    module, _, own = name.rpartition(".")
    return getattr(import_module(module or "gguf_sides.sides"), own)(**arguments)


def main(name: str, arguments: str) -> None:
    """Loads, says so, and answers until there are no more questions."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def reply(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        side = make_side(name, json.loads(arguments))
        reply(answer="loaded")
        for line in sys.stdin:
            question = json.loads(line)
            reply(answer=getattr(side, question["do"])(**question["with"]))
    except Exception as error:  # the parent says which side failed, and why
        reply(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
