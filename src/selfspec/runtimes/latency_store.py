"""Latency profiles in files: one for each model, device, dtype and runtime.

``selfspec profile`` keeps a whole cost model. A method that needs only the latencies of one row remembers those in a
file of their own, so that later processes select with the same ones.
"""

import contextlib
import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from selfspec.files import cache_folder, replace_file
from selfspec.runtimes.fingerprint import fingerprint
from selfspec.runtimes.latency import LatencyProfile, device_name, measure_latencies
from selfspec.runtimes.levels import LEVEL_VARIABLE, processor_name
from selfspec.runtimes.precision import AnyPrecision
from selfspec.runtimes.target import Target

_VERSION = 1


def profile_key(target: Target) -> dict[str, Any]:
    """What a stored profile is valid for: model and dtype, device, processor, runtime, threads, versions.

    The processor counts, since a cache folder may be shared between machines or move to another one.
    """
    on_cpu = target.device.type == "cpu"
    return {
        "version": _VERSION,
        **fingerprint(target),
        "device": device_name(target.device),
        "runtime": target.runtime,
        "processor": processor_name(),
        "kernels": os.environ.get(LEVEL_VARIABLE) if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else None,
        "torch": torch.__version__,
        "selfspec": version("selfspec"),
    }


def profile_path(target: Target) -> Path:
    """The file of a model's profile, whether it is there or not."""
    digest = hashlib.sha256(json.dumps(profile_key(target), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "profiles" / f"{digest[:24]}.json"


def read_profile(target: Target) -> dict[str, Any] | None:
    """The kept profile of a model, if there is one that can be read; what ``selfspec profile`` prints."""
    return read_kept(profile_path(target), target)


def read_kept(path: Path, target: Target) -> dict[str, Any] | None:
    """What ``write_kept`` wrote for this model, device, runtime and version of torch; ``None`` without it.

    Args:
        path: the file.
        target: the model.
    """
    try:
        kept: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept["profile"] if isinstance(kept, dict) and kept.get("key") == profile_key(target) else None


def latencies_path(target: Target) -> Path:
    """The file of the latencies that a method measured, whether it is there or not."""
    return profile_path(target).parent.with_name("latencies") / profile_path(target).name


def read_latencies(target: Target) -> LatencyProfile | None:
    """The latencies of one row: remembered ones, else those of the kept profile, else ``None``.

    Remembered ones come first because they replace the profile's where live rounds disagreed with it; a new
    ``selfspec profile`` removes them.
    """
    for found in (read_kept(latencies_path(target), target), read_profile(target)):
        try:
            if found is not None:
                return LatencyProfile.from_dict(found["latencies"])
        except (KeyError, TypeError, ValueError):
            continue
    return None


def kept_latencies(target: Target, precision: AnyPrecision) -> LatencyProfile:
    """The latencies of one row on low-bit copies: remembered ones, else measured now and remembered.

    Args:
        target: the model.
        precision: of the copies; those that are lacking are made.
    """
    digest = hashlib.sha256(repr(precision).encode()).hexdigest()[:8]
    path = latencies_path(target).with_suffix(f".{digest}.json")
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return LatencyProfile.from_dict((read_kept(path, target) or {})["latencies"])
    latencies = measure_latencies(target, precision=precision)
    write_kept(path, target, {"latencies": latencies.to_dict()})
    return latencies


def keep_latencies(target: Target, latencies: LatencyProfile) -> Path | None:
    """Remembers latencies of one row for later processes, replacing older ones; see ``keep_profile``."""
    return write_kept(latencies_path(target), target, {"latencies": latencies.to_dict()})


def keep_profile(target: Target, profile: dict[str, Any]) -> Path | None:
    """Writes a model's profile, replacing an older one and remembered latencies.

    Returns:
        The file, or ``None`` where it could not be written: then it is measured again another time.
    """
    path = write_kept(profile_path(target), target, profile)
    if path is not None:
        with contextlib.suppress(OSError):
            latencies_path(target).unlink(missing_ok=True)
    return path


def write_kept(path: Path, target: Target, profile: dict[str, Any]) -> Path | None:
    """Writes what was measured of a model, with what it is valid for (``profile_key``).

    Args:
        path: the file; its folder is made.
        target: the model.
        profile: what JSON can represent.

    Returns:
        The file, or ``None`` where it could not be written: then it is measured again another time.
    """
    content = json.dumps({"key": profile_key(target), "profile": profile}, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError:
        return None
    return path
