"""Measurements in files of the user's cache folder, one for each model, device, dtype, runtime and version.

``selfspec profile`` keeps a whole cost model. Latencies of one row that a method measured have a file of their own.
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from selfspec.runtimes.accelerators import device_name
from selfspec.runtimes.costs.parts import LatencyProfile, measure_latencies
from selfspec.runtimes.kept_file import KeptFile
from selfspec.runtimes.kernel_build import choose_level, processor_name
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target, fingerprint

_VERSION = 1
PROFILES, LATENCIES = "profiles", "latencies"


def profile_key(target: Target) -> dict[str, Any]:
    """What a file is valid for. A cache folder may be shared between machines, so the processor counts."""
    on_cpu = target.device.type == "cpu"
    return {
        "version": _VERSION,
        **fingerprint(target),
        "device": device_name(target.device),
        "runtime": target.runtime if target.trial is None else target.chosen_runtime,
        "cache_bits": target.cache_bits,
        "processor": processor_name(),
        "kernels": choose_level().name if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else None,
        "torch": torch.__version__,
        "selfspec": version("selfspec"),
    }


def kept_file(target: Target, folder: str, *about: object) -> KeptFile:
    """The file of what was measured of a model, and of what it is ``about``; it is valid for ``profile_key``."""
    kind = KeptFile if target.ranks.count == 1 else _UnusedFile
    return kind(folder, profile_key(target), *about)


class _UnusedFile(KeptFile):
    """The file of a model that processes share, which may not have the same files: nothing is read or written."""

    def read(self) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def write(self, kept: Mapping[str, Any]) -> Path | None:
        """Does nothing."""
        return None

    def remove(self) -> None:
        """Does nothing."""


def read_latencies(target: Target) -> LatencyProfile | None:
    """The kept latencies of one row, else those of the kept profile, else ``None``.

    Those that a method measured come first: they replace the profile's where live rounds disagreed with it. A new
    ``selfspec profile`` removes them.
    """
    return _latencies_of(kept_file(target, LATENCIES)) or _latencies_of(kept_file(target, PROFILES))


def kept_latencies(target: Target, precision: Precision) -> LatencyProfile:
    """The latencies of one row with low-bit weights: kept ones, else measured now and kept."""
    file = kept_file(target, LATENCIES, precision)
    found = _latencies_of(file)
    if found is None:
        found = measure_latencies(target, precision=precision)
        file.write({"latencies": found.to_dict()})
    return found


def keep_latencies(target: Target, latencies: LatencyProfile) -> Path | None:
    """Keeps latencies of one row for later processes, replacing older ones; ``None`` if that failed."""
    return kept_file(target, LATENCIES).write({"latencies": latencies.to_dict()})


def _latencies_of(file: KeptFile) -> LatencyProfile | None:
    try:
        return LatencyProfile.from_dict((file.read() or {})["latencies"])
    except (KeyError, TypeError, ValueError):
        return None
