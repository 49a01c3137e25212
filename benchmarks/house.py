"""The size of the library, and the files that a greedy round, a prompt and a chat request pass through.

``python benchmarks/house.py --model smollm2``

Code lines are neither blank nor comments nor docstrings. A file counts on a way where one of its functions runs, in any
thread. The first request is not counted: it prepares.
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fastapi.testclient import TestClient

import selfspec
from selfspec import Engine
from selfspec.serve.app import create_app
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.service import Service

LIBRARY = Path(selfspec.__file__).parent


def code_lines(text: str) -> int:
    """Lines of a Python file that are code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for number, line in lines if line.strip() and line.strip()[0] != "#" and number not in docstrings)


def show_size() -> None:
    """Prints files, code lines and all lines of each package."""
    packages: dict[str, list[str]] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        parts = path.relative_to(LIBRARY).parts
        packages.setdefault(parts[0] if len(parts) > 1 else "(top level)", []).append(path.read_text())
    packages["all"] = [text for texts in packages.values() for text in texts]
    for name, texts in packages.items():
        code, lines = sum(map(code_lines, texts)), sum(text.count("\n") for text in texts)
        print(f"{name:12} {len(texts):4} files {code:6} lines of code {lines:6} lines")


@contextmanager
def walked(inside: Callable[[CodeType], bool] = lambda code: True) -> Iterator[dict[str, set[str]]]:
    """Collects by file the functions that run, on threads where a function that ``inside`` names is under way."""
    found: dict[str, set[str]] = {}
    here = threading.local()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event in ("call", "return") and inside(code):
            here.depth = getattr(here, "depth", 0) + (1 if event == "call" else -1)
        if event == "call" and getattr(here, "depth", 0) > 0 and code.co_filename.startswith(str(LIBRARY)):
            found.setdefault(str(Path(code.co_filename).relative_to(LIBRARY)), set()).add(code.co_name)

    threading.setprofile(profile)  # for threads that start from here on
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def show(title: str, files: dict[str, set[str]], *, functions: bool) -> None:
    """Prints a count and the files."""
    print(f"\n{title}: {len(files)} files")
    for name, called in sorted(files.items()):
        print(f"  {name}" + (f": {', '.join(sorted(called))}" if functions else ""))


def main() -> None:
    """Counts and walks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--functions", action="store_true", help="name the functions as well")
    options = parser.parse_args()
    show_size()
    engine = Engine.from_pretrained(options.model, "autoregressive")
    engines = {name: Engine(engine.target.model, engine.tokenizer, name) for name in ("low-bit", "auto")}
    for name, each in {"autoregressive": engine, **engines}.items():
        each.generate("One two three", max_new_tokens=16)
        with walked(lambda code: code.co_name == "run_round") as files:
            each.generate("One two three", max_new_tokens=16)
        show(f"a greedy round, {name}", files, functions=options.functions)
    with walked() as files:
        engines["auto"].generate("One two three", max_new_tokens=16)
    show("a prompt, auto", files, functions=options.functions)
    show("a chat request, auto", walk_chat(engines["auto"]), functions=options.functions)


def walk_chat(engine: Engine) -> dict[str, set[str]]:
    """The files of one chat request, from the HTTP application to its answer; the server's start is not counted."""
    body = {"messages": [{"role": "user", "content": "One two three"}], "max_tokens": 16}
    service = Service(ServedEngine(lambda: engine), ["it"])
    with walked() as files, TestClient(create_app(service)) as client:
        while not service.ready:
            time.sleep(0.1)
        for _ in range(2):
            files.clear()
            client.post("/v1/chat/completions", json=body).raise_for_status()
        return dict(files)


if __name__ == "__main__":
    main()
