"""The user's cache folder: what selfspec keeps there can be made again, and may be deleted at any time."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where selfspec keeps kernels, latency profiles, unpacked models and the history of chats."""
    if sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        return Path(os.environ["LOCALAPPDATA"]) / "selfspec" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"
