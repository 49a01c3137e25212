"""Measurements in files of the user's cache folder, one for each model, device, dtype, runtime and version.

``selfspec profile`` keeps a whole cost model. Latencies of one row that a method measured have a file of their own.
"""

import contextlib
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from selfspec.files import cache_folder, replace_file
from selfspec.runtimes.costs.parts import LatencyProfile, device_name, measure_latencies
from selfspec.runtimes.kernel_build import choose_level, processor_name
from selfspec.runtimes.precision import AnyPrecision
from selfspec.runtimes.target import Target, fingerprint

_VERSION = 1


def profile_key(target: Target) -> dict[str, Any]:
    """What a file is valid for. A cache folder may be shared between machines, so the processor counts."""
    on_cpu = target.device.type == "cpu"
    return {
        "version": _VERSION,
        **fingerprint(target),
        "device": device_name(target.device),
        "runtime": target.runtime,
        "cache_bits": target.cache_bits,
        "processor": processor_name(),
        "kernels": choose_level().name if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else None,
        "torch": torch.__version__,
        "selfspec": version("selfspec"),
    }


def kept_path(target: Target, folder: str, *about: object) -> Path:
    """The file of what was measured of a model, and of what it is ``about``, by ``repr``; it need not exist."""
    key = json.dumps(profile_key(target), sort_keys=True)
    others = (_digest(repr(each))[:8] for each in about)
    return cache_folder() / folder / ".".join((_digest(key)[:24], *others, "json"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def profile_path(target: Target) -> Path:
    """The file of a model's profile, whether it exists or not."""
    return kept_path(target, "profiles")


def read_profile(target: Target) -> dict[str, Any] | None:
    """The kept profile of a model, if there is one that can be read; what ``selfspec profile`` prints."""
    return read_kept(profile_path(target), target)


def read_kept(path: Path, target: Target) -> dict[str, Any] | None:
    """What ``write_kept`` wrote into a file for the same ``profile_key``; ``None`` without it."""
    try:
        kept: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept["profile"] if isinstance(kept, dict) and kept.get("key") == profile_key(target) else None


def latencies_path(target: Target) -> Path:
    """The file of the latencies that a method measured, whether it exists or not."""
    return kept_path(target, "latencies")


def read_latencies(target: Target) -> LatencyProfile | None:
    """The kept latencies of one row, else those of the kept profile, else ``None``.

    Those that a method measured come first: they replace the profile's where live rounds disagreed with it. A new
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
    """The latencies of one row with low-bit weights: kept ones, else measured now and kept."""
    path = kept_path(target, "latencies", precision)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return LatencyProfile.from_dict((read_kept(path, target) or {})["latencies"])
    latencies = measure_latencies(target, precision=precision)
    write_kept(path, target, {"latencies": latencies.to_dict()})
    return latencies


def keep_latencies(target: Target, latencies: LatencyProfile) -> Path | None:
    """Keeps latencies of one row for later processes, replacing older ones; see ``write_kept``."""
    return write_kept(latencies_path(target), target, {"latencies": latencies.to_dict()})


def keep_profile(target: Target, profile: dict[str, Any]) -> Path | None:
    """Writes a model's profile, replacing an older one and kept latencies; see ``write_kept``."""
    path = write_kept(profile_path(target), target, profile)
    if path is not None:
        with contextlib.suppress(OSError):
            latencies_path(target).unlink(missing_ok=True)
    return path


def write_kept(path: Path, target: Target, profile: dict[str, Any]) -> Path | None:
    """Writes what was measured of a model, as JSON, with what it is valid for (``profile_key``).

    ``None`` where it could not be written: then it is measured again another time.
    """
    content = json.dumps({"key": profile_key(target), "profile": profile}, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError:
        return None
    return path
