"""The first request of ``auto`` on a machine that knows nothing of the model, beside later ones of the same process."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from auto_worst import encode
from selfspec import Engine
from selfspec.files import cache_folder
from selfspec_lab.prompts import CHAT_PROMPTS
from selfspec_lab.widening import load_model

LATER = 5
"""Later requests in each process."""
_SECONDS = 1800


def measure(model: str, new_tokens: int, repeats: int, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Starts ``auto`` in processes with an empty cache folder; the kernels are there, as in a wheel.

    Args:
        model: its name; it is unpacked to bfloat16.
        new_tokens: of each answer.
        repeats: processes for each prompt.
        progress: is called with a line of text for each process.

    Returns:
        By prompt the seconds of the ``first`` request of each process, those ``later`` (medians of each process), and
        the median ``ratio`` of both; loading is in neither.
    """
    found: dict[str, Any] = {}
    for name in CHAT_PROMPTS:
        seconds = [_run(model, name, new_tokens) for _ in range(repeats)]
        first, later = [own[0] for own in seconds], [statistics.median(own[1:]) for own in seconds]
        ratio = statistics.median(before / after for before, after in zip(first, later, strict=True))
        found[name] = {"first": first, "later": later, "ratio": ratio}
        progress(f"{name}: first request ÷ later ones {ratio:.2f}")
    return found


def _run(model: str, prompt: str, new_tokens: int) -> list[float]:
    """The seconds of the requests of one process."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / cache_folder().name
        fresh.mkdir()
        for library in cache_folder().glob("kernels-*"):
            shutil.copy(library, fresh)
        answer = subprocess.run(
            [sys.executable, "-m", __name__, model, prompt, str(new_tokens)],
            env={**os.environ, "XDG_CACHE_HOME": folder, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    seconds: list[float] = json.loads(answer.stdout.splitlines()[-1])
    return seconds


def _answer(model: str, prompt: str, new_tokens: int) -> list[float]:
    """In the process: answers a prompt several times."""
    engine = Engine(*load_model(model, dtype="bfloat16", device="cpu", unpack=True), "auto")
    ids = encode(engine, prompt)
    seconds = []
    for _ in range(1 + LATER):
        start = time.perf_counter()
        engine.generate(ids, max_new_tokens=new_tokens, ignore_eos=True)
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    print(json.dumps(_answer(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
