"""Stores results of experiments in a folder: a JSON file and a picture each."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from selfspec.errors import InvalidParameterError
from selfspec.files import replace_file
from selfspec.loading import parse_device
from selfspec_lab.bench.stamp import make_stamp
from selfspec_lab.checks import conclude
from selfspec_lab.experiments.base import EXPERIMENTS, Data, Experiment
from selfspec_lab.experiments.lab import Lab

_DPI = 110
_SAME = ("commit", "dirty", "versions", "hardware", "threads")
"""What a stamp says of the state and the machine."""


def run_experiment(experiment: Experiment, lab: Lab) -> dict[str, Any]:
    """Measures a claim and computes its status.

    Returns:
        The result, ready for JSON: ``name``, ``model``, ``quick``, ``seed``, ``stamp``, ``seconds`` that it took,
        ``status``, ``checks`` and ``data``.
    """
    start = time.perf_counter()
    data = json.loads(json.dumps(experiment.measure(lab), allow_nan=False))  # as it is read from the file
    return {
        "experiment": experiment.name,
        "model": lab.model or experiment.model,
        "quick": lab.quick,
        "seed": lab.seed,
        "stamp": make_stamp(_device(lab)),
        "seconds": round(time.perf_counter() - start),
        **judged(experiment, data, lab.model or experiment.model),
        "data": data,
    }


def find_kept(experiment: Experiment, lab: Lab, folder: Path) -> dict[str, Any] | None:
    """The result in a folder that this lab would measure again: of the same model, amount, seed, state and machine.

    So a run of many experiments that was stopped goes on after those that it has finished.
    """
    path, stamp = folder / f"{experiment.name}.json", make_stamp(_device(lab))
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        same = all(kept["stamp"][name] == stamp[name] for name in _SAME)
        found = (kept["model"], kept["quick"], kept["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or an older one
    asked = (lab.model or experiment.model, lab.quick, lab.seed)
    return _read(path, experiment) if same and asked == found and not stamp["dirty"] else None


def judged(experiment: Experiment, data: Data, model: str) -> dict[str, Any]:
    """Computes ``status``, ``checks`` and ``unfit`` from data, ready for JSON.

    Args:
        experiment: the experiment.
        data: its measurements.
        model: the model's name; if it cannot show the claim, ``unfit`` says why.
    """
    checks = experiment.judge(data)
    unfit = experiment.unfit.get(model, "")
    status = "not applicable" if unfit else conclude(checks)
    return {"status": status, "unfit": unfit, "checks": [check.to_dict() for check in checks]}


def save_result(experiment: Experiment, result: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Writes a result and its picture, replacing older files.

    Returns:
        The JSON file and the picture.

    Raises:
        InvalidParameterError: they cannot be written.
    """
    result_path, picture_path = folder / f"{experiment.name}.json", folder / f"{experiment.name}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(result_path, _text(result))
        picture = io.BytesIO()
        experiment.draw(result["data"]).savefig(picture, format="png", dpi=_DPI)
        replace_file(picture_path, picture.getvalue())
    except OSError as error:
        raise InvalidParameterError(f"the result cannot be written to '{folder}': {error.strerror or error}") from error
    return result_path, picture_path


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the results in a folder, of one model or of the experiments' own, and computes their statuses.

    Returns:
        Results by name of the experiment, in the order of the claims.

    Raises:
        InvalidParameterError: a file is not a result.
    """
    paths = {name: folder / f"{name}.json" for name in EXPERIMENTS}
    return {name: _read(path, EXPERIMENTS[name]()) for name, path in paths.items() if path.is_file()}


def read_folders(folder: Path) -> dict[Path, dict[str, dict[str, Any]]]:
    """Reads the results in a folder and in the folders inside it, one of each model.

    Returns:
        What ``read_results`` returns, by folder; only folders with results.

    Raises:
        InvalidParameterError: there is no result, or a file is not one.
    """
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = {path: results for path in (folder, *inside) if (results := read_results(path))}
    if not found:
        raise InvalidParameterError(f"there are no results of experiments in '{folder}'; run: selfspec experiments run")
    return found


def _text(result: dict[str, Any]) -> str:
    """A result as JSON, with a list of numbers on one line: rounds are many."""
    text = json.dumps(result, indent=1, allow_nan=False)
    return re.sub(r'\[\n[^\[\]{}"]*\]', lambda numbers: re.sub(r"\s+", " ", numbers[0]), text) + "\n"


def _read(path: Path, experiment: Experiment) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return {**result, **judged(experiment, result["data"], result["model"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidParameterError(f"'{path}' is not the result of an experiment: {error}") from error


def _device(lab: Lab) -> torch.device:
    return parse_device(lab.device)
