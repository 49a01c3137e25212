"""The memory of this process (Linux)."""

from __future__ import annotations

from pathlib import Path


def resident_memory() -> dict[str, int]:
    """Resident bytes now and at their peak, pages of mapped files included."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.strip()}
    return {"resident_bytes": 1024 * int(sizes["VmRSS"]), "peak_bytes": 1024 * int(sizes["VmHWM"])}
