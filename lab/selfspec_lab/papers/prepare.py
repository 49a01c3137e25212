"""What the methods of a table are tuned to before it is measured; kept in the folder of the results."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfspec import Engine, Prompt
from selfspec.errors import InvalidParameterError
from selfspec.files import replace_file
from selfspec.methods import make_method
from selfspec_lab.exit_grid import ExitChoice, search_exit
from selfspec_lab.papers.tables import Row, Table
from selfspec_lab.tuning import tune, write_profile

TUNED = "tuned.json"

PROMPTS_BYTES = 2**30
"""Most bytes of the prompts' keys and values during a search."""

SEARCH_TOKENS = 32
"""Longest outputs of Draft & Verify's search, which decodes with every set."""


@dataclass(frozen=True)
class Tuned:
    """The settings of the methods of a table.

    Attributes:
        settings: by the paper's name of the method.
        states: by the paper's name, a state file for ``Engine.load_state``.
        exit: the exit layer and draft length of the grid search; ``None`` without one.
    """

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    exit: ExitChoice | None = None


def tune_methods(
    table: Table,
    plain: Engine,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    max_new_tokens: int,
    iterations: int,
    asked: Mapping[str, Any],
    progress: Callable[[str], None],
) -> Tuned:
    """Tunes what the table says, or reads what an earlier run has tuned.

    Args:
        table: the table.
        plain: plain decoding.
        prompts: calibration prompts.
        folder: of the results.
        max_new_tokens: length of the calibration outputs.
        iterations: sets that Draft & Verify's search measures; the paper's has 1000.
        asked: what it is tuned for, ready for JSON.
        progress: is called with a line of text before each step.

    Raises:
        InvalidParameterError: there are no calibration prompts, or the file of an earlier run is damaged or was tuned
            for something else.
    """
    path, asked = folder / TUNED, json.loads(json.dumps(asked))
    if path.exists():
        return _read(path, folder, asked)
    tunes = {row.tune for row in table.methods.values()}
    if tunes != {None} and not prompts:
        raise InvalidParameterError("the suite has no questions left to tune on; lower --limit, or name a longer one")
    exit_choice = None
    if tunes & {"exit", "exit-layer", "fixed-exit"}:
        progress(f"grid search of exit layer and draft length on {len(prompts)} texts")
        exit_choice = search_exit(plain, prompts, max_new_tokens)
    states = {}
    for label, row in table.methods.items():
        if row.tune == "skipped":
            progress(f"Draft & Verify's search: {iterations} sets on {len(prompts)} texts")
            states[label] = f"{label}.state"
            _search_sets(plain, row, prompts, min(max_new_tokens, SEARCH_TOKENS), iterations, folder / states[label])
    settings = {label: _settings(row, exit_choice, plain.target.layer_count) for label, row in table.methods.items()}
    kept = {"asked": asked, "settings": settings, "states": states, "exit": exit_choice and asdict(exit_choice)}
    replace_file(path, json.dumps(kept, indent=1) + "\n")
    return _read(path, folder, asked)


def _read(path: Path, folder: Path, asked: Mapping[str, Any]) -> Tuned:
    try:
        kept: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name, value in asked.items() if kept["asked"][name] != value]
        choice = None if kept["exit"] is None else ExitChoice(**kept["exit"])
        tuned = Tuned(kept["settings"], {name: str(folder / file) for name, file in kept["states"].items()}, choice)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidParameterError(f"'{path}' is damaged ({error}); delete it to tune again") from error
    if different:
        raise InvalidParameterError(f"'{path}' was tuned for another {', '.join(different)}; name another --out")
    return tuned


def _settings(row: Row, choice: ExitChoice | None, layers: int) -> dict[str, Any]:
    settings = dict(row.settings)
    if row.exit_share is not None:
        settings["exit_layer"] = max(1, round(row.exit_share * layers))
    if choice is not None:
        found: dict[str | None, dict[str, Any]] = {
            "exit": {"exit_layer": choice.exit_layer, "draft_length": choice.draft_length},
            "exit-layer": {"exit_layer": choice.exit_layer},
            "fixed-exit": {"fixed_exit": choice.exit_layer},
        }
        settings |= found.get(row.tune, {})
    return settings


def _search_sets(
    plain: Engine, row: Row, prompts: Sequence[Prompt], max_new_tokens: int, iterations: int, path: Path
) -> None:
    """Draft & Verify's offline search for tokens per second; writes the best set as a state file."""
    target = plain.target
    method = make_method(row.method, target, row.settings)
    engine = Engine(target.model, plain.tokenizer, method, prefix_cache=PROMPTS_BYTES)  # it reads each prompt once
    trials = list(tune(engine, prompts, iterations=iterations, max_new_tokens=max_new_tokens))
    write_profile(engine, max(trials, key=lambda trial: trial.tokens_per_second), len(trials), path)
