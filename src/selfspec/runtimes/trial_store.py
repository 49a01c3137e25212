"""When a trial is run, and where its result is kept: once for a device, its driver, the versions and the model."""

import logging
import os
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from selfspec.errors import DeviceError, DeviceMemoryWarning, first_line
from selfspec.limits import is_out_of_memory
from selfspec.memory import free_bytes
from selfspec.model.decoder import Decoder
from selfspec.runtimes.accelerators import describe_device, device_name
from selfspec.runtimes.candidates import CANDIDATES, Candidate
from selfspec.runtimes.device_trial import Trial
from selfspec.runtimes.kept_file import KeptFile
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.trial_table import DeviceTrial, Tried

_LOGGER = logging.getLogger(__name__)

_VERSION = 1
"""Of the trial; raised where candidates or what is compared change, so that all devices are tried again."""

_FOLDER = "trials"
_PACKAGES = ("torch", "transformers", "selfspec", "triton")
_MORE_MEMORY = 1.25
"""Times as much free memory as at a trial that lacked some, from which on it is made again."""


def find_trial(decoder: Decoder, identity: Mapping[str, Any]) -> DeviceTrial:
    """The kept trial of a model on its device, or one that is made now and kept.

    What is out for want of memory is said once, by a ``DeviceMemoryWarning``.

    Args:
        decoder: the model.
        identity: what a model is known by (``target.fingerprint``).

    Raises:
        DeviceError: a candidate made the device useless for this process; the next one leaves it out.
    """
    device = decoder.like.device
    key = trial_key(decoder, identity)
    kept, begun = KeptFile(_FOLDER, key), KeptFile(_FOLDER, key, "begun")
    found = _read(kept)
    if found is not None and not _has_more_memory(found, free_bytes(device)):
        return found

    def begin(name: str) -> None:
        _LOGGER.info("trying how this model runs on %s: %s", device_name(device), name)
        begun.write({"candidate": name, "process": os.getpid()})

    try:
        trial = Trial(decoder, CANDIDATES, skipped=_unfinished(begun), begin=begin).run()
    except DeviceError:
        raise
    except Exception as error:  # of the reference: a request that does the same will say it
        trial = _reference_alone(decoder, error)
    else:
        kept.write(trial.to_dict())
        begun.write({})
    if trial.lacked_memory:
        _warn(f"the trial of this model on {trial.device} left out {', '.join(trial.lacked_memory)}")
    return trial


def build_fastest(trial: DeviceTrial, decoder: Decoder) -> tuple[Candidate, Runner]:
    """The fastest runtime that passed and can be built now; of those that fail, the next one is taken."""
    candidates = {each.name: each for each in CANDIDATES}
    usable = [candidates[name] for name in trial.order if name in candidates]
    for each in usable[:-1]:
        try:
            return each, each.build(decoder)
        except Exception as error:
            if is_out_of_memory(error):
                _warn(f"the runtime '{each.name}' was left out")
    return usable[-1], usable[-1].build(decoder)


def trial_key(decoder: Decoder, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a trial is valid for."""
    device = {name: value for name, value in describe_device(decoder.like.device).items() if name != "free_bytes"}
    return {
        "version": _VERSION,
        "device": device,
        "versions": {name: _version(name) for name in _PACKAGES},
        "candidates": [each.name for each in CANDIDATES],
        "model": dict(identity),
    }


def _reference_alone(decoder: Decoder, error: Exception) -> DeviceTrial:
    """The table where the reference failed, so that nothing could be compared with it; it is not kept."""
    reference, *others = CANDIDATES
    lacked_memory, reason = is_out_of_memory(error), f"'{reference.name}' failed: {first_line(error)}"
    out = [Tried(each.name, reason=reason, lacked_memory=lacked_memory) for each in others]
    return DeviceTrial(device_name(decoder.like.device), (Tried(reference.name), *out))


def _read(file: KeptFile) -> DeviceTrial | None:
    try:
        return DeviceTrial.from_dict(file.read() or {})
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _has_more_memory(trial: DeviceTrial, free: int | None) -> bool:
    """Whether what a trial left out for want of memory may fit now."""
    if not trial.lacked_memory or free is None or trial.free_bytes is None:
        return False
    return free > _MORE_MEMORY * trial.free_bytes


def _unfinished(begun: KeptFile) -> dict[str, str]:
    """The candidate that ended an earlier process in its trial, with that reason; one that runs now does not count."""
    found = begun.read() or {}
    name, process = found.get("candidate"), found.get("process")
    if not isinstance(name, str) or process == os.getpid() or _lives(process):
        return {}
    return {name: "an earlier process ended while it was tried"}


def _lives(process: object) -> bool:
    """Whether there is a process of that number, where the system tells (Linux)."""
    return Path(f"/proc/{process}").exists()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _warn(what: str) -> None:
    warnings.warn(
        f"{what}: there is not enough memory; a smaller batch (max_batch) or no low-bit weights (memory_limit=0) leave "
        "more",
        DeviceMemoryWarning,
        stacklevel=4,
    )
