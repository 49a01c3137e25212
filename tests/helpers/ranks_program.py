"""What each of several processes runs that share a tiny model: ``torchrun … ranks_program.py FOLDER OUT SIGNAL``.

First, what came of everything is written to ``OUT/RANK.json``. Then they generate until rank 1 ends or stops in the
middle of it, by ``SIGNAL``; the error that the others get is printed, and after how long. ``-`` leaves either out.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import MaxTimeCriteria

from helpers.auto import eager_preparation, give
from helpers.models import prompt
from selfspec import AsyncEngine, Engine, SamplingParams, load_model
from selfspec.errors import SelfSpecError
from selfspec.model import identity

TEXT, REPEATING, LENGTH = prompt(12), prompt(5) * 5, 20
UNIFORM = {"skip_ratio": 0.5, "draft_length": 4, "confidence_threshold": 0.0}
CASES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "plain": ("autoregressive", None, {}),
    "skipping": ("uniform", UNIFORM, {}),
    "selecting": ("swift", None, {}),
    "n-gram": ("prompt-lookup", None, {}),
    "auto": ("auto", None, {}),
    "sampled": ("uniform", UNIFORM, {"temperature": 0.8}),
    "seeded": ("uniform", UNIFORM, {"temperature": 0.8, "seed": 5}),
    "auto by its clock": ("auto", None, {}),
    "for a time": ("uniform", UNIFORM, {"stopping_criteria": [MaxTimeCriteria(0.4)], "max_new_tokens": 500}),
}
"""By name, a method, its settings, and sampling parameters."""

MAY_DRAFT_NOTHING = ("plain", "auto by its clock", "for a time")
RANK = int(os.environ.get("RANK", 0))


def share(model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    torch.manual_seed(RANK)  # samples have to be alike all the same
    found: dict[str, Any] = {"shard": list(model.model.layers[0].self_attn.q_proj.weight.to_local().shape)}
    for name, (method, settings, parameters) in CASES.items():
        params = SamplingParams(**{"max_new_tokens": LENGTH, "ignore_eos": True, **parameters})
        with pytest.MonkeyPatch.context() as patch:
            if name == "auto":
                give(patch, eager_preparation)
            engine = Engine(model, tokenizer, method, settings=settings)
            outputs = engine.generate_each([(TEXT, params), (REPEATING, params)])
        found[name] = [
            {
                "token_ids": each.token_ids,
                "drafted": each.drafted,
                "accepted": each.accepted,
                "rounds": [(played.drafted_by, played.drafted, played.accepted) for played in each.rounds],
            }
            for each in outputs
        ]
    found["fingerprint"] = engine.target.weights_digest
    found["errors"] = {name: error(task) for name, task in wrong(model, folder).items()}
    return found


def wrong(model: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    def of_versions() -> None:
        kept = identity.version
        identity.version = lambda name: f"{kept(name)}+{RANK}"
        try:
            Engine(model)
        finally:
            identity.version = kept

    engine = Engine(model, method="autoregressive")
    return {
        "prompts": lambda: engine.generate([1, 2, 3 + RANK], max_new_tokens=4),
        "parameters": lambda: engine.generate([1, 2, 3], max_new_tokens=4 + RANK),
        "versions": of_versions,
        "weights": lambda: Engine(load_model(folder / ("llama", "other")[RANK], tp_plan="auto")[0]),
        "heads": lambda: Engine(load_model(folder / "llama-multi-query", tp_plan="auto")[0]),
        "family": lambda: load_model(folder / "stablelm", tp_plan="auto"),
        "runtime": lambda: Engine(model, runtime="compiled"),
        "low-bit": lambda: Engine(model, method="low-bit"),
        "files": lambda: Engine(model, cache_dir="texts"),
        "requests": lambda: asyncio.run(AsyncEngine(engine).close()),
    }


def error(task: Callable[[], Any]) -> str:
    try:
        task()
    except SelfSpecError as raised:
        return f"{type(raised).__name__}: {raised}"
    return "none"


def lose(model: Any, number: int) -> None:
    engine = Engine(model, method="uniform", settings=UNIFORM)
    last = time.monotonic()
    try:
        for index, _ in enumerate(engine.stream(TEXT, max_new_tokens=1000)):
            last = time.monotonic()
            if index == 8 and RANK == 1:
                os.kill(os.getpid(), number)
    except SelfSpecError as raised:
        sys.stdout.write(f"{time.monotonic() - last:.1f} s later: {type(raised).__name__}: {raised}\n")
        sys.stdout.flush()
        os._exit(3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    given, out, number = Path(sys.argv[1]), *sys.argv[2:]
    loaded = load_model(given / "llama", tp_plan="auto", dtype="float32")
    if out != "-":
        Path(out, f"{RANK}.json").write_text(json.dumps(share(*loaded, given)))
    if number != "-":
        lose(loaded[0], signal.Signals[number])
    distributed.destroy_process_group()
