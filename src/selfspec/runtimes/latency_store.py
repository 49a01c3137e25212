"""Latency profiles in files: one for each model, device, dtype and runtime."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from selfspec.files import replace_file
from selfspec.runtimes.fingerprint import fingerprint
from selfspec.runtimes.latency import LatencyProfile, device_name
from selfspec.runtimes.target import Target
from selfspec.user_cache import cache_folder

_VERSION = 1


def profile_key(target: Target) -> dict[str, Any]:
    """What a stored profile is valid for: model and dtype, device, runtime, threads, version of torch."""
    return {
        "version": _VERSION,
        **fingerprint(target),
        "device": device_name(target.device),
        "runtime": target.runtime,
        "threads": torch.get_num_threads() if target.device.type == "cpu" else None,
        "torch": torch.__version__,
    }


def profile_path(target: Target) -> Path:
    """The file of a model's profile, whether it is there or not."""
    digest = hashlib.sha256(json.dumps(profile_key(target), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "profiles" / f"{digest[:24]}.json"


def read_profile(target: Target) -> dict[str, Any] | None:
    """The kept profile of a model, if there is one that can be read; what ``selfspec profile`` prints."""
    try:
        kept: Any = json.loads(profile_path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept["profile"] if isinstance(kept, dict) and kept.get("key") == profile_key(target) else None


def read_latencies(target: Target) -> LatencyProfile | None:
    """The latencies of one row out of the kept profile, if there is one that can be read."""
    profile = read_profile(target)
    try:
        return None if profile is None else LatencyProfile.from_dict(profile["latencies"])
    except (KeyError, TypeError, ValueError):
        return None


def keep_profile(target: Target, profile: dict[str, Any]) -> Path | None:
    """Writes a model's profile, replacing an older one.

    Returns:
        The file, or ``None`` where it could not be written: then it is measured again another time.
    """
    path = profile_path(target)
    content = json.dumps({"key": profile_key(target), "profile": profile}, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError:
        return None
    return path
