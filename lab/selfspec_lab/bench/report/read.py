"""Reads and checks the folder of a run."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.types import Round
from selfspec_lab.bench.run.folder import DESCRIPTION, MEASUREMENTS
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.inspection import PHASES
from selfspec_lab.measuring import LatencyProfile

_FIELDS: dict[str, tuple[type, ...]] = {
    "stamp": (dict,),
    "options": (dict,),
    "parameters": (int,),
    "sublayers": (int,),
    "settings": (dict,),
    "ordered": (bool,),
    "prompts": (list,),
    "skipped": (list,),
    "copy_bytes_per_second": (int, float),
    "latencies": (dict,),
    "failures": (dict,),
}
_STAMP = ("date", "commit", "dirty", "versions", "hardware", "threads")
_OPTIONS = ("model", "widen", "methods", "peers", "suite", "max_new_tokens", "temperature", "repeats", "seed")
_PROMPT = ("key", "category", "tokens")
_SKIPPED = ("key", "category", "reason")
_TIMES = ("prefill_seconds", "decode_seconds")
_COUNTS = ("repeat", "turn", "position", "prompt_token_count", "peak_memory_bytes")
_NAMES = ("prompt", "category", "candidate")


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder.

    Attributes:
        folder: its path.
        fields: the object in ``run.json``.
        measurements: the lines of ``results.jsonl``.
    """

    folder: Path
    fields: dict[str, Any]
    measurements: list[Measurement]

    @property
    def sublayers(self) -> int:
        """Number of sublayers of the model, ``2L``."""
        return int(self.fields["sublayers"])

    @cached_property
    def latencies(self) -> LatencyProfile:
        """Time of one row in each part of the model, measured before the run."""
        return LatencyProfile.from_dict(self.fields["latencies"])

    @cached_property
    def categories(self) -> dict[str, int]:
        """Number of prompts by category, in the order of their first prompts."""
        counts: dict[str, int] = {}
        for prompt in self.fields["prompts"]:
            counts[prompt["category"]] = counts.get(prompt["category"], 0) + 1
        return counts


def read_run(folder: Path) -> Run:
    """Reads a run.

    An incomplete last line of ``results.jsonl`` is ignored.

    Args:
        folder: the run's folder.

    Raises:
        InvalidParameterError: it is not the folder of a run; the message names file and line.
    """
    fields = _read_description(folder / DESCRIPTION)
    return Run(folder, fields, _read_measurements(folder / MEASUREMENTS, fields))


def _read_description(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InvalidParameterError(
            f"'{path.parent}' holds no run: there is no {path.name}; make one: selfspec bench run"
        )
    try:
        fields = json.loads(_bytes_of(path), parse_constant=_refuse_constant)
        _check_description(fields)
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"'{path}' does not describe a run: {error}") from error
    return dict(fields)


def _check_description(fields: Any) -> None:
    if not isinstance(fields, dict) or fields.get("benchmark") != "run":
        raise ValueError("it should be an object with benchmark = run")
    for name, types in _FIELDS.items():
        value = fields.get(name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{name} is {'missing' if name not in fields else f'no {types[0].__name__}'}")
    if fields["sublayers"] < 2 or fields["sublayers"] % 2:
        raise ValueError(f"sublayers should be an even number of at least 2, not {fields['sublayers']}")
    _check_names(fields["stamp"], _STAMP, "stamp")
    _check_names(fields["options"], _OPTIONS, "options")
    for list_name, names in (("prompts", _PROMPT), ("skipped", _SKIPPED)):
        for number, each in enumerate(fields[list_name], start=1):
            _check_names(each, names, f"number {number} of {list_name}")
    layers = LatencyProfile.from_dict(fields["latencies"]).layers
    if 2 * layers != fields["sublayers"]:
        raise ValueError(f"its latencies are of {layers} layers, but it has {fields['sublayers']} sublayers")


def _check_names(value: Any, names: Iterable[str], where: str) -> None:
    missing = [name for name in names if not isinstance(value, Mapping) or name not in value]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def _read_measurements(path: Path, fields: Mapping[str, Any]) -> list[Measurement]:
    if not path.is_file():
        raise InvalidParameterError(
            f"'{path.parent}' holds no run: there is no {path.name}; make one: selfspec bench run"
        )
    *lines, _cut_off = _bytes_of(path).split(b"\n")
    known = {prompt["key"]: prompt["category"] for prompt in fields["prompts"]}
    measurements: dict[tuple[str, str, int], Measurement] = {}
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line, parse_constant=_refuse_constant)
            measurement = Measurement.from_dict(values, fields["sublayers"])
            _check_measurement(measurement, known)
            if measurement.key in measurements:
                raise ValueError("a line above has the same prompt, candidate and repeat")
        except (KeyError, TypeError, ValueError, AttributeError, SelfSpecError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidParameterError(
                f"'{path}', line {number}: not a measurement of this run ({reason}); remove the line, or run it again"
            ) from error
        measurements[measurement.key] = measurement
    if not measurements:
        raise InvalidParameterError(f"'{path}' has no measurement yet; continue the run: selfspec bench run --resume")
    return list(measurements.values())


def _check_measurement(measurement: Measurement, categories: Mapping[str, str]) -> None:
    for name in _NAMES:
        _expect(isinstance(getattr(measurement, name), str), f"{name} should be text")
    for name in _COUNTS:
        _expect(_is_count(getattr(measurement, name)), f"{name} should be a whole number")
    for name in _TIMES:
        _expect(_is_amount(getattr(measurement, name)), f"{name} should be a number of at least 0")
    _expect(measurement.identical in (None, True, False), "identical should be true, false or null")
    _expect(measurement.error is None or isinstance(measurement.error, str), "error should be text or null")
    _expect(measurement.prompt in categories, f"run.json has no prompt {measurement.prompt!r}")
    _expect(categories[measurement.prompt] == measurement.category, "run.json has another category for this prompt")
    if measurement.error is not None:
        return
    _expect(bool(measurement.token_ids), "an output without an error has tokens")
    if measurement.bytes is not None:
        _expect(all(map(_is_count, vars(measurement.bytes).values())), "bytes should be whole numbers")
    if measurement.rounds is not None:
        for record in measurement.rounds:
            _check_round(record)
        committed = tuple(token_id for record in measurement.rounds for token_id in record.token_ids)
        after_prefill = measurement.token_ids[1:]
        _expect(committed == after_prefill, "its rounds have other tokens than the output")


def _check_round(record: Round) -> None:
    counts = (record.drafted, record.candidates, record.accepted)
    _expect(all(map(_is_count, counts)), "drafted, candidates and accepted should be whole numbers")
    _expect(record.accepted <= record.drafted <= record.candidates, "a round accepts no more than it drafts")
    _expect(isinstance(record.threshold, (int, float, type(None))), "threshold should be a number or null")
    _expect(all(_is_amount(getattr(record.seconds, phase)) for phase in PHASES), "seconds should be numbers")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidParameterError(f"'{path}' cannot be read: {error.strerror or error}") from error
