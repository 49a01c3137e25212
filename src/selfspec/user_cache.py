"""The user's cache folder. Its contents can be recreated and may be deleted at any time."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The folder of compiled kernels, latency profiles, unpacked models and the chat history."""
    if sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        return Path(os.environ["LOCALAPPDATA"]) / "selfspec" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"
